"""Several residual streams: where they start, what their matrices are and may be set to, and that every part knows its way."""

from __future__ import annotations

import pytest
import torch
from inputs import WIDE, tokens

from workbench.errors import BadData
from workbench.models.architectures.mhc import sinkhorn
from workbench.models.decomposition import decompose

MHC = [{}, {"mixing": "permutations", "streams": 3}]


@pytest.mark.parametrize("options", [{}, {"dynamic": False}, {"streams": 3}])
def test_hyper_connections_start_as_the_vanilla_decoder(tiny, options):
    ids = torch.arange(11)[None]
    vanilla, model = tiny(dtype=WIDE), tiny("hyper_connections", dtype=WIDE, **options)
    torch.testing.assert_close(model(ids), vanilla(ids), atol=1e-12, rtol=0)


@pytest.mark.parametrize("options", MHC)
def test_without_the_tokens_part_mhc_starts_as_the_vanilla_decoder_but_for_eps(tiny, options):
    """All streams stay alike, and the norms take away that a sublayer reads 1.1 of them."""
    ids, config = torch.arange(11)[None], {"rms_norm_eps": 1e-30}
    vanilla, model = (tiny(n, dtype=WIDE, config=config, **o) for n, o in (("transformer", {}), ("mhc", options)))
    drawn = model(ids)
    with torch.no_grad():
        for matrix in model.mhc.matrices:
            matrix.zero_()
    assert (drawn - model(ids)).abs().max() > 1e-3
    torch.testing.assert_close(model(ids), vanilla(ids), atol=1e-10, rtol=0)


def composite(cache, layers):
    """The product of all h_res of a run, [batch, pos, into, from]."""
    total = torch.eye(cache["blocks.0.hook_attn_h_res"].shape[-1], dtype=WIDE)
    for n in range(layers):
        for kind in ("attn", "mlp"):
            total = cache[f"blocks.{n}.hook_{kind}_h_res"] @ total
    return total


@pytest.mark.parametrize("options", MHC)
def test_what_passes_by_under_mhc_is_shared_out_and_neither_grows_nor_shrinks(awake, options):
    model = awake("mhc", dtype=WIDE, **options)
    _, cache = model.run_with_cache(tokens(model, 7), names_filter=lambda n: n.endswith("h_res"))
    total, one = composite(cache, 3), torch.ones((), dtype=WIDE)
    assert total.min() >= 0
    torch.testing.assert_close(total.sum(-1), one.expand(2, 7, total.shape[-1]), atol=1e-12, rtol=0)  # forward gain
    torch.testing.assert_close(total.sum(-2).amax(-1), one.expand(2, 7), atol=0.05 if not options else 1e-12, rtol=0)
    free = awake("hyper_connections", dtype=WIDE)
    _, cache = free.run_with_cache(tokens(free, 7), names_filter=lambda n: n.endswith("h_res"))
    assert composite(cache, 3).abs().sum(-1).amax() > 1.5


def test_sinkhorn_by_hand():
    """[[1, 3], [1, 1]] has the limit [[a, 1 - a], [1 - a, a]] with a^2 / (1 - a)^2 = 1 / 3."""
    a = 1 / (1 + 3**0.5)
    limit = torch.tensor([[a, 1 - a], [1 - a, a]], dtype=WIDE)
    torch.testing.assert_close(sinkhorn(torch.tensor([[1.0, 3.0], [1.0, 1.0]], dtype=WIDE)), limit, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "options"), [("hyper_connections", {"dynamic": False}), *(("mhc", o) for o in MHC)]
)
def test_the_matrices_of_a_run_are_its_path_weights(awake, architecture, options):
    model = awake(architecture, dtype=WIDE, **options)
    ids = tokens(model, 6)
    _, cache = model.run_with_cache(ids)
    for to in (0, 1, None, "logits"):
        for by in ("layer", "head"):
            assert decompose(model, cache, to, by).error < 1e-10
    single = model.run_with_cache(ids[:1], remove_batch_dim=True)[1]
    torch.testing.assert_close(decompose(model, single).parts, decompose(model, cache).parts[:, 0])
    torch.testing.assert_close(single.decompose_resid().sum(0), single["resid_post", 2])
    with pytest.raises(BadData, match="hook_attn_h_res is missing: streams mix by token"):
        model.stream_paths(3)


def test_what_is_done_to_the_mean_is_done_to_every_stream(awake):
    model = awake("hyper_connections", dtype=WIDE)
    ids = tokens(model, 6)
    shown = ["blocks.0.hook_streams", "blocks.0.hook_resid_post", "blocks.1.hook_resid_pre", "blocks.1.hook_attn_h_pre"]
    _, before = model.run_with_cache(ids, names_filter=shown)
    everywhere = [("blocks.0.hook_streams", lambda x, hook: x + 2.0)]
    mean = [("blocks.0.hook_resid_post", lambda x, hook: x + 2.0)]
    torch.testing.assert_close(
        model.run_with_hooks(ids, fwd_hooks=mean), model.run_with_hooks(ids, fwd_hooks=everywhere), atol=1e-12, rtol=0
    )
    torch.testing.assert_close(before["resid_post", 0], before["blocks.0.hook_streams"].mean(2))
    read = torch.einsum("bps,bpsm->bpm", before["blocks.1.hook_attn_h_pre"], before["blocks.0.hook_streams"])
    torch.testing.assert_close(before["resid_pre", 1], read)
