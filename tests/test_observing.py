"""Observing other people's decoders: not a bit of their output changes, and what is seen is what they compute."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from strangers import (
    GPT,
    LAYERS,
    VOCABULARY,
    Averaged,
    D,
    DenselyMixed,
    GroupedAttention,
    HeadwiseMixed,
    Inline,
    InPlaceBlock,
    ListOfHeads,
    Looped,
    Pair,
    Paper,
    Pulled,
    RawMatrix,
    SharedValues,
    eagerly,
    large,
)
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import workbench
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.interventions import replaced, token_means
from workbench.kernels.attention import statistics_of
from workbench.metrics import METRICS
from workbench.names import STATISTICS
from workbench.observing.masks import kind_of

LAMBDAS = [(1.0, 1.0), (0.3141592, 0.7), (-0.125, 1.7320508)]
STREAMED = [  # all but a slow one, and those that read an output matrix, which an observed module need not have
    name for name, metric in METRICS.items()
    if metric.form != "derived" and name != "token_probe" and "W_O" not in metric.arguments
]  # fmt: skip
STRANGERS = {
    "fused": GPT,
    "hidden lambdas": lambda: GPT(LAMBDAS),
    "torch.softmax": lambda: GPT(LAMBDAS, eagerly("torch")),
    "F.softmax": lambda: GPT(LAMBDAS, eagerly("functional")),
    "tensor.softmax": lambda: GPT(LAMBDAS, eagerly("method")),
    "einsum": lambda: GPT(LAMBDAS, eagerly("einsum")),
    "baddbmm": lambda: GPT(LAMBDAS, eagerly("baddbmm")),
    "repeated heads": lambda: GPT(attention=GroupedAttention),
    "grouped heads": lambda: GPT(attention=lambda i: GroupedAttention(i, "gqa", scale=0.2)),
    "grouped einsum": lambda: GPT(attention=lambda i: GroupedAttention(i, "einsum")),
    "shared values": lambda: GPT(attention=SharedValues),
    "pulled": lambda: GPT(attention=Pulled),
    "headwise": lambda: GPT(attention=HeadwiseMixed),
    "dense": lambda: GPT(attention=DenselyMixed),
    "bare matrix": lambda: GPT(attention=RawMatrix),
    "in place": lambda: GPT(block=InPlaceBlock),
    "averaged": Averaged,
    "looped": Looped,
    "nested outputs": Paper,
    "inline": Inline,
}


@pytest.fixture
def ids():
    return torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))


def see(module, ids, **options):
    return workbench.observe(module, ids, quiet=True, **options)


def logits_of(output):
    return output["logits"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output


def pattern_of(cache, layer):
    """Naive pattern from what the cache calls rotated queries and keys."""
    q, k = cache[f"blocks.{layer}.attn.hook_rot_q"], cache[f"blocks.{layer}.attn.hook_rot_k"]
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores, scores.softmax(-1)


# ---- what is seen ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRANGERS)
@torch.no_grad()
def test_no_bit_of_the_output_changes_and_nothing_stays_behind(name, ids):
    module = large(STRANGERS[name]())
    plain = logits_of(module(ids)).clone()
    state = {key: value.clone() for key, value in module.state_dict().items()}
    observed = see(module, ids)
    cached, cache = observed.run_with_cache(ids)
    assert torch.equal(plain, observed(ids))
    assert torch.equal(plain, cached)
    assert torch.equal(plain, logits_of(module(ids)))
    assert len(cache) > 30
    for part in module.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
    assert all(torch.equal(state[key], value) for key, value in module.state_dict().items())


@pytest.mark.parametrize("name", STRANGERS)
@torch.no_grad()
def test_values_pattern_and_statistics_are_those_the_module_computes(name, ids):
    observed = see(large(STRANGERS[name]()), ids)
    names = [n for n in observed.hook_dict if not n.endswith(("attn_scores", "hook_pattern"))]
    _, cache = observed.run_with_cache(ids, names_filter=names)
    for i in range(LAYERS):
        scores, pattern = pattern_of(cache, i)
        torch.testing.assert_close(cache[f"blocks.{i}.attn.hook_pattern"].double(), pattern, atol=1e-6, rtol=1e-5)
        for statistic in STATISTICS:
            found = cache[f"blocks.{i}.attn.hook_{statistic}"].double()
            wanted = getattr(statistics_of(scores, pattern), statistic)
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5, msg=f"{statistic} of layer {i}")
        if name != "pulled":
            v = (
                cache[f"blocks.{i}.attn.hook_v"]
                .double()
                .repeat_interleave(pattern.shape[1] // cache[f"blocks.{i}.attn.hook_v"].shape[2], dim=2)
            )
            z = torch.einsum("bhij,bjhd->bihd", pattern, v)
            torch.testing.assert_close(cache[f"blocks.{i}.attn.hook_z"].double(), z, atol=2e-6, rtol=1e-5)
        if name != "averaged" and i:
            assert torch.equal(cache[f"blocks.{i}.hook_resid_pre"], cache[f"blocks.{i - 1}.hook_resid_post"])
        if name == "averaged" and i == LAYERS - 1:
            continue  # what leaves the last block for the final norm is an average too
        added = cache[f"blocks.{i}.hook_attn_out"] + cache[f"blocks.{i}.hook_mlp_out"]
        stream = cache[f"blocks.{i}.hook_resid_post"] - cache[f"blocks.{i}.hook_resid_pre"]
        torch.testing.assert_close(added, stream, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["hidden lambdas", "einsum", "bare matrix", "nested outputs"])
@torch.no_grad()
def test_named_values_equal_those_worked_out_by_hand(name, ids):
    module = large(STRANGERS[name]())
    observed = see(module, ids)
    made = {}
    blocks = module.layers if name == "nested outputs" else module.transformer.h
    pairs = {"bare matrix": [(0, 1), (0.3, 0.7), (0.3, 0.7)], "nested outputs": [(0, 1), (0.5, 0.5), (0.5, 0.5)]}.get(
        name, [(0, 1), *LAMBDAS[1:]]
    )
    handles = [
        b.attn.register_forward_pre_hook(
            lambda m, a, k, i=i: made.update({i: k.get("x", a[0] if a else None)}), with_kwargs=True
        )
        for i, b in enumerate(blocks)
    ]
    module(ids)
    for handle in handles:
        handle.remove()
    _, cache = observed.run_with_cache(ids)
    matrix = {
        "bare matrix": lambda a, x: x @ a.wv,
        "nested outputs": lambda a, x: a.v_proj(x),
    }.get(name, lambda a, x: a.c_attn(x)[..., 2 * D :])
    own = [matrix(b.attn, made[i]).unflatten(-1, (4, 8)) for i, b in enumerate(blocks)]
    for i, (first, mine) in enumerate(pairs):
        torch.testing.assert_close(cache[f"blocks.{i}.attn.own.hook_v"], own[i], atol=1e-6, rtol=0)
        torch.testing.assert_close(
            cache[f"blocks.{i}.attn.hook_v"], first * own[0] + mine * own[i], atol=1e-6, rtol=1e-6
        )
        if i:
            torch.testing.assert_close(cache[f"blocks.{i}.attn.first.hook_v"], own[0], atol=1e-6, rtol=0)
            torch.testing.assert_close(
                cache[f"blocks.{i}.attn.hook_v_mix"], torch.tensor([first, mine]), atol=1e-6, rtol=0
            )


@torch.no_grad()
def test_grouped_heads_are_not_counted_twice(ids):
    """Keys and values repeated by hand, by the call, or by an einsum are the same two heads."""
    caches = []
    for mode in ("repeat", "gqa", "einsum"):
        observed = see(large(GPT(attention=lambda i, m=mode: GroupedAttention(i, m))), ids)
        assert (observed.config.n_heads, observed.config.n_key_value_heads, observed.config.d_head) == (4, 2, 8)
        caches.append(observed.run_with_cache(ids)[1])
    for name in ("q", "k", "rot_q", "rot_k", "v", "own.v", "z", "received"):
        point = f"blocks.1.attn.{'own.hook_v' if name == 'own.v' else f'hook_{name}'}"
        for other in caches[1:]:
            torch.testing.assert_close(caches[0][point], other[point], atol=1e-5, rtol=1e-5)
    assert caches[0]["blocks.1.attn.hook_v"].shape == (2, 40, 2, 8)


@torch.no_grad()
def test_streams_that_are_written_over_are_kept_as_they_were(ids):
    plain, over = (see(large(GPT(block=block)), ids) for block in (GPT.__init__.__kwdefaults__["block"], InPlaceBlock))
    one, other = (model.run_with_cache(ids)[1] for model in (plain, over))
    for i in range(LAYERS):
        torch.testing.assert_close(one[f"blocks.{i}.hook_resid_pre"], other[f"blocks.{i}.hook_resid_pre"])


@torch.no_grad()
def test_what_a_hook_computes_itself_is_no_call_of_the_module(ids):
    """Products and softmaxes inside a caller's hooks must not be taken for the module's attention."""
    observed = see(large(GPT(LAMBDAS, eagerly("torch"))), ids)
    _, clean = observed.run_with_cache(ids)
    kept = {}

    def busy(tensor, hook):
        x = torch.einsum("btd,bsd->bts", tensor, tensor).softmax(-1) @ tensor
        kept[hook.name] = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])

    def keep(tensor, hook):
        kept["v"] = tensor

    with observed.hooks(
        [("blocks.1.hook_resid_pre", busy), ("blocks.1.attn.hook_v", keep), ("blocks.1.hook_attn_out", busy)]
    ):
        observed(ids)
    assert torch.equal(kept["v"], clean["blocks.1.attn.hook_v"])


@torch.no_grad()
def test_nothing_stays_behind_after_an_error_in_a_hook(ids):
    module = large(GPT(LAMBDAS))
    observed = see(module, ids)
    plain = observed(ids)

    def fails(tensor, hook):
        raise RuntimeError("a caller's own")

    for point in ("hook_resid_pre", "attn.own.hook_v", "attn.hook_v", "attn.hook_received"):
        with pytest.raises(RuntimeError, match="a caller's own"), observed.hooks([(f"blocks.1.{point}", fails)]):
            observed(ids)
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
        assert torch.equal(observed.run_with_cache(ids)[0], plain)


def test_an_idle_run_is_the_module_and_nothing_else(ids, monkeypatch):
    observed = see(large(GPT()), ids)

    def never(*args, **kwargs):
        raise AssertionError("somebody listens")

    monkeypatch.setattr("workbench.observing.observed.Listening", never)
    observed(ids)
    with pytest.raises(AssertionError, match="somebody listens"):
        observed.run_with_cache(ids)


# ---- where values come from ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [None, "torch", "einsum", "baddbmm"])
def test_hidden_lambdas_come_back_to_a_millionth(form, ids):
    observed = see(large(GPT(LAMBDAS, eagerly(form)) if form else GPT(LAMBDAS)), ids)
    paths = observed.value_paths().set_index(["layer", "source"])
    assert paths["residual"].max() < 1e-6
    for layer, (first, own) in enumerate(LAMBDAS[1:], 1):
        assert abs(paths.loc[(layer, "first"), "coefficient"] - first) < 1e-6
        assert abs(paths.loc[(layer, "own"), "coefficient"] - own) < 1e-6
    assert paths.loc[(0, "own"), "coefficient"] == pytest.approx(1, abs=1e-6)
    assert observed.architecture == "resformer"


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
def test_architectures_are_named_by_their_value_paths(name, architecture, options, ids):
    observed = see(large(STRANGERS[name]()), ids)
    assert observed.architecture == architecture
    assert observed.options == {
        k: pytest.approx(v, abs=1e-6) if isinstance(v, float) else v for k, v in options.items()
    }


@pytest.mark.parametrize(
    "architecture", ["transformer", "resformer", "svformer", "neutreno", "denseformer", "resformer+neutreno"]
)
def test_our_own_architectures_are_recognised_from_outside(tiny, architecture, ids):
    model = tiny(architecture)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.startswith("dwa"):  # at the start its averages pass everything on
                p += 0.1
    assert see(model, ids).architecture == architecture


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


def test_values_that_no_path_explains_are_said_to_be_unexplained(ids):
    def squared(q, k, v, layer):
        return F.scaled_dot_product_attention(q, k, v * v if layer else v, is_causal=True)

    observed = see(large(GPT(attend=squared)), ids)
    paths = observed.value_paths()
    assert paths[paths["layer"] == 1]["residual"].min() > 0.1
    assert observed.architecture == "unknown"
    assert "unexplained" in repr(observed)


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


def test_coefficients_are_those_of_now(ids):
    """A live module trains on: paths are fitted when they are asked for, and the mix in use at every run."""
    module = large(GPT(LAMBDAS))
    observed = see(module, ids)
    module.transformer["h"][1].attn.lambdas = (0.9, 0.2)
    paths = observed.value_paths()
    row = paths[(paths["layer"] == 1) & (paths["source"] == "first")]
    assert row["coefficient"].item() == pytest.approx(0.9, abs=1e-6)
    mix = observed.run_with_cache(ids, names_filter="blocks.1.attn.hook_v_mix")[1]["blocks.1.attn.hook_v_mix"]
    torch.testing.assert_close(mix, torch.tensor([0.9, 0.2]), atol=1e-6, rtol=0)


# ---- masks -----------------------------------------------------------------------------------------------------------

PLACE = torch.arange(40)
BEFORE = PLACE[:, None] >= PLACE
MASKS = {
    "sliding window": BEFORE & (PLACE[:, None] - PLACE < 8),
    "packed sequences": BEFORE & (PLACE[:, None] // 10 == PLACE // 10),
    "padding": BEFORE & (PLACE >= 5),
    "adds a bias": torch.where(BEFORE, (PLACE - PLACE[:, None]) * 0.1, -math.inf),
    "causal": BEFORE,
}


def masked(mask):
    return lambda q, k, v, layer: F.scaled_dot_product_attention(q, k, v, attn_mask=mask).nan_to_num()


@pytest.mark.parametrize("kind", MASKS)
@torch.no_grad()
def test_other_masks_are_named_and_their_statistics_exact(kind, ids):
    mask = MASKS[kind]
    assert kind_of(mask, False, 40).startswith(kind)
    observed = see(large(GPT(attend=masked(mask))), ids)
    names = [n for n in observed.hook_dict if n.startswith("blocks.1.attn")]
    _, cache = observed.run_with_cache(ids, names_filter=names)
    assert ("blocks.1.attn.hook_rot_q" in observed.hook_dict) is (kind == "causal")
    q, k = cache["blocks.1.attn.hook_q"], cache["blocks.1.attn.hook_k"]  # nothing is rotated here
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / math.sqrt(8)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    pattern = scores.softmax(-1).nan_to_num(0.0)
    wanted = statistics_of(scores, pattern)
    for statistic in STATISTICS:
        found = cache[f"blocks.1.attn.hook_{statistic}"].double()
        torch.testing.assert_close(found, getattr(wanted, statistic), atol=2e-5, rtol=1e-5, msg=statistic)
    torch.testing.assert_close(cache["blocks.1.attn.hook_pattern"].double(), pattern, atol=1e-6, rtol=1e-5)


def test_a_mask_that_was_not_on_the_example_tokens_is_refused_where_it_matters(ids):
    """The window of 50 hides nothing of 40 tokens, and something of 60."""

    def windowed(q, k, v, layer):
        at = torch.arange(q.shape[2])
        mask = (at[:, None] >= at) & (at[:, None] - at < 50)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    observed = see(large(GPT(attend=windowed)), ids)
    longer = torch.cat((ids, ids[:, :20]), 1)
    observed.run_with_cache(longer, names_filter="blocks.1.attn.hook_v")
    for name in ("rot_q", "received"):
        with pytest.raises(WorkbenchError, match=r"layer 1 is masked otherwise now \(sliding window of 50\)"):
            observed.run_with_cache(longer, names_filter=f"blocks.1.attn.hook_{name}")


# ---- measuring -------------------------------------------------------------------------------------------------------


def test_every_metric_reads_the_same_from_outside_as_from_inside(tiny):
    model = tiny("resformer")
    ids = torch.randint(61, (4, 64), generator=torch.Generator().manual_seed(3))
    inside, outside = (workbench.measure(m, STREAMED, ids) for m in (model, see(model, ids)))
    axes = ["metric", "layer", "head", "position", "site", "variant", "control", "part", "index", "source"]
    both = inside.merge(
        outside, on=[a for a in axes if a in inside], suffixes=("", "_outside"), how="outer", indicator=True
    )
    assert (both["_merge"] == "both").all(), both.loc[
        both["_merge"] != "both", ["metric", "layer", "site"]
    ].drop_duplicates()
    apart = (both["value"] - both["value_outside"]).abs() > 1e-4 * (1 + both["value"].abs())
    assert not apart.any(), both.loc[apart, ["metric", "layer", "site", "variant", "value", "value_outside"]]
    assert set(outside["metric"]) == set(STREAMED)
    assert (outside["architecture"] == "resformer").all()


def test_numbers_of_an_observed_module_are_not_remembered(ids):
    """Equal weights, other code: the weights of a foreign module do not say what it computes."""
    values = []
    for first in (0.0, 2.0):
        observed = see(large(GPT([(1, 1), (first, 1), (first, 1)])), ids)
        values.append(workbench.measure(observed, "loss", ids)["value"].item())
    assert abs(values[0] - values[1]) > 1e-3


def test_measures_of_weights_are_refused_by_name(ids):
    with pytest.raises(WorkbenchError, match=r"gradient_norm reads weights by our names"):
        workbench.measure(see(large(GPT()), ids), "gradient_norm", ids)


def test_a_loss_needs_every_position_and_gets_it(ids):
    """nanoGPT without targets gives the last position only; so does `observed(ids)`, bit for bit."""
    module = large(GPT(last=True))
    observed = see(module, ids)
    assert observed(ids).shape == (2, 1, VOCABULARY)
    wanted = module(ids, targets=ids)[0]
    assert torch.equal(observed.everywhere(ids), wanted)
    loss = F.cross_entropy(wanted[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert torch.equal(observed(ids, return_type="loss"), loss)
    frame = workbench.measure(observed, "loss", ids)
    assert frame["value"].item() == pytest.approx(loss.item(), rel=1e-5)


@torch.inference_mode()
def test_flat_logits_and_inference_mode(ids):
    class Flat(GPT):
        def forward(self, idx):
            return super().forward(idx)[0].flatten(0, 1)

    module = large(Flat())
    observed = see(module, ids)
    logits, cache = observed.run_with_cache(ids, ["blocks.1.attn.hook_v"])
    assert torch.equal(logits.flatten(0, 1), module(ids))
    assert list(cache.keys()) == ["blocks.1.attn.hook_v"]
    assert workbench.measure(observed, "loss", ids)["value"].notna().all()


def test_a_module_without_logits_has_activations_but_no_loss(ids):
    class Body(GPT):
        def forward(self, idx):
            x, memory = self.transformer.wte(idx), {}
            for block in self.transformer.h:
                x = block(x, memory)
            return self.transformer.ln_f(x)

    observed = see(large(Body()), ids)
    assert not workbench.measure(observed, "value_norm", ids).empty
    with pytest.raises(WorkbenchError, match="no logits"):
        workbench.measure(observed, "loss", ids)
    with pytest.raises(WorkbenchError, match="no logits"):
        observed(ids, return_type="loss")


# ---- interventions ---------------------------------------------------------------------------------------------------


def edited(layer, change):
    """The module whose attention itself changes q, k, v at a layer: what an intervention must equal."""

    def attend(q, k, v, at):
        q, k, v = change(q, k, v) if at == layer else (q, k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return large(GPT(LAMBDAS, attend))


@pytest.mark.parametrize("form", [None, "torch", "einsum", "baddbmm"])
@torch.no_grad()
def test_replaced_values_queries_and_keys_run_as_if_the_module_were_rewritten(form, ids):
    observed = see(large(GPT(LAMBDAS, eagerly(form)) if form else GPT(LAMBDAS)), ids)
    for point, change in {
        "v": lambda q, k, v: (q, k, v * 0),
        "rot_q": lambda q, k, v: (q * 3, k, v),
        "rot_k": lambda q, k, v: (q, k.flip(2), v),
    }.items():
        answer = {"v": lambda x, hook: x * 0, "rot_q": lambda x, hook: x * 3, "rot_k": lambda x, hook: x.flip(1)}[point]
        with observed.hooks([(f"blocks.1.attn.hook_{point}", answer)]):
            found = observed(ids)
        torch.testing.assert_close(found, edited(1, change)(ids)[0], atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_replaced_own_values_reach_the_layers_that_mix_them(ids):
    module = large(GPT(LAMBDAS))
    observed = see(module, ids)
    with observed.hooks([("blocks.0.attn.own.hook_v", lambda x, hook: x * 2)]):
        found = observed(ids)
    with torch.no_grad():
        weight, bias = module.transformer["h"][0].attn.c_attn.weight, module.transformer["h"][0].attn.c_attn.bias
        weight[2 * D :] *= 2
        bias[2 * D :] *= 2
    torch.testing.assert_close(found, module(ids)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["fused", "einsum", "repeated heads"])
@torch.no_grad()
def test_patterns_head_outputs_and_stream_can_be_replaced(name, ids):
    observed = see(large(STRANGERS[name]()), ids)
    _, cache = observed.run_with_cache(ids)
    uniform = torch.ones(40, 40).tril() / torch.arange(1, 41)[:, None]
    seen = {}

    def keep(tensor, hook):
        seen[hook.name] = tensor

    def flat(tensor, hook):
        return uniform.expand_as(tensor)

    points = [
        ("blocks.1.attn.hook_pattern", flat),
        ("blocks.1.attn.hook_z", keep),
        ("blocks.1.attn.hook_received", keep),
    ]
    with observed.hooks(points):
        observed(ids)
    v = cache["blocks.1.attn.hook_v"]
    wanted = torch.einsum("ij,bjhd->bihd", uniform, v.repeat_interleave(4 // v.shape[2], dim=2))
    torch.testing.assert_close(seen["blocks.1.attn.hook_z"], wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        seen["blocks.1.attn.hook_received"], uniform.sum(0).expand(2, 4, 40), atol=1e-5, rtol=1e-5
    )
    with observed.hooks(
        [
            ("blocks.2.hook_resid_pre", lambda x, hook: x * 0),
            ("blocks.2.hook_resid_post", lambda x, hook: cache["blocks.2.hook_resid_post"]),
        ]
    ):
        torch.testing.assert_close(observed(ids), observed(ids))
    with observed.hooks(
        [
            ("blocks.1.hook_attn_out", lambda x, hook: x * 0),
            ("blocks.1.hook_mlp_out", lambda x, hook: x * 0),
            ("blocks.1.hook_resid_post", keep),
        ]
    ):
        observed(ids)
    torch.testing.assert_close(seen["blocks.1.hook_resid_post"], cache["blocks.1.hook_resid_pre"])
    with observed.hooks([("blocks.1.attn.hook_z", lambda x, hook: x * 0), ("blocks.1.hook_attn_out", keep)]):
        observed(ids)
    assert seen["blocks.1.hook_attn_out"].std(1).max() < 1e-6  # the bias of W_O alone


@torch.no_grad()
def test_token_means_replace_first_layer_values_exactly_without_positions(ids):
    """First-layer values are a function of the token where positions are only rotated in."""
    observed = see(large(Looped()), ids)
    means = token_means(observed, "own_v", [ids])
    plain = observed(ids, return_type="loss")
    with replaced(observed, ids, [0], "token_mean", means):
        assert observed(ids, return_type="loss").item() == pytest.approx(plain.item(), abs=1e-5)
    with replaced(observed, ids, [0, 1, 2], "zero", means):
        assert abs(observed(ids, return_type="loss").item() - plain.item()) > 1e-3


def test_what_is_only_computed_beside_the_module_cannot_be_replaced(ids):
    observed = see(large(GPT(LAMBDAS)), ids)
    for name in ("hook_received", "first.hook_v", "hook_v_mix"):
        with (
            observed.hooks([(f"blocks.1.attn.{name}", lambda x, hook: x * 0)]),
            pytest.raises(WorkbenchError, match="can be read, not replaced"),
        ):
            observed(ids)


@torch.no_grad()
def test_a_decoder_without_block_modules_is_read_by_the_numbers_of_its_parts(ids):
    module = large(Inline())
    observed = see(module, ids)
    assert observed.architecture == "resformer"
    seen = {}
    handles = [
        n.register_forward_pre_hook(lambda m, a, i=i: seen.update({i: a[0]})) for i, n in enumerate(module.norm_1)
    ]
    module(ids)
    for handle in handles:
        handle.remove()
    _, cache = observed.run_with_cache(ids)
    for i in range(LAYERS):
        assert torch.equal(cache[f"blocks.{i}.hook_resid_pre"], seen[i])
    with (
        observed.hooks([("blocks.1.hook_resid_pre", lambda x, hook: x * 0)]),
        pytest.raises(WorkbenchError, match="can be read, not replaced"),
    ):
        observed(ids)
    bare = see(large(Inline(norms=False)), ids)
    assert bare.options["lambda_v1"] == pytest.approx(0.2, abs=1e-6)
    with pytest.raises(WorkbenchError, match="no part in it reads the stream"):
        bare.run_with_cache(ids, names_filter="blocks.1.hook_resid_pre")


@pytest.mark.parametrize("name", ["hidden lambdas", "torch.softmax", "baddbmm"])
def test_gradients_of_activations_equal_those_of_the_module_itself(name, ids):
    module = large(STRANGERS[name]())
    observed = see(module, ids)
    points = [
        "blocks.1.attn.own.hook_v",
        "blocks.1.attn.hook_v",
        "blocks.1.hook_resid_pre",
        "blocks.2.attn.hook_pattern",
    ]
    loss, _, grads = observed.run_with_grads(ids, points)
    kept = {}

    def keep(part, args, output):
        output.retain_grad()
        kept["out"] = output

    handle = module.transformer["h"][1].attn.c_attn.register_forward_hook(keep)
    stream = module.transformer["h"][1].register_forward_pre_hook(
        lambda m, a: a[0].retain_grad() or kept.update(stream=a[0])
    )
    logits = module(ids)[0]
    plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    plain.backward()
    handle.remove(), stream.remove()
    assert torch.equal(loss, plain.detach())
    own = kept["out"].grad[..., 2 * D :].unflatten(-1, (4, 8))
    torch.testing.assert_close(grads["blocks.1.attn.own.hook_v"], own, atol=1e-7, rtol=1e-4)
    torch.testing.assert_close(grads["blocks.1.attn.hook_v"] * LAMBDAS[1][1], own, atol=1e-7, rtol=1e-4)
    torch.testing.assert_close(grads["blocks.1.hook_resid_pre"], kept["stream"].grad, atol=1e-7, rtol=1e-4)
    assert grads["blocks.2.attn.hook_pattern"].abs().max() > 0
    with pytest.raises(WorkbenchError, match="carries no gradient"):
        observed.run_with_grads(ids, "blocks.1.attn.first.hook_v")
    _, _, every = observed.run_with_grads(ids, lambda name: ".attn." in name)
    assert "blocks.1.attn.hook_v" in every
    assert "blocks.1.attn.first.hook_v" not in every


# ---- refusals --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("strangers::flash_attn_forward", mutates_args=())
def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).clone()


def by_hand(q, k, v, layer):
    e = (q @ k.mT * q.shape[-1] ** -0.5).exp().tril()
    return e / e.sum(-1, keepdim=True) @ v


def with_sink(q, k, v, layer):
    scores = (q @ k.mT).masked_fill(~BEFORE, -math.inf)
    return F.softmax(F.pad(scores, (0, 1)), -1)[..., :-1] @ v


def noisy(q, k, v, layer):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)


def twice(q, k, v, layer):
    attend = F.scaled_dot_product_attention
    return attend(q, k, v, is_causal=True) - 0.3 * attend(k, q, v, is_causal=True)


REFUSALS = {
    "both directions": (
        lambda: GPT(attend=lambda q, k, v, i: F.scaled_dot_product_attention(q, k, v)),
        "sees later positions",
    ),
    "custom kernel": (lambda: GPT(attend=lambda q, k, v, i: flash(q, k, v)), "flash_attn_forward.*custom kernel"),
    "hand-written": (lambda: GPT(attend=by_hand), "no attention was seen.*hand-written softmax"),
    "sink logits": (lambda: GPT(attend=with_sink), "extra columns: sink logits"),
    "two calls": (lambda: GPT(attend=twice), "makes 2 attention calls"),
    "a module for each head": (lambda: GPT(attention=ListOfHeads), "makes 4 attention calls .*heads.0"),
    "two decoders": (Pair, "several stacks of blocks: student.transformer.h and teacher.transformer.h; .*blocks="),
    "dropout in attention": (lambda: GPT(attend=noisy), r"dropout of 0.2 is active.*module.eval\(\)"),
    "no attention": (
        lambda: nn.Sequential(nn.Embedding(VOCABULARY, D), nn.Linear(D, VOCABULARY)),
        "no attention was seen",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_read_is_refused_by_its_cause(name, ids):
    make, cause = REFUSALS[name]
    with pytest.raises(WorkbenchError, match=cause):
        see(large(make()), ids)


def test_dropout_is_refused_when_observing_and_when_running(ids):
    module = large(GPT(dropout=0.1))
    with pytest.raises(WorkbenchError, match=r"dropout is active \(transformer.drop, p=0.1\): call module.eval\(\)"):
        see(module.train(), ids)
    observed = see(module.eval(), ids)
    module.train()
    with pytest.raises(WorkbenchError, match="dropout is active"):
        observed.run_with_cache(ids)
    observed.eval()
    assert module.training, "measuring must not change the mode of somebody else's module"


def test_soft_caps_keep_values_and_pattern_but_not_what_would_be_wrong(ids):
    def capped(q, k, v, layer):
        scores = (3 * torch.tanh(q @ k.mT * 8**-0.5 / 3)).masked_fill(~BEFORE, -math.inf)
        return scores.softmax(-1) @ v

    observed = see(large(GPT(attend=capped)), ids)
    _, cache = observed.run_with_cache(
        ids, names_filter=["blocks.1.attn.hook_v", "blocks.1.attn.hook_pattern", "blocks.1.attn.hook_received"]
    )
    pattern = cache["blocks.1.attn.hook_pattern"]
    torch.testing.assert_close(cache["blocks.1.attn.hook_received"], pattern.sum(-2), atol=1e-5, rtol=1e-5)
    with pytest.raises(WorkbenchError, match=r"not a multiple of q \. k"):
        observed.run_with_cache(ids, names_filter="blocks.1.attn.hook_rot_q")
    row = observed.sites.set_index(["site", "layer"]).loc[("rot_q", 1)]
    assert not row["found"]
    assert "cap" in row["note"]


@pytest.mark.parametrize(
    ("tokens", "cause"),
    [([[1.5, 2.5]], "needs token ids"), ([[1, 2, 3]], "8 positions"), ([[1, 2], [3]], "no table of token ids")],
)
def test_bad_example_tokens_are_refused(tokens, cause):
    with pytest.raises(BadData, match=cause):
        see(large(GPT()), tokens)


def test_names_and_inputs_are_checked_as_on_our_own_models(ids):
    observed = see(large(GPT()), ids)
    with pytest.raises(UnknownName, match="hook_v"):
        observed.run_with_cache(ids, names_filter="blocks.1.attn.hook_w")
    with pytest.raises(BadData, match="n_ctx=96"):
        observed(torch.zeros(1, 97, dtype=torch.long))
    with pytest.raises(BadData, match="vocabulary"):
        observed(torch.full((1, 20), VOCABULARY))
    with pytest.raises(WorkbenchError, match=r"torch.nn.Module, not a int"):
        see(3, ids)


def test_a_chosen_stack_of_two_is_observed(ids):
    observed = see(large(Pair()), ids, blocks="student")
    assert observed.architecture == "resformer"
    assert observed.options["lambda_v1"] == pytest.approx(0.4, abs=1e-6)


# ---- wrappers and libraries ------------------------------------------------------------------------------------------


def test_data_parallel_and_compiled_modules_are_taken_apart(ids, tmp_path):
    plain = large(GPT(LAMBDAS))(ids)[0].detach()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(large(GPT(LAMBDAS)))
        observed = see(parallel, ids)
        assert torch.equal(observed.run_with_cache(ids)[0], plain)
        assert observed.architecture == "resformer"
        assert "DistributedDataParallel" in repr(observed)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("how", ["whole", "blocks", "in place"])
@torch.no_grad()
def test_compiled_modules_are_heard_and_it_is_said(how, ids):
    module = large(GPT(LAMBDAS))
    plain = module(ids)[0].detach()
    if how == "whole":
        module = torch.compile(module, backend="eager")
    elif how == "in place":
        module.compile(backend="eager")
    else:
        for i, block in enumerate(module.transformer["h"]):
            module.transformer["h"][i] = torch.compile(block, backend="eager")
    module(ids)
    observed = see(module, ids)
    assert torch.equal(observed.run_with_cache(ids)[0], plain)
    assert torch.equal(observed(ids), plain)
    assert observed.architecture == "resformer"
    assert "torch.compile" in repr(observed)


def test_torchscript_is_refused(ids):
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        traced = torch.jit.trace(large(Averaged()), ids, check_trace=False)
    with pytest.raises(WorkbenchError, match="TorchScript"):
        see(traced, ids)


def hugging_face(kind, implementation):
    import transformers

    sizes = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": implementation}
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=D, n_layer=LAYERS, n_head=4, n_positions=96, **sizes)
        return large(transformers.GPT2LMHeadModel(config))
    config = transformers.LlamaConfig(
        hidden_size=D,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        **sizes,
    )
    return large(transformers.LlamaForCausalLM(config))


@pytest.mark.parametrize("seen", [12, 40])
@torch.no_grad()
def test_key_value_heads_are_told_apart_whether_or_not_the_module_repeats_them(seen):
    """Mistral repeats them beyond its window, where it passes a mask, and lets the kernel share them within it."""
    import transformers

    torch.manual_seed(0)
    config = transformers.MistralConfig(
        hidden_size=D, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        sliding_window=16, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    module = large(transformers.MistralForCausalLM(config))
    ids = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(3))
    observed = see(module, ids[:, :seen])
    for length in (12, 40):
        plain = module(ids[:, :length]).logits
        own, effective = "blocks.1.attn.own.hook_v", "blocks.1.attn.hook_v"
        logits, cache = observed.run_with_cache(ids[:, :length], names_filter=[own, effective])
        assert torch.equal(logits, plain)
        assert cache[effective].shape == (2, length, 2, 8)
        assert torch.equal(cache[effective], cache[own])
        with observed.hooks([(effective, lambda v, hook: v.clone())]):  # written back as the module reads them
            assert torch.equal(observed(ids[:, :length]), plain)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@torch.no_grad()
def test_hugging_face_models_need_no_adapter(kind, implementation, ids):
    module = hugging_face(kind, implementation)
    plain = module(ids).logits
    observed = see(module, ids)
    logits, cache = observed.run_with_cache(ids)
    assert torch.equal(plain, logits)
    assert torch.equal(plain, observed(ids))
    assert (observed.config.n_layers, observed.config.n_key_value_heads) == (3, 2 if kind == "llama" else 4)
    wanted = (
        "hook_embed",
        "unembed.hook_in",
        "blocks.1.attn.hook_q",
        "blocks.1.attn.own.hook_v",
        "blocks.1.hook_mlp_out",
    )
    assert set(wanted) <= set(cache.keys())
    for i in range(LAYERS):
        _, pattern = pattern_of(cache, i)
        v = cache[f"blocks.{i}.attn.hook_v"].double()
        z = torch.einsum("bhij,bjhd->bihd", pattern, v.repeat_interleave(4 // v.shape[2], dim=2))
        torch.testing.assert_close(cache[f"blocks.{i}.attn.hook_z"].double(), z, atol=2e-6, rtol=1e-5)
    if kind == "llama":
        layer = module.model.layers[1].self_attn
        own = layer.v_proj(module.model.layers[1].input_layernorm(cache["blocks.1.hook_resid_pre"]))
        assert torch.equal(cache["blocks.1.attn.hook_v"].flatten(2), own)
        hidden = module(ids, output_hidden_states=True).hidden_states
        assert torch.equal(cache["blocks.1.hook_resid_post"], hidden[2])
    frame = workbench.measure(observed, ["importance_entropy", "value_norm", "loss"], ids)
    assert set(frame["metric"]) == {"importance_entropy", "value_norm", "loss"}


@torch.no_grad()
def test_functions_of_the_attention_interface_are_heard(ids):
    from transformers import AttentionInterface

    def mine(module, query, key, value, attention_mask, scaling=None, **kwargs):
        group = query.shape[1] // key.shape[1]
        out = flash(query, key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1))
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("strangers_kernel", mine)
    try:
        module = hugging_face("llama", "strangers_kernel")
        observed = see(module, ids)
        logits, cache = observed.run_with_cache(ids)
        assert torch.equal(logits, module(ids).logits)
        usual = see(hugging_face("llama", "sdpa"), ids).run_with_cache(ids)[1]
        for name in ("hook_v", "hook_rot_k", "hook_z", "hook_row_entropy", "hook_pattern"):
            torch.testing.assert_close(
                cache[f"blocks.1.attn.{name}"], usual[f"blocks.1.attn.{name}"], atol=1e-5, rtol=1e-5
            )
        with observed.hooks([("blocks.1.attn.hook_v", lambda x, hook: x * 0)]):
            assert not torch.equal(observed(ids), logits)
        assert AttentionInterface()["strangers_kernel"] is mine
    finally:
        del AttentionInterface._global_mapping["strangers_kernel"]


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.most = max(self.most, tensor.numel())
        return out


@torch.no_grad()
def test_long_sequences_need_no_square_array(ids):
    observed = see(hugging_face("llama", "sdpa"), ids)
    T = 1536
    long = torch.randint(VOCABULARY, (1, T), generator=torch.Generator().manual_seed(0))
    with Largest() as largest:
        frame = workbench.measure(observed, ["importance_entropy", "row_entropy", "sink_mass", "value_norm"], long)
    assert largest.most < T * T / 2
    assert frame["T"].eq(T).all()


class Seen(TorchFunctionMode):
    """Whatever a caller's own mode sees must go on."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_mode_of_the_caller_goes_on(ids):
    module = large(GPT())
    observed = see(module, ids)
    with Seen() as mine:
        logits, _ = observed.run_with_cache(ids)
    assert mine.calls > 10
    assert torch.equal(logits, module(ids)[0])


