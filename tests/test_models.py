"""Every architecture equals its published equations, its degenerate case, and itself by another path."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

from workbench.config import PRESETS, ModelConfig, TrainConfig
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.metrics.attention import importance_entropy, uniform_entropy
from workbench.metrics.residual import token_similarity
from workbench.models import ARCHITECTURES, build, compose
from workbench.names import stream_hook

WIDE = torch.float64
COMBINED = ["resformer+denseformer", "svformer+neutreno", "svformer+denseformer", "neutreno+residual_k"]
SMALL = ModelConfig(n_layers=4, d_model=96, n_heads=4, d_mlp=256, d_vocab=1024, n_ctx=2048)
ALPHAS = 0.3  # spread of DenseFormer's weights in these tests, which start at the identity


def tokens(model, length, *, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.d_vocab, (batch, length), generator=generator)


@pytest.fixture
def awake(tiny):
    """`tiny` whose learned weights have left their neutral start."""

    def make(architecture, **options):
        model = tiny(architecture, **options)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.ndim == 1 or name.startswith("dwa."):
                    p.add_(ALPHAS * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        return model

    return make


# ---- the published equations, layer by layer -------------------------------------------------------------------------


def norm(x, gain, eps):
    return gain * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def rope(x, theta):
    """x [batch, head, pos, d_head]; angles and halves as in the Llama implementation."""
    T, width = x.shape[-2:]
    angle = torch.arange(T, dtype=x.dtype)[:, None] * theta ** (-torch.arange(0, width, 2, dtype=x.dtype) / width)
    a, b = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def published(model, ids, *, resformer=None, svformer=False, neutreno=None, denseformer=None, residual_k=None):
    """Logits from the equations alone; constants: (lambda_1, lambda_own), lambda, (dilation, period)."""
    c, p = model.config, dict(model.named_parameters())
    B, T = ids.shape

    def heads(x, n):
        return x.view(B, T, n, c.d_head).transpose(1, 2)

    y = p["embed.weight"][ids]
    X = [y]
    V1 = K1 = None
    for n in range(c.n_layers):
        at = f"blocks.{n}."
        x = norm(y, p[at + "ln1.weight"], c.rms_norm_eps)
        Q, K = x @ p[at + "attn.q_proj.weight"].T, x @ p[at + "attn.k_proj.weight"].T
        V = V1 if svformer and n > 0 else x @ p[at + "attn.v_proj.weight"].T
        if n == 0:
            V1, K1 = V, K
        elif resformer:
            V = resformer[0] * V1 + resformer[1] * V
        if residual_k and n > 0:
            K = residual_k[0] * K1 + residual_k[1] * K
        group = c.n_heads // c.n_key_value_heads
        q, k = rope(heads(Q, c.n_heads), c.rope_theta), rope(heads(K, c.n_key_value_heads), c.rope_theta)
        v, v1 = (heads(t, c.n_key_value_heads) for t in (V, V1))
        U = []
        for h in range(c.n_heads):
            g = h // group
            scores = q[:, h] @ k[:, g].transpose(1, 2) / math.sqrt(c.d_head)
            A = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
            u = A @ v[:, g]
            if neutreno is not None and n > 0:
                u = u + neutreno * (v1[:, g] - v[:, g])
            U.append(u)
        middle = y + torch.cat(U, -1) @ p[at + "attn.o_proj.weight"].T
        m = norm(middle, p[at + "ln2.weight"], c.rms_norm_eps)
        gate = m @ p[at + "mlp.gate_proj.weight"].T
        y = middle + (gate * gate.sigmoid() * (m @ p[at + "mlp.up_proj.weight"].T)) @ p[at + "mlp.down_proj.weight"].T
        X.append(y)
        if denseformer and (n + 1) % denseformer[1] == 0:
            stored = [X[j] for j in range(n + 2) if (j - n - 1) % denseformer[0] == 0]
            alpha = p[f"dwa.alphas.{n}.weight"][0]
            assert len(alpha) == (n + 1) // denseformer[0] + 1
            y = sum(a * s for a, s in zip(alpha, stored, strict=True))
    return norm(y, p["ln_final.weight"], c.rms_norm_eps) @ p["unembed.weight"].T


FORMULAS = {
    "transformer": [({}, {})],
    "resformer": [({}, {"resformer": (0.5, 0.5)}), ({"lambda_v1": 2, "lambda_own": 0.7}, {"resformer": (2, 0.7)})],
    "svformer": [({}, {"svformer": True})],
    "neutreno": [({}, {"neutreno": 0.4}), ({"neutreno_lambda": 0.9}, {"neutreno": 0.9})],
    "denseformer": [
        ({"dilation": d, "period": p}, {"denseformer": (d, p)}) for d, p in ((1, 1), (1, 2), (2, 1), (2, 3), (3, 2))
    ],
    "resformer+neutreno": [({}, {"resformer": (0.5, 0.5), "neutreno": 0.2})],
    "residual_k": [({"lambda_k1": 0.3, "lambda_k_own": 0.8}, {"residual_k": (0.3, 0.8)})],
    "resformer+denseformer": [({"lambda_v1": 0.2}, {"resformer": (0.2, 0.5), "denseformer": (1, 1)})],
    "svformer+denseformer": [({"dilation": 2}, {"svformer": True, "denseformer": (2, 1)})],
    "resformer+residual_k": [({"lambda_own": 1.5}, {"resformer": (0.5, 1.5), "residual_k": (0.5, 0.5)})],
    "denseformer+resformer+neutreno": [
        (
            {},
            {"resformer": (0.5, 0.5), "neutreno": 0.2, "denseformer": (1, 1)},
        )  # the published pair's 0.2, in any order
    ],
}
CASES = [(name, *case) for name, cases in FORMULAS.items() for case in cases]


def test_each_registered_architecture_has_a_formula():
    assert set(ARCHITECTURES) <= set(FORMULAS)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("architecture", "options", "constants"), CASES)
def test_equals_the_published_equations(awake, architecture, options, constants, kv_heads):
    model = awake(architecture, dtype=WIDE, config={"n_layers": 4, "n_key_value_heads": kv_heads}, **options)
    ids = tokens(model, 9)
    found, true = model(ids), published(model, ids, **constants)
    assert found.dtype == WIDE
    assert (found - true).abs().max() < 1e-10 * max(1, true.abs().max())


# ---- two paths, one result -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("length", [1, 2, 7, 33])
def test_fused_attention_equals_eager_in_values_and_gradients(any_architecture, awake, length, kv_heads):
    model = awake(any_architecture, dtype=WIDE, config={"n_key_value_heads": kv_heads})
    ids = tokens(model, length)
    results = []
    for hooks in ([], [(lambda name: name.endswith("hook_pattern"), lambda pattern, hook: None)]):
        model.zero_grad()
        with model.hooks(hooks):
            logits = model(ids)
            logits.square().mean().backward()
        results.append([logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for fused, eager in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager, atol=1e-12, rtol=1e-9)


def same(a, b, ids, *, exact=True):
    torch.testing.assert_close(a(ids), b(ids), atol=0 if exact else 1e-12, rtol=0)
    grads = []
    for model in (a, b):
        model(ids, return_type="loss").backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name in grads[0].keys() & grads[1].keys():
        torch.testing.assert_close(grads[0][name], grads[1][name], atol=1e-12, rtol=1e-9, msg=name)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("resformer", {"lambda_v1": 0, "lambda_own": 1}),
        ("neutreno", {"neutreno_lambda": 0}),
        ("svformer", {"anchors": [0, 1, 2]}),
        ("residual_k", {"lambda_k1": 0, "lambda_k_own": 1}),
        *(("denseformer", {"dilation": d, "period": p}) for d in (1, 2, 3, 4) for p in (1, 2, 3)),
        ("resformer+neutreno", {"lambda_v1": 0, "lambda_own": 1, "neutreno_lambda": 0}),
    ],
)
def test_degenerate_setting_is_the_vanilla_decoder_exactly(tiny, architecture, options, kv_heads):
    config = {"n_key_value_heads": kv_heads}
    vanilla, model = (
        tiny(name, dtype=WIDE, config=config, **o) for name, o in (("transformer", {}), (architecture, options))
    )
    same(vanilla, model, tokens(vanilla, 11))


@pytest.mark.parametrize(
    ("combination", "options", "part", "kept"),
    [
        ("resformer+neutreno", {"neutreno_lambda": 0}, "resformer", {}),
        ("resformer+neutreno", {"lambda_v1": 0, "lambda_own": 1}, "neutreno", {"neutreno_lambda": 0.2}),
        ("resformer+residual_k", {"lambda_v1": 0, "lambda_own": 1}, "residual_k", {}),
        ("resformer+residual_k", {"lambda_k1": 0, "lambda_k_own": 1}, "resformer", {}),
        ("svformer+denseformer", {}, "svformer", {}),
        ("svformer+neutreno", {"anchors": [0, 1, 2]}, "neutreno", {}),
        ("svformer+neutreno", {"anchors": [0, 2], "neutreno_lambda": 0}, "svformer", {"anchors": [0, 2]}),
        ("neutreno+resformer", {}, "resformer+neutreno", {}),
    ],
)
def test_a_combination_reduces_to_each_part(tiny, combination, options, part, kept):
    a, b = tiny(combination, dtype=WIDE, **options), tiny(part, dtype=WIDE, **kept)
    same(a, b, tokens(a, 8))


def test_svformer_is_resformer_1_0(tiny):
    resformer, svformer = tiny("resformer", dtype=WIDE, lambda_v1=1, lambda_own=0), tiny("svformer", dtype=WIDE)
    ids = tokens(svformer, 8)
    torch.testing.assert_close(resformer(ids), svformer(ids), atol=0, rtol=0)


def test_resformer_halves_are_ones_with_half_the_output_projection(tiny):
    """(c l1, c l2, W_O / c) is the same function."""
    half, ones = tiny("resformer", dtype=WIDE), tiny("resformer", dtype=WIDE, lambda_v1=1, lambda_own=1)
    with torch.no_grad():
        for block in ones.blocks[1:]:
            block.attn.o_proj.weight.mul_(0.5)
    ids = tokens(half, 8)
    torch.testing.assert_close(half(ids), ones(ids), atol=1e-12, rtol=0)


def test_later_anchors_refresh_the_shared_values(tiny):
    model = tiny("svformer", config={"n_layers": 4}, anchors=(0, 2))
    _, cache = model.run_with_cache(tokens(model, 6))
    v = [cache["v", layer] for layer in range(4)]
    assert torch.equal(v[0], v[1])
    assert torch.equal(v[2], v[3])
    assert not torch.allclose(v[0], v[2])
    assert [hasattr(block.attn, "v_proj") for block in model.blocks] == [True, False, True, False]


# ---- what the named activations are ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *COMBINED])
def test_activations_obey_their_identities(awake, architecture, kv_heads):
    model = awake(architecture, dtype=WIDE, config={"n_key_value_heads": kv_heads})
    _, cache = model.run_with_cache(tokens(model, 7))
    parts = architecture.split("+")
    for layer, block in enumerate(model.blocks):
        at = f"blocks.{layer}.attn."
        v, own, first = (cache.cache_dict.get(f"{at}{name}hook_v") for name in ("", "own.", "first."))
        if "svformer" in parts and layer:
            assert own is None
            assert torch.equal(v, first)
        elif "resformer" in parts and layer:
            mix = cache[f"{at}hook_v_mix"]
            assert mix.tolist() == [0.5, 0.5]
            torch.testing.assert_close(v, mix[0] * first + mix[1] * own, atol=1e-14, rtol=0)
        else:
            assert torch.equal(v, own)
        if first is not None:
            assert torch.equal(first, cache["v", 0])
        wide_v, wide_first = (
            None if x is None else x.repeat_interleave(4 // kv_heads, dim=2) for x in (v, cache["v", 0])
        )
        z = torch.einsum("bhqk,bkhd->bqhd", cache["pattern", layer], wide_v)
        if "neutreno" in parts and layer:
            z = z + model.options["neutreno_lambda"] * (wide_first - wide_v)
        torch.testing.assert_close(cache["z", layer], z, atol=1e-12, rtol=0)
        summed = torch.einsum("bqhd,hdm->bqm", cache["z", layer], block.attn.W_O)
        torch.testing.assert_close(cache["attn_out", layer], summed, atol=1e-12, rtol=0)
        raw = cache["resid_mid", layer] + cache["mlp_out", layer]
        seen = cache[f"blocks.{layer}.hook_dwa_in"] if "denseformer" in parts else cache["resid_post", layer]
        torch.testing.assert_close(raw, seen, atol=0, rtol=0)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *COMBINED])
def test_no_token_sees_the_future_and_each_sees_the_past(awake, architecture):
    model = awake(architecture, dtype=WIDE)
    ids = tokens(model, 12)
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % model.config.d_vocab
    difference = (model(ids) - model(changed)).abs().amax((0, 2))
    assert difference[:5].max() == 0
    assert (difference[5:] > 0).all()


def test_position_0_depends_on_the_first_id_alone(any_architecture, awake):
    model = awake(any_architecture, dtype=WIDE)
    ids = tokens(model, 9)
    other = tokens(model, 9, seed=1)
    other[:, 0] = ids[:, 0]
    _, a = model.run_with_cache(ids)
    _, b = model.run_with_cache(other)
    _, alone = model.run_with_cache(ids[:, :1])
    for index in (0, 1, 2, 3, "final"):
        name = stream_hook(index, 3)
        torch.testing.assert_close(a[name][:, 0], b[name][:, 0], atol=0, rtol=0)
        torch.testing.assert_close(a[name][:, 0], alone[name][:, 0], atol=1e-12, rtol=0)


def test_first_values_depend_on_the_id_alone(any_architecture, tiny):
    model = tiny(any_architecture, dtype=WIDE)
    ids = torch.tensor([[3, 9, 3, 4, 9], [9, 1, 3, 3, 0]])
    _, cache = model.run_with_cache(ids, names_filter="blocks.0.attn.hook_v")
    v = cache["v", 0].flatten(2)
    for i, j in (((0, 0), (0, 2)), ((0, 0), (1, 3)), ((0, 1), (0, 4)), ((0, 1), (1, 0))):
        torch.testing.assert_close(v[i], v[j], atol=1e-14, rtol=0)
    assert not torch.allclose(v[0, 0], v[0, 1])


def test_one_repeated_id_gives_identical_tokens_in_every_stream(any_architecture, awake):
    model = awake(any_architecture, dtype=WIDE)
    _, cache = model.run_with_cache(torch.full((1, 10), 5))
    for index in (0, 1, 2, 3, "final"):
        assert token_similarity(cache[stream_hook(index, 3)]).item() == pytest.approx(1, abs=1e-10)


# ---- at initialisation -----------------------------------------------------------------------------------------------


def test_one_seed_gives_every_architecture_the_same_tensors(any_architecture):
    config = SMALL
    vanilla, model, other = build("transformer", config, seed=3), build(any_architecture, config, seed=3), None
    mine, theirs = dict(model.named_parameters()), dict(vanilla.named_parameters())
    shared = mine.keys() & theirs.keys()
    assert len(shared) >= len(theirs) - (3 if any_architecture == "svformer" else 0)
    assert all(torch.equal(mine[name], theirs[name]) for name in shared)
    other = dict(build(any_architecture, config, seed=4).named_parameters())
    assert not torch.equal(mine["embed.weight"], other["embed.weight"])
    matrix = mine["blocks.2.mlp.up_proj.weight"]
    assert matrix.std().item() == pytest.approx(0.02, rel=0.02)
    assert not torch.equal(matrix, mine["blocks.1.mlp.up_proj.weight"])


@pytest.mark.parametrize(
    ("size", "parameters", "saved"),
    [
        ("2m", 1_623_856, 768),
        ("82m", 81_901_056, 1_835_008),
        ("180m", 179_874_048, 6_488_064),
        ("468m", 467_921_920, 24_117_248),
    ],
)
def test_published_sizes_have_the_published_parameters(size, parameters, saved):
    config = PRESETS[size].model
    with torch.device("meta"):
        counts = {name: sum(p.numel() for p in compose(name, config).parameters()) for name in ARCHITECTURES}
    depth = config.n_layers
    expected = dict.fromkeys(ARCHITECTURES, parameters)
    expected |= {"svformer": parameters - saved, "denseformer": parameters + depth * (depth + 3) // 2}
    assert counts == expected


@pytest.mark.parametrize(
    ("dilation", "period", "weights"), [(1, 1, 14), (2, 1, 2 + 2 + 3 + 1), (1, 2, 3 + 5), (4, 4, 2)]
)
def test_denseformer_weights_by_hand(dilation, period, weights):
    """4 blocks: after block i (from 0) floor((i + 1) / dilation) + 1 weights where (i + 1) mod period = 0."""
    config = SMALL
    model = compose("denseformer", config, dilation=dilation, period=period)
    assert sum(p.numel() for name, p in model.named_parameters() if name.startswith("dwa.")) == weights
    table = model.shortcuts[0].coefficients()
    own = [table[f"alpha_{i + 1}"][i] for i in range(4)]
    assert [value for value in own if not math.isnan(value)] == [1.0] * (4 // period)


def test_loss_at_init_is_that_of_random_logits(any_architecture):
    """Normalised stream times N(0, std^2) weights: logits of variance d std^2, hence ln vocab + d std^2 / 2."""
    config = ModelConfig(n_layers=3, d_model=256, n_heads=4, d_mlp=512, d_vocab=3000, n_ctx=256)
    model = build(any_architecture, config)
    ids = torch.randint(3000, (4, 256), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert model(ids, return_type="loss").item() == pytest.approx(math.log(3000) + 256 * 0.02**2 / 2, abs=0.02)


def test_similarity_at_init_orders_the_architectures_and_attention_is_uniform():
    """Before any training: {SVFormer, NeuTRENO} < ResFormer < vanilla; attention as even as causality allows."""
    vocab, T = 50_277, 256
    config = ModelConfig(n_layers=8, d_model=128, n_heads=2, d_mlp=448, d_vocab=vocab, n_ctx=T)
    p = 1 / torch.arange(1, vocab + 1, dtype=WIDE)
    names = ("transformer", "resformer", "neutreno", "svformer")
    found: dict[str, list[float]] = {name: [] for name in names}
    received = [f"blocks.{layer}.attn.hook_received" for layer in range(8)]
    for seed in range(3):
        ids = torch.multinomial(p, T, replacement=True, generator=torch.Generator().manual_seed(seed))[None]
        table, ids = ids.unique(return_inverse=True)  # only these rows of the embedding are ever read
        for name in names:
            model = build(name, config.replace(d_vocab=len(table)), seed=seed)
            with torch.no_grad():
                _, cache = model.run_with_cache(ids, names_filter=[stream_hook(8, 8), *received])
            found[name].append(token_similarity(cache[stream_hook(8, 8)]).item())
            for hook in received:
                assert importance_entropy(cache[hook]).item() == pytest.approx(uniform_entropy(T), abs=0.02)
    mean = {name: sum(values) / 3 for name, values in found.items()}
    assert max(mean["svformer"], mean["neutreno"]) < mean["resformer"] - 0.1
    assert mean["resformer"] < mean["transformer"] - 0.1


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *COMBINED])
def test_every_parameter_learns_from_the_start(tiny, architecture):
    model = tiny(architecture)
    model(tokens(model, 8), return_type="loss").backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().max() > 0, name
        if name.startswith("dwa."):
            assert (p.grad != 0).all(), name


@pytest.mark.parametrize("architecture", ["resformer", "svformer", "neutreno", "resformer+neutreno"])
def test_first_values_hear_from_every_layer(tiny, architecture):
    """With every other path through the first layer's attention cut, its value projection still learns from each layer."""
    model = tiny(architecture)
    ids = tokens(model, 8)
    for heard in (1, 2):
        others = [f"blocks.{n}.attn.first.hook_v" for n in (1, 2) if n != heard]
        cut = [(name, lambda v, hook: v.detach()) for name in others]
        cut.append(("blocks.0.attn.hook_z", lambda z, hook: z.detach()))
        model.zero_grad()
        with model.hooks(cut):
            model(ids, return_type="loss").backward()
        assert model.blocks[0].attn.v_proj.weight.grad.abs().max() > 0


