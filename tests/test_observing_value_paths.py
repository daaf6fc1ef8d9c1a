"""Where the values of foreign decoders come from: coefficients to a millionth, and architectures named by them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hidden_mixes import MIXED, SHARES, UNMIXED, Apart, HeadNorm, mixed
from observed import LAMBDAS, see, stranger
from strangers import GPT, HEADS, D, DenselyMixed, HeadwiseMixed, eagerly, large, split
from torch import nn

from workbench.models.decomposition import decompose


@pytest.mark.fast(1)
@pytest.mark.parametrize("form", [None, "baddbmm"])
def test_hidden_lambdas_come_back_to_a_millionth(form, ids):
    observed = see(large(GPT(LAMBDAS, eagerly(form)) if form else GPT(LAMBDAS)), ids)
    paths = observed.value_paths().set_index(["layer", "source"])
    assert paths["residual"].max() < 1e-6
    for layer, (first, own) in enumerate(LAMBDAS[1:], 1):
        assert abs(paths.loc[(layer, "first"), "coefficient"] - first) < 1e-6
        assert abs(paths.loc[(layer, "own"), "coefficient"] - own) < 1e-6
    assert paths.loc[(0, "own"), "coefficient"] == pytest.approx(1, abs=1e-6)
    assert observed.architecture == "resformer"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "architecture", "options"),
    [
        ("fused", "transformer", {}),
        ("repeated heads", "transformer", {}),
        ("shared values", "svformer", {"anchors": (0,)}),
        ("pulled", "neutreno", {"neutreno_lambda": 0.37}),
        ("bare matrix", "resformer", {"lambda_v1": 0.3, "lambda_own": 0.7}),
        ("nested outputs", "resformer", {"lambda_v1": 0.5, "lambda_own": 0.5}),
        ("dense", "resformer_dense", {}),
        ("averaged", "denseformer", {}),
        ("headwise", "unknown", {}),
    ],
)
def test_architectures_are_named_by_their_value_paths(name, architecture, options):
    *_, observed = stranger(name)
    assert observed.architecture == architecture
    assert observed.options == {
        k: pytest.approx(v, abs=1e-6) if isinstance(v, float) else v for k, v in options.items()
    }


LEARNED = ("dwa", "attention_residuals.q", "satformer", "gated_value_embedding")  # at the start they pass everything on


def awake(tiny, architecture, **options):
    """One of ours whose learned weights are not those of its start."""
    model, generator = tiny(architecture, **options), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.startswith(LEARNED):
                p += 0.3 * torch.randn(p.shape, generator=generator)
    return model


@pytest.mark.slow
@pytest.mark.fast(4)
@pytest.mark.parametrize(
    ("architecture", "named"),
    [*((name, name) for name in (
        "resformer+neutreno", "residual_hidden", "value_embedding", "resformer+denseformer", "satformer", "gated_value_embedding",
        "value_gate",
    )), ("share_k", "unknown")],
)  # fmt: skip
def test_our_own_architectures_are_recognised_from_outside(tiny, architecture, named, ids):
    assert see(awake(tiny, architecture), ids).architecture == named


@pytest.mark.parametrize("options", [{"depth_blocks": 3, "depth_heads": 2}])
@torch.no_grad()
def test_attention_residuals_are_named_and_taken_apart_as_from_inside(tiny, options, ids):
    model = awake(tiny, "attention_residuals", **options).double()
    observed = see(model, ids)
    assert (observed.architecture, observed.options) == ("attention_residuals", options)
    parts, true = (decompose(m, ids, "logits", "value_path", tokens=5) for m in (observed, model))
    for label in ("embed", "L1H2.own", "2_mlp_out"):
        torch.testing.assert_close(parts[label], true[label])
    sums = observed.value_paths().query("into == 'stream'").set_index(["layer", "source"])
    _, cache = model.run_with_cache(ids)
    weights = cache["blocks.0.hook_depth_weights"]  # of what block 1 reads
    if not options:
        names = ["embed", "0_attn_out", "0_mlp_out"]
        rows = sums.loc[[(1, name) for name in names]]
        assert rows["coefficient"].tolist() == pytest.approx(weights.mean((0, 1, 2)).tolist(), abs=0.02)
        assert rows["spread"].min() > 0


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", ["q", "k"])
def test_mixed_queries_and_keys_are_told_behind_their_rotation(tiny, name, ids):
    """Coefficients come from positions that are not turned and are checked by the lengths of all others."""
    observed = see(tiny(f"residual_{name}", **{f"lambda_{name}1": -0.3, f"lambda_{name}_own": 0.8}), ids)
    assert observed.options == pytest.approx({f"lambda_{name}1": -0.3, f"lambda_{name}_own": 0.8}, abs=1e-6)
    paths = observed.value_paths()
    found = paths[paths["into"] == {"q": "query", "k": "key"}[name]].set_index(["layer", "source"])["coefficient"]
    assert found.to_dict() == pytest.approx(
        {(n, s): c for n in (1, 2) for s, c in (("first", -0.3), ("own", 0.8))}, abs=1e-6
    )


class NormedMixture(Apart):
    """Mixed queries are normed, so that their lengths say nothing."""

    def forward(self, x, memory):
        q = self.q(x)
        q = (
            HeadNorm.forward(self, 0.3 * memory["q"] + 0.7 * q)
            if memory.setdefault("q", q) is not q
            else HeadNorm.forward(self, q)
        )
        y = F.scaled_dot_product_attention(*(split(z) for z in (q, self.k(x), self.v(x))), is_causal=True)
        return self.o(y.transpose(1, 2).reshape(x.shape))


class NormedAndTurned(Apart):
    """The norm is a module, and rotary positions follow."""

    def __init__(self, layer):
        super().__init__(layer)
        self.norm = nn.RMSNorm(D // HEADS)

    def forward(self, x, memory):
        q, k, v = (split(f(x)) for f in (self.q, self.k, self.v))
        q = self.norm(0.3 * memory["q"] + 0.7 * q if memory.setdefault("q", q) is not q else q)
        half = D // HEADS // 2
        angle = torch.arange(x.shape[1])[:, None] / 100 ** (torch.arange(half) / half)
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        q, k = (y * cos + torch.cat((-y[..., half:], y[..., :half]), -1) * sin for y in (q, k))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))


@pytest.mark.fast(1)
@pytest.mark.parametrize("turned", [False, True])
def test_queries_that_are_normed_after_they_are_mixed_show_the_ratio_of_their_weights(turned, ids):
    """In a function without rotation, or in a module before it."""

    def make(layer):
        attention = (NormedAndTurned if turned else NormedMixture)(layer)
        attention.weight = nn.Parameter(torch.ones(D // HEADS))
        return attention

    observed = see(large(GPT(attention=make)), ids)
    paths = observed.value_paths().query("into == 'query'").set_index(["layer", "source"])["coefficient"]
    share = {"first": 0.3, "own": 0.7}
    assert paths.to_dict() == pytest.approx({(n, s): share[s] for n in (1, 2) for s in share}, abs=1e-6)
    assert (observed.architecture, observed.options) == ("residual_q", {})
    assert "layer 1 query = 0.3 first + 0.7 own, then a norm" in repr(observed)


def shares(q, k, v, layer, kept={}):  # noqa: B006 - what the first layer of each pair leaves for the second
    kept[layer] = k, v
    return F.scaled_dot_product_attention(q, *kept[layer - layer % 2], is_causal=True)


def test_sparse_mixing_sharing_and_mere_scaling_are_told_apart(ids):
    sparse = see(large(GPT([(1, 1), (0, 1), (5, 1)])), ids)
    assert (sparse.architecture, sparse.options["layers"]) == ("resformer", (2,))
    assert sparse.options["lambda_v1"] == pytest.approx(5, abs=1e-6)
    assert see(large(GPT(attend=shares)), ids).architecture == "cla"
    scaled = see(large(GPT([(1, 1), (0, 0.5), (0, 0.5)])), ids)
    assert scaled.architecture == "unknown"


@pytest.mark.slow
def test_several_layers_and_heads_with_coefficients_of_their_own(ids):
    dense = see(large(GPT(attention=DenselyMixed)), ids).value_paths()
    found = dense[dense["layer"] == 2].set_index("source")["coefficient"]
    assert found.loc["first"] == pytest.approx(0.5, abs=1e-6)
    assert found.loc[1] == pytest.approx(0.6, abs=1e-6)
    assert found.loc["own"] == pytest.approx(0.7, abs=1e-6)
    heads = see(large(GPT(attention=HeadwiseMixed)), ids).value_paths()
    first = heads[(heads["layer"] == 1) & (heads["source"] == "first")]
    assert first["head"].tolist() == [0, 1, 2, 3]
    assert first["coefficient"].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=1e-6)


@torch.no_grad()
def test_a_copy_observes_the_copied_module(ids):
    observed = see(large(GPT(LAMBDAS)), ids)
    other = copy.deepcopy(observed)
    other.foreign.transformer["h"][1].attn.lambdas = (0.9, 0.2)
    point = "blocks.1.attn.hook_v_mix"
    for model, first in ((observed, 0.3141592), (other, 0.9)):
        assert model.run_with_cache(ids, point)[1][point][0].item() == pytest.approx(first, abs=1e-6)
        paths = model.value_paths()
        assert paths[paths["layer"] == 1]["coefficient"].iloc[0] == pytest.approx(first, abs=1e-6)
    assert not torch.equal(observed(ids), other(ids))


# ---- mixed where it does not show -----------------------------------------------------------------------------------


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", list(MIXED)[::3])
@torch.no_grad()
def test_a_mixture_is_told_wherever_it_is_made(name, ids):
    """In a submodule, inside the projection, before an identity or a dropout: any of their outputs equals the values."""
    module = large(MIXED[name]())
    observed = see(module, ids)
    assert (observed.architecture, list(observed.options)) == ("resformer", ["lambda_v1", "lambda_own"])
    paths = observed.value_paths().query("layer > 0")
    assert paths["coefficient"].tolist() == pytest.approx([*SHARES] * 2, abs=1e-6)
    assert paths["residual"].max() < 1e-6
    names = [f"blocks.{point}.hook_v" for point in ("0.attn", "1.attn", "1.attn.own", "1.attn.source.0")]
    logits, cache = observed.run_with_cache(ids, names_filter=names)
    first, mixed, own, source = (cache[name] for name in names)
    torch.testing.assert_close(mixed, SHARES[0] * first + SHARES[1] * own, atol=1e-6, rtol=1e-5)
    assert torch.equal(source, first)
    with observed.hooks([(names[2], lambda v, hook: v * 2)]):
        assert not torch.equal(observed(ids), logits), "own values are written where they are read"


@pytest.mark.slow
@pytest.mark.parametrize("name", list(UNMIXED)[::3])
def test_values_that_are_normed_adapted_or_of_an_unseen_product_are_their_own(name, ids):
    observed = see(large(UNMIXED[name]()), ids)
    assert observed.architecture == "transformer"
    assert observed.sites.query("site == 'own_v'")["found"].all()


def test_a_norm_after_the_mixture_leaves_something_unexplained_and_it_is_said(ids):
    observed = see(large(mixed(end=HeadNorm)), ids)
    assert observed.architecture == "unknown"
    assert observed.value_paths().query("layer == 1")["residual"].min() > 0.1
    assert "of its value is unexplained" in repr(observed)


def test_a_first_layer_whose_values_are_no_product_is_not_said_to_be_its_own(ids):
    observed = see(large(GPT(attention=lambda i: Apart(i, end=nn.SiLU))), ids)
    assert observed.architecture == "unknown"
    assert "layer 0 value = ? (residual 1.0e+00)" in repr(observed)