# ---- equal -----------------------------------------------------------------------------------------------------------


def test_the_first_difference_is_where_the_module_was_changed(ids):
    one, other = large(GPT(LAMBDAS)), large(GPT(LAMBDAS))
    assert workbench.equal(see(one, ids), other, ids)
    assert workbench.equal(one, other, ids, tolerance=0)
    with torch.no_grad():
        other.transformer["h"][1].mlp[2].bias[3] += 0.25
    found = workbench.equal(see(one, ids), see(other, ids), ids)
    assert not found
    assert (found.site, found.layer) == ("blocks.1.hook_mlp_out", 1)
    assert found.difference == pytest.approx(0.25, abs=1e-5)
    before = found.table.set_index("site").loc["blocks.1.attn.hook_z", "difference"]
    assert before == 0
    assert "blocks.1.hook_mlp_out" in str(found)
    changed = workbench.equal(one, large(GPT([(1, 1), (0.3141592, 0.7), (-0.125, 1.75)])), ids)
    assert changed.site == "blocks.2.attn.hook_v_mix"


def test_own_models_observed_ones_and_mixtures_compare(tiny, ids):
    model = tiny("resformer")
    assert workbench.equal(model, tiny("resformer"), ids, tolerance=0)
    assert workbench.equal(model, see(model, ids), ids)
    other = workbench.equal(model, see(tiny("transformer"), ids), ids)
    assert other.site == "blocks.1.attn.hook_v"
    assert other.position is not None
    with pytest.raises(WorkbenchError, match="3 layers against 2"):
        workbench.equal(model, tiny("resformer", config={"n_layers": 2}), ids)


# ---- words -----------------------------------------------------------------------------------------------------------


def test_what_was_found_is_printed_and_what_not(ids, capsys):
    workbench.observe(large(GPT(attention=SharedValues)), ids)
    printed = capsys.readouterr().out
    assert "svformer" in printed
    assert "not found: first_v (layers 0), own_v (layers 1, 2)" in printed
    assert "layer 2 value = 1 first" in printed


def test_sites_say_where_everything_stands(ids):
    sites = see(large(GPT(LAMBDAS)), ids).sites.set_index(["site", "layer"])
    assert list(sites.columns) == ["found", "where", "note"]
    assert sites.loc[("own_v", 1), "where"] == "transformer.h.1.attn.c_attn[64:96]"
    assert sites.loc[("z", 2), "where"] == "transformer.h.2.attn.c_proj"
    assert sites.loc[("mlp_out", 0), "where"] == "transformer.h.0.mlp"
    assert sites["found"].sum() == len(sites) - 1  # the first layer mixes nothing
