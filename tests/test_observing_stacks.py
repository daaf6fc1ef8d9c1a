"""Foreign stacks that are not what they look like: no number is shown that the module does not compute, and it is said why."""

from __future__ import annotations

import pytest
import torch
from observed import see
from odd_stacks import Headed, Outside, Scaled, Streams, hybrid, sinking, talking
from strangers import GPT, HEADS, LAYERS, large

import workbench
from workbench.errors import WorkbenchError
from workbench.hook_names import STATISTICS


def seen(module, ids, *names):
    """What passes out of the named modules in a plain run, by name; of a tuple the first."""
    kept, handles = {}, []
    for name in names:
        part = module.get_submodule(name)
        handles.append(part.register_forward_hook(lambda m, a, out, name=name: kept.update({name: out})))
    module(ids)
    for handle in handles:
        handle.remove()
    return [kept[name] for name in names]


def note(observed, site, layer):
    row = observed.sites.set_index(["site", "layer"]).loc[(site, layer)]
    return row["found"], row["note"]


@pytest.mark.parametrize("make", [Outside, Streams])
@torch.no_grad()
def test_what_the_attention_reads_is_no_stream_where_additions_stand_outside(make, ids):
    """Every layer reads a normed input, whose norm is the same everywhere and says nothing of the stream."""
    observed = see(large(make()), ids)
    assert observed.architecture == "unknown"
    for layer in range(LAYERS):
        found, why = note(observed, "stream", layer)
        assert not found
        assert "the stream is kept outside" in why
    with pytest.raises(WorkbenchError, match="the stream is kept outside"):
        observed.run_with_cache(ids, names_filter="blocks.1.hook_resid_pre")
    assert workbench.measure(observed, "value_norm", ids)["layer"].nunique() == LAYERS


@pytest.mark.fast(1)
@pytest.mark.parametrize("block", [None, Scaled])
@torch.no_grad()
def test_a_block_without_attention_keeps_its_number_and_shows_its_stream(block, ids):
    """Also where what is added is scaled."""
    module = large(hybrid(**({"block": block} if block else {})))
    observed = see(module, ids)
    assert (observed.config.n_layers, observed.architecture) == (LAYERS, "unknown")
    assert "no attention that can be read in layers 0 (transformer.h.0), 2 (transformer.h.2)" in repr(observed)
    _, cache = observed.run_with_cache(ids)
    for layer, out in enumerate(seen(module, ids, *(f"transformer.h.{i}" for i in range(LAYERS)))):
        assert torch.equal(cache[f"blocks.{layer}.hook_resid_post"], out)
    assert [n for n in cache if n.endswith("attn.hook_v")] == ["blocks.1.attn.hook_v"]
    assert workbench.measure(observed, "row_entropy", ids)["layer"].unique().tolist() == [1]
    assert observed.value_paths()["layer"].unique().tolist() == [1]
    with pytest.raises(WorkbenchError, match="no attention that can be read"):
        observed.run_with_cache(ids, names_filter="blocks.0.attn.hook_v")


@torch.no_grad()
def test_a_pattern_that_is_no_distribution_has_no_entropy(ids):
    observed = see(large(GPT(attend=talking)), ids)
    for site in ("pattern", *STATISTICS):
        found, why = note(observed, site, 1)
        assert not found
        assert "no distribution" in why
    with pytest.raises(WorkbenchError, match="no distribution"):
        observed.run_with_cache(ids, names_filter="blocks.1.attn.hook_row_entropy")
    assert workbench.measure(observed, "value_norm", ids)["value"].notna().all()


@torch.no_grad()
def test_a_pattern_that_is_none_on_other_tokens_is_told_when_it_comes(ids):
    def sometimes(q, k, v, layer):
        future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        pattern = (q @ k.mT * 8**-0.5).masked_fill(future, float("-inf")).softmax(-1)
        return pattern * (2.0 if q.shape[2] < 40 else 0.5) @ v

    observed = see(large(GPT(attend=sometimes)), ids)
    point = "blocks.1.attn.hook_received"
    received = observed.run_with_cache(ids, names_filter=point)[1][point]
    torch.testing.assert_close(received.sum(-1), torch.full((2, HEADS), 20.0))
    with pytest.raises(WorkbenchError, match="layer 1: the weights of the values are no distribution"):
        observed.run_with_cache(ids[:, :20], names_filter=point)


@pytest.mark.fast(1)
@pytest.mark.parametrize("form", ["eager", "fused"])
def test_a_sink_that_is_folded_in_after_the_attention_is_one_of_its_rows(form, ids):
    observed = see(large(GPT(attend=sinking(form))), ids)
    for site in ("row_entropy", "sink", "pattern", "rot_q"):
        found, why = note(observed, site, 1)
        assert not found
        assert "a sink takes its share" in why
    assert note(observed, "v", 1) == (True, "")


@torch.no_grad()
def test_the_last_stream_is_what_the_last_block_made_whatever_a_head_makes_of_it(ids):
    module = large(Headed())
    point = f"blocks.{LAYERS - 1}.hook_resid_post"
    _, cache = see(module, ids).run_with_cache(ids, names_filter=point)
    assert torch.equal(cache[point], seen(module, ids, f"transformer.h.{LAYERS - 1}")[0])