def test_key_residual_reaches_the_first_keys(tiny):
    model = tiny("residual_k")
    with model.hooks([("blocks.0.attn.hook_z", lambda z, hook: z.detach())]):
        model(tokens(model, 8), return_type="loss").backward()
    assert model.blocks[0].attn.k_proj.weight.grad.abs().max() > 0


# ---- types, copies, modes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_run_and_agree(any_architecture, tiny, dtype):
    ids = torch.arange(12)[None]
    exact = tiny(any_architecture, dtype=WIDE)(ids)
    found = tiny(any_architecture, dtype=dtype)(ids)
    assert found.dtype == dtype
    assert (found.double() - exact).abs().mean() < (0.1 if dtype == torch.bfloat16 else 1e-14) * exact.abs().mean()


def test_rotation_in_float64_is_exact_to_float64():
    model = build("transformer", SMALL, dtype=WIDE)
    cos, sin = model.rotary(2000, torch.empty(0, dtype=WIDE))
    angle = 1999 * 10_000 ** (-2 / 24)
    assert cos[1999, 0, 1].item() == pytest.approx(math.cos(angle), abs=1e-12)
    assert sin[1999, 0, 13].item() == pytest.approx(math.sin(angle), abs=1e-12)


def test_a_run_in_inference_mode_leaves_the_model_trainable(tiny):
    model = tiny()
    with torch.inference_mode():
        model(torch.arange(6))
    model(torch.arange(6), return_type="loss").backward()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])  # noqa: S301
