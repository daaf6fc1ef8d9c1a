"""An attention score taken apart: parts of queries times parts of keys sum to what the model computed."""

from __future__ import annotations

import pytest
import torch
import transformers
from foreign import hugging_face
from observed import see, stranger
from prompt_ids import some_ids

import workbench
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.interventions import edited
from workbench.prompts import logit_attribution, score_attribution, sink_attribution, token_path

PAPER = ["transformer", "resformer", "svformer", "neutreno", "denseformer"]
ODD = [
    "residual_q",
    "residual_k",
    "share_k",
    "cla",
    "gqa",
    "post_norm",
    "hyper_connections",
    "sink_logit",
    "cross_layer",
]


def scores_of(model, ids, layer):
    """Scores of the model [head, query, key], and their scale: the largest product of norms of a query and a key."""
    stem = f"blocks.{layer}.attn.hook_"
    _, cache = model.run_with_cache(ids, names_filter=[stem + name for name in ("attn_scores", "rot_q", "rot_k")])
    q, k = (cache[f"{stem}{name}"].norm(dim=-1).max() for name in ("rot_q", "rot_k"))
    return cache[f"{stem}attn_scores"].double(), float(q * k * cache[f"{stem}rot_q"].shape[-1] ** -0.5)


def test_a_score_worked_by_hand(tiny):
    model = tiny(config={"n_layers": 2, "n_heads": 1, "d_model": 2, "rms_norm_eps": 1e-30}, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.embed.weight.fill_(1.0)  # x = (1, 1), whose root mean square is 1
        first, second = model.blocks
        first.ln1.weight.fill_(1.0)
        first.attn.v_proj.weight.copy_(torch.eye(2))
        first.attn.o_proj.weight.copy_(torch.diag(torch.tensor([1.0, -1.0])))  # adds (1, -1): the stream is (2, 0)
        second.ln1.weight.fill_(1.0)
        second.attn.q_proj.weight.copy_(torch.eye(2))
        second.attn.k_proj.weight.copy_(torch.diag(torch.tensor([1.0, 3.0])))
        second.attn.v_proj.weight.copy_(torch.eye(2))
        second.attn.o_proj.weight.copy_(torch.eye(2))
        model.ln_final.weight.fill_(1.0)
        model.unembed.weight[7].copy_(torch.tensor([3.0, 1.0]))
    result = score_attribution(model, [5], 1, 0, 0, 0)
    # the divisor is sqrt(2): q parts (1, 1) and (1, -1), k parts (1, 3) and (1, -3), all / sqrt(2); scores / sqrt(d_head = 2)
    cells = result.matrix.loc[["embed", "0_attn_out"], ["embed", "0_attn_out"]].to_numpy()
    assert cells == pytest.approx(torch.tensor([[2.0, -1.0], [-1.0, 2.0]]).numpy() / 2**0.5)
    assert result.score == pytest.approx(2 / 2**0.5)
    assert result.keys["embed"] == pytest.approx(1 / 2**0.5)
    assert result.queries["0_mlp_out"] == 0
    assert "key's largest part is embedding (+0.707), mostly through the query's embedding (+1.41)." in result.sentence
    # the value (2, 0) / sqrt(2) is moved with weight 1; the last stream is (2 + sqrt(2), 0), whose root mean square is 1 + sqrt(2)
    path = token_path(model, [5, 5], 1, 0, 0, 0, 7)
    assert (path.weight, path.frame["norm"].item()) == pytest.approx((1.0, 2**0.5))
    assert path.logits == pytest.approx(3 * 2**0.5 / (1 + 2**0.5))


@pytest.mark.parametrize("architecture", PAPER + ODD)
def test_parts_sum_to_the_score_of_the_model(awake, architecture):
    model, ids = awake(architecture), some_ids()
    scores, scale = scores_of(model, ids, 2)
    for by in ("layer", "head", "value_path"):
        result = score_attribution(model, ids, 2, 3, 9, 4, by=by)
        assert result.score == pytest.approx(float(scores[0, 3, 9, 4]), abs=1e-5 * scale)
        assert result.error < 1e-5 * scale
    ratio = score_attribution(model, ids, 2, 3, -1, 4, against=1)
    assert ratio.score == pytest.approx(float(scores[0, 3, -1, 4] - scores[0, 3, -1, 1]), abs=1e-5 * scale)
    assert ratio.error < 1e-5 * scale


def test_finer_parts_sum_to_coarser_ones(awake):
    model, ids = awake("resformer"), some_ids()
    layers, heads, paths = (
        score_attribution(model, ids, 2, 0, 9, 4, by=by).matrix for by in ("layer", "head", "value_path")
    )
    attention = [f"L1H{h}" for h in range(4)]
    assert heads.loc["embed", attention].sum() == pytest.approx(layers.loc["embed", "1_attn_out"], abs=1e-6)
    assert paths.loc["embed", ["L1H2.own", "L1H2.first"]].sum() == pytest.approx(heads.loc["embed", "L1H2"], abs=1e-6)


@pytest.mark.fast(2)
@pytest.mark.parametrize("architecture", [*PAPER, "gqa", "sink_logit"])
def test_the_sink_is_the_mean_over_queries_of_single_scores(awake, architecture):
    model, ids = awake(architecture), torch.cat([some_ids(7), some_ids(7, seed=1)])
    scores, scale = scores_of(model, ids, 1)
    results = sink_attribution(model, ids, 1)
    contrasts = [scores[:, :, i, 0] - scores[:, :, i, 1 : i + 1].mean(-1) for i in range(1, 7)]
    for head, (result, expected) in enumerate(zip(results, torch.stack(contrasts).mean((0, 1)).tolist(), strict=True)):
        assert (result.layer, result.head) == (1, head)
        assert result.score == pytest.approx(expected, abs=1e-5 * scale)
        assert result.error < 1e-5 * scale
    one = score_attribution(model, ids[:1], 1, 2, 1, 0, against=1).matrix
    assert sink_attribution(model, ids[:1, :2], 1)[2].matrix.to_numpy() == pytest.approx(one.to_numpy(), abs=1e-6)


def test_what_has_no_single_score_is_refused_by_name(awake):
    ids = some_ids()
    with pytest.raises(BadData, match="DyT, which has no divisor"):
        score_attribution(awake("dyt"), ids, 1, 0, 3, 1)
    with pytest.raises(BadData, match="patterns of several softmaxes"):
        score_attribution(awake("residual_attention"), ids, 1, 0, 3, 1)
    model = awake()
    with pytest.raises(BadData, match="key 4 follows query 3"):
        score_attribution(model, ids, 1, 0, 3, 4)
    with pytest.raises(UnknownName, match="head"):
        score_attribution(model, ids, 1, 4, 3, 1)
    with pytest.raises(UnknownName, match="layer"):
        sink_attribution(model, ids, 3)
    with (
        model.hooks([("blocks.1.attn.hook_q", lambda q, hook: 2 * q)]),
        pytest.raises(WorkbenchError, match="a hook changed"),
    ):
        score_attribution(model, ids, 1, 0, 3, 1)


@pytest.mark.parametrize("architecture", ["transformer", "sink_logit", "Llama"])
def test_a_key_that_an_edit_hides_has_no_score(awake, architecture):
    model = observed_family("Llama") if architecture == "Llama" else awake(architecture)
    ids, name = some_ids(11), "blocks.1.attn.hook_attn_scores"
    plain = score_attribution(model, ids, 1, 2, 9, 4)
    with edited(model, "sink:layer=1"):
        with pytest.raises(BadData, match="hides key 0 from query 9"):
            score_attribution(model, ids, 1, 2, 9, 0)
        with pytest.raises(BadData, match="hides the first token"):
            sink_attribution(model, ids, 1)
        scores = model.run_with_cache(ids, names_filter=[name])[1][name][0, 2].double()
        others = score_attribution(model, ids, 1, 2, 9, 4, against="others")
        assert others.score == pytest.approx(float(scores[9, 4] - scores[9, [1, 2, 3, 5, 6, 7, 8, 9]].mean()), abs=1e-5)
        assert score_attribution(model, ids, 1, 2, 9, 4).score == pytest.approx(plain.score, abs=1e-5)
    if architecture != "Llama":
        with model.hooks([(name, lambda x, hook: 2 * x)]), pytest.raises(WorkbenchError, match=r"after q \. k"):
            score_attribution(model, ids, 1, 2, 9, 4)


def test_a_sink_logit_is_noted(awake):
    assert "sink logit" in score_attribution(awake("sink_logit"), some_ids(), 1, 0, 3, 1).notes[0]
    assert "own keys" in score_attribution(awake("cross_layer"), some_ids(), 1, 0, 3, 1).notes[0]
    assert workbench.prompts.score_attribution is score_attribution


# ---- the path of a token ----


def paths_and_head(model, ids):
    """Paths of all keys of one query through head 1.2, and the head's rows of the logit attribution."""
    frame = logit_attribution(model, ids, 4, 5).frame.query("level == 'value_path' and layer == 1 and head == 2")
    paths = [token_path(model, ids, 1, 2, 4, key, 5) for key in range(5)]
    for path in paths:
        known = path.frame.dropna(subset="per_weight")  # parts that are a multiple of the weight
        assert known["logits"].to_numpy() == pytest.approx((path.weight * known["per_weight"]).to_numpy(), abs=1e-6)
    return paths, frame.set_index("path")["value"]


@pytest.mark.parametrize("architecture", ["transformer", "resformer", "neutreno", "gated_attention", "cross_layer"])
def test_paths_of_all_keys_sum_to_the_heads_part_of_the_logit(awake, architecture):
    paths, head = paths_and_head(awake(architecture), some_ids(9))
    sums = sum(p.frame.set_index("path")["logits"] for p in paths)
    assert sums[head.index].to_numpy() == pytest.approx(head.to_numpy(), abs=1e-6)
    assert sum(p.weight for p in paths) == pytest.approx(1, abs=1e-5)
    assert paths[0].head_logits == pytest.approx(head.sum(), abs=1e-6)


def test_values_added_beside_the_attention_are_no_multiple_of_the_weight(awake):
    def per_weight(architecture, key):
        return token_path(awake(architecture), some_ids(9), 1, 2, 7, key, 5).frame["per_weight"].isna().tolist()

    assert per_weight("neutreno", 7) == [True, True]  # the token's own value is pulled, whatever the weight
    assert per_weight("neutreno", 3) == [False, False]
    assert per_weight("cross_layer", 3) == [True, True]  # the weight is of two layers' keys together


def test_a_path_is_the_weight_times_the_value_times_the_direction_of_the_logit(awake):
    model, ids = awake(), some_ids(9)
    result = token_path(model, ids, 1, 2, 7, 3, 5)
    _, cache = model.run_with_cache(ids)
    written = cache["blocks.1.attn.hook_v"][0, 3, 2] @ model.blocks[1].attn.W_O[2]
    direction = model.unembed.weight[5] * model.ln_final.weight / cache["ln_final.hook_scale"][0, 7]
    weight, per_weight = float(cache["blocks.1.attn.hook_pattern"][0, 2, 7, 3]), float((written @ direction).detach())
    assert result.weight == pytest.approx(weight, abs=1e-6)
    assert result.frame["per_weight"].item() == pytest.approx(per_weight, abs=1e-5)
    assert result.logits == pytest.approx(weight * per_weight, abs=1e-6)
    with pytest.raises(BadData, match="token id 61"):
        token_path(model, ids, 1, 2, 7, 3, 61)


# ---- decoders of others ----

FAMILIES = {
    "GPT2": (["embed", "positions", "0_attn_out", "0_mlp_out", "bias"], {}),
    "Llama": (["embed", "0_attn_out", "0_mlp_out"], {}),
    "Qwen3": (["embed", "0_attn_out", "0_mlp_out"], {"head_dim": 8}),  # norms of queries and keys, grouped keys
    "Exaone4": (["embed", "0_attn_out", "0_mlp_out"], {}),  # norms of heads after they are moved before the positions
    "Olmo2": (["embed", "0_attn_out", "0_mlp_out"], {}),  # norms over all heads, none before the attention
    "GPTNeoX": (["embed", "0_attn_out", "0_mlp_out", "bias"], {"rotary_pct": 0.5}),
    "GPTJ": (["embed", "0_attn_out", "0_mlp_out", "bias"], {"rotary_dim": 4, "n_embd": 32, "n_head": 4}),  # neighbours
    "Bloom": (["embed", "0_attn_out", "0_mlp_out", "bias"], {}),  # ALiBi
}


def observed_family(name, *, eager=False, **changes):
    model = hugging_face(getattr(transformers, f"{name}ForCausalLM", None) or getattr(transformers, f"{name}LMHeadModel"),
                         getattr(transformers, f"{name}Config"), **changes)  # fmt: skip
    if eager:
        model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator) * (p.ndim < 2))
    return see(model, torch.randint(61, (2, 12), generator=generator))


FAST = ("GPT2", "Qwen3", "Exaone4", "Bloom")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in FAMILIES]
)
def test_parts_sum_to_the_score_of_observed_decoders(family):
    labels, changes = FAMILIES[family]
    model, ids = observed_family(family, **changes), some_ids(11)
    name = "blocks.1.attn.hook_attn_scores"
    scores = model.run_with_cache(ids, [name])[1][name][0].double()
    tight = 1e-5 * float(scores.tril().abs().max())
    result = score_attribution(model, ids, 1, 3, 9, 4)
    assert list(result.matrix.index) == labels
    assert result.score == pytest.approx(float(scores[3, 9, 4]), abs=tight)
    assert result.error < tight
    assert bool(result.position) == (family == "Bloom")
    for against, other in ((1, scores[3, 9, 1]), ("others", scores[3, 9, [j for j in range(10) if j != 4]].mean())):
        contrast = score_attribution(model, ids, 1, 3, 9, 4, against=against)
        assert contrast.score == pytest.approx(float(scores[3, 9, 4] - other), abs=2 * tight)
        assert contrast.error < 2 * tight
    finer = score_attribution(model, ids, 1, 3, 9, 4, by="value_path")
    attention = [label for label in finer.matrix.columns if label.startswith(("L0", "0_attn"))]
    assert finer.keys[attention].sum() == pytest.approx(result.keys["0_attn_out"], abs=tight)
    if family in ("Qwen3", "GPT2", "Olmo2", "GPTNeoX"):
        paths, head = paths_and_head(model, ids[:, :9])
        assert sum(p.logits for p in paths) == pytest.approx(head.sum(), abs=1e-6)
    sink = sink_attribution(model, ids, 1)[2]
    contrast = [scores[2, i, 0] - scores[2, i, 1 : i + 1].mean() for i in range(1, 11)]
    assert sink.score == pytest.approx(float(torch.stack(contrast).mean()), abs=tight)
    assert sink.error < tight