def test_a_copy_is_whole_and_independent(any_architecture, awake, duplicate):
    model = awake(any_architecture)
    ids = tokens(model, 6)
    before = model(ids)
    copied = duplicate(model)
    assert copied.lock is not model.lock
    assert torch.equal(copied(ids), before)
    assert (copied.options, copied.config) == (model.options, model.config)
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    assert copied(ids).abs().max() == 0
    assert torch.equal(model(ids), before)
    with copied.hooks([("hook_embed", lambda x, hook: x + 1)]):
        assert torch.equal(model(ids), before)
        assert copied.run_with_cache(ids, names_filter="hook_embed")[1]["embed"].min() == 1


def test_replacing_a_submodule_takes_effect(tiny):
    model = tiny()
    ids = torch.arange(6)
    before = model(ids)
    model.blocks[1].mlp.up_proj = torch.nn.Linear(32, 48, bias=False)
    assert not torch.allclose(model(ids), before)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda: build("resfomer", "tiny"), "unknown architecture 'resfomer'; did you mean resformer"),
        (lambda: build("resformer+neutrino", "tiny"), "unknown architecture 'neutrino'; did you mean neutreno"),
        (lambda: build(None, "tiny"), "unknown architecture None"),
        (
            lambda: build("resformer", "tiny", lambda_v=1),
            "unknown option of resformer 'lambda_v'; did you mean lambda_v1",
        ),
        (lambda: build("transformer", "tiny", lambda_v1=1), "unknown option of transformer 'lambda_v1'"),
        (lambda: build("transformer", "tinny"), "unknown preset 'tinny'; did you mean tiny"),
        (
            lambda: build("transformer", {"n_layer": 2}),
            "unknown config key 'n_layer'; did you mean n_layers",
        ),
        (lambda: SMALL.replace(dmodel=3), "unknown config key 'dmodel'; did you mean d_model"),
        (lambda: TrainConfig.of({"step": 2}), "unknown training key 'step'; did you mean steps"),
        (
            lambda: build("transformer", "tiny")(torch.arange(4), return_type="los"),
            "unknown return_type 'los'; did you mean loss",
        ),
        (
            lambda: build("transformer", "tiny").run_with_cache(torch.arange(4), names_filter="blocks.0.attn.hook_vv"),
            r"unknown hook 'blocks.0.attn.hook_vv'; did you mean blocks.0.attn.hook_v",
        ),
        (
            lambda: build("transformer", "tiny").run_with_hooks(torch.arange(4), fwd_hooks=[("hook_embe", print)]),
            "unknown hook 'hook_embe'; did you mean hook_embed",
        ),
        (
            lambda: build("transformer", "tiny").run_with_grads(torch.arange(4), ["blocks.9.hook_resid_pre"]),
            "unknown hook 'blocks.9.hook_resid_pre'",
        ),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(ask, told):
    with pytest.raises(UnknownName, match=told.replace("+", r"\+")) as caught:
        ask()
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda: build("resformer+svformer", SMALL), "resformer and svformer both define v of layer 1; keep one"),
        (lambda: build("denseformer+denseformer", SMALL), "cannot be combined with itself"),
        (lambda: build("denseformer", SMALL, period=5), "period from 1 to n_layers=4"),
        (lambda: build("denseformer", SMALL, dilation=0), "dilation from 1"),
        (lambda: build("denseformer", SMALL, dilation=1.5), "dilation.*1.5"),
        (lambda: build("svformer", SMALL, anchors=(1,)), "must rise from 0"),
        (lambda: build("svformer", SMALL, anchors=(0, 7)), "within the layers 0..3"),
        (lambda: build("svformer", SMALL, anchors=3), "anchors.*3"),
        (lambda: build("resformer", SMALL, lambda_v1=None), "lambda_v1.*None"),
        (lambda: build("resformer", SMALL, lambda_v1="much"), "much"),
        (lambda: build("transformer", {"n_layers": 2}), "lacks d_model, n_heads, d_mlp, d_vocab, n_ctx"),
        (lambda: build("transformer", None), "a preset's name, a ModelConfig or a mapping"),
        (lambda: SMALL.replace(n_heads=5), r"n_heads=5 .* choose from \[1, 2, 3, 4, 6"),
        (lambda: SMALL.replace(n_heads=96), "even heads"),
        (
            lambda: SMALL.replace(n_key_value_heads=3),
            r"does not divide n_heads=4; choose from \[1, 2, 4\]",
        ),
        (lambda: SMALL.replace(n_layers=0), "n_layers=0: must be a positive int"),
        (lambda: SMALL.replace(n_layers=2.0), "n_layers=2.0: must be a positive int"),
        (lambda: SMALL.replace(n_layers=True), "n_layers=True: must be a positive int"),
        (lambda: SMALL.replace(init_std=math.nan), "init_std=nan: must be a positive float"),
        (lambda: SMALL.replace(rope_theta="1e4"), "rope_theta='1e4': must be a positive float"),
        (lambda: TrainConfig(steps=0, batch=1, T=8), "steps=0: must be a positive int"),
        (lambda: TrainConfig(steps=1, batch=1, T=8, lr=-1), "lr=-1: must be a positive float"),
        (lambda: TrainConfig(steps=1, batch=1, T=1), "needs 2 tokens"),
        (lambda: TrainConfig(steps=1, batch=1, T=8, bf16=1), "bf16=1: must be a bool"),
        (lambda: TrainConfig.of({"steps": 3}), "lacks batch, T"),
    ],
)
def test_what_cannot_be_built_is_refused_in_words(ask, told):
    with pytest.raises(ValueError, match=told) as caught:
        ask()
    assert isinstance(caught.value, WorkbenchError)


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (torch.tensor([[1, 61]]), r"token ids 1..61 leave the vocabulary 0..60"),
        (torch.tensor([[-1, 2]]), r"token ids -1..2"),
        (torch.empty(1, 0, dtype=torch.long), "not empty"),
        ([], "not empty"),
        ("", "tokenizer"),
        (torch.zeros(1, 129, dtype=torch.long), "129 tokens exceed the model's context of n_ctx=128"),
        (torch.tensor([[0.0, 1.0]]), "whole numbers"),
        (torch.tensor([[True, False]]), "whole numbers"),
        (torch.zeros(1, 2, 3, dtype=torch.long), "whole numbers"),
        ([[1, 2], [3]], "rows of one length"),
        (None, "text or whole numbers"),
    ],
)
def test_unusable_tokens_are_refused(tiny, ids, told):
    model = tiny()
    with pytest.raises(BadData, match=told):
        model(ids)
    with pytest.raises(BadData, match=told):
        model.run_with_grads(ids, "blocks.0.hook_resid_pre")


def test_the_loss_of_a_single_token_is_refused(tiny):
    assert tiny()(torch.tensor([3])).shape == (1, 1, 61)
    with pytest.raises(BadData, match="2 tokens or more"):
        tiny()(torch.tensor([3]), return_type="loss")


def test_more_heads_do_not_become_grouped_heads():
    config = SMALL
    assert config.replace(n_heads=8).n_key_value_heads == 8
    assert config.replace(n_key_value_heads=2).replace(n_heads=8).n_key_value_heads == 2


def test_loss_by_hand(tiny):
    """Zero weights: every token is as likely as any other, ln 61 each; loss, both and per token agree."""
    model = tiny()
    with torch.no_grad():
        model.unembed.weight.zero_()
    ids = torch.arange(6)[None]
    logits, loss = model(ids, return_type="both")
    assert logits.shape == (1, 6, 61)
    assert loss.item() == pytest.approx(math.log(61), abs=1e-6)
    per_token = model(ids, return_type="loss", loss_per_token=True)
    assert per_token.shape == (1, 5)
    assert per_token.tolist()[0] == pytest.approx([math.log(61)] * 5, abs=1e-6)
    assert model(ids, return_type=None) is None