@pytest.mark.parametrize("name", ["in place", "looped", "averaged", "inline"])
def test_odd_blocks_sum_to_their_scores_or_are_refused(name):
    observed, ids, point = stranger(name)[3], some_ids(11), "blocks.2.attn.hook_attn_scores"
    if name == "inline":
        with pytest.raises(BadData, match="layer 2 shows no single attention in a block of its own"):
            score_attribution(observed, ids, 2, 1, 9, 4)
        return
    expected = float(observed.run_with_cache(ids, [point])[1][point][0, 1, 9, 4])
    result = score_attribution(observed, ids, 2, 1, 9, 4, by="head")
    assert result.score == pytest.approx(expected, abs=1e-5)
    assert result.error < 1e-5 * abs(expected)


def test_a_norm_with_weights_for_each_head_is_refused_by_name():
    model = observed_family("Cohere", use_qk_norm=True)
    with pytest.raises(
        BadData, match=r"layer 1's query: model.layers.1.self_attn.q_norm cannot read rows of \d+ numbers"
    ):
        score_attribution(model, some_ids(11), 1, 3, 9, 4)


CHANGED = {  # families whose softmax is not that of q . k over all earlier keys, and the refusal of a hidden key
    "Gemma2": {"eager": True, "head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "sliding_window": 4},
    "Mistral": {"sliding_window": 4},
    "GptOss": {"eager": True, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_caps_are_seen_although_the_scores_and_logits_of_the_example_are_small(dtype):
    """Only tokens from 40 on have a first channel, which alone makes large scores; the example has none of them."""
    settings = {k: v for k, v in CHANGED["Gemma2"].items() if k not in ("eager", "sliding_window")}
    module = hugging_face(
        transformers.Gemma2ForCausalLM, transformers.Gemma2Config, **settings, final_logit_softcapping=30.0
    )
    module.set_attn_implementation("eager")
    module.lm_head.weight = torch.nn.Parameter(0.01 * module.lm_head.weight)  # no longer the embedding
    module.model.embed_tokens.weight[:, 0] = (torch.arange(61) >= 40).float()
    for layer in module.model.layers:
        layer.self_attn.q_proj.weight *= 0.01
        layer.self_attn.q_proj.weight[:, 0] = layer.self_attn.k_proj.weight[:, 0] = 0.5
    model = see(module.to(dtype), some_ids(11) % 40)
    assert "a cap" in model.structure.layers[0].parts[0].attention.note
    assert "a soft cap" in str(model.structure.ending)
    name, ids = "blocks.0.attn.hook_attn_scores", 40 + some_ids(11) % 21
    shown = float(model.run_with_cache(ids, [name])[1][name][0, 1, 9, 4])
    result = score_attribution(model, ids, 0, 1, 9, 4)
    assert result.capped == pytest.approx(shown, rel=1e-5 if dtype == torch.float32 else 2e-2)
    assert 1.5 < shown < 2 < 2 * result.capped < result.score


@pytest.mark.fast(3)
@pytest.mark.parametrize("family", CHANGED)
@pytest.mark.parametrize("layer", [0, 1])  # of Gemma 2 and gpt-oss: behind the window, and all keys
def test_a_soft_cap_a_window_and_a_sink_logit_leave_the_score_a_sum(family, layer):
    model, ids = observed_family(family, **CHANGED[family]), some_ids(11)
    name, head = f"blocks.{layer}.attn.hook_attn_scores", 3
    shown = model.run_with_cache(ids, [name])[1][name][0, head].double()
    result = score_attribution(model, ids, layer, head, 9, 7)
    assert result.error < 1e-5
    if family == "GptOss":  # its code subtracts the largest score of each row
        shown += result.score - shown[9, 7]
    used = result.score if result.capped is None else result.capped
    assert used == pytest.approx(float(shown[9, 7]), abs=1e-5)
    assert (result.capped is not None) == (family == "Gemma2")
    assert any("sink logit" in note for note in result.notes) == (family == "GptOss")
    if result.capped is not None:
        assert result.score == pytest.approx(2 * torch.atanh(shown[9, 7] / 2).item(), abs=1e-4)
    if family == "Mistral" or layer == 0:
        with pytest.raises(BadData, match=f"mask of layer {layer} hides key 3 from query 9"):
            score_attribution(model, ids, layer, head, 9, 3)
    seen = [j for j in range(10) if shown[9, j] > -1e4 and j != 7]
    assert len(seen) == (3 if family == "Mistral" or layer == 0 else 9)
    before = shown[9] if result.capped is None else 2 * torch.atanh(shown[9].clamp(-1.99, 1.99) / 2)
    others = score_attribution(model, ids, layer, head, 9, 7, against="others")
    assert others.score == pytest.approx(float(before[7] - before[seen].mean()), abs=1e-4)
    assert others.error < 1e-5
    sink = sink_attribution(model, ids, layer)[head]
    assert sink.error < 1e-5
    uncapped = shown if result.capped is None else 2 * torch.atanh(shown.clamp(-1.99, 1.99) / 2)
    rows = [i for i in range(1, 11) if shown[i, 0] > -1e4]
    expected = [uncapped[i, 0] - uncapped[i, [j for j in range(1, i + 1) if shown[i, j] > -1e4]].mean() for i in rows]
    assert f"{len(rows)} queries" in sink.subject
    assert sink.score == pytest.approx(float(torch.stack(expected).mean()), abs=1e-4)


@pytest.mark.fast(1)
@pytest.mark.parametrize("architecture", PAPER)
def test_the_mean_of_the_others_is_that_of_the_scores(awake, architecture):
    model, ids = awake(architecture), some_ids()
    scores, scale = scores_of(model, ids, 2)
    result = score_attribution(model, ids, 2, 3, 4, 1, against="others", by="head")
    expected = scores[0, 3, 4, 1] - scores[0, 3, 4, [0, 2, 3, 4]].mean()
    assert result.score == pytest.approx(float(expected), abs=1e-5 * scale)
    assert result.error < 1e-5 * scale
    assert "minus the mean of the other visible keys" in result.subject
    with pytest.raises(BadData, match="query 0 sees no other key"):
        score_attribution(model, ids, 2, 3, 0, 0, against="others")
