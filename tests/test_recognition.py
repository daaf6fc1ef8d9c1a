"""How parts of a foreign decoder are told by their numbers: projections, value paths, and the architecture these make."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from strangers import GPT, large

from workbench.observing.interception.masks import CAUSAL
from workbench.observing.interception.position_axes import Axes
from workbench.observing.recognition import projections
from workbench.observing.recognition.architecture import recognize_architecture
from workbench.observing.recognition.attention_calls import near, reference, score_factor
from workbench.observing.recognition.decoder_structure import LayerStructure, Part, Projection
from workbench.observing.recognition.layer_outputs import explained
from workbench.observing.recognition.least_squares import fit, fit_rotated, stream_sums, weights_by_token
from workbench.observing.recognition.module_runs import Execution, TracedTensor
from workbench.observing.recognition.projections import (
    find_projection,
    matching_columns,
    matching_head_columns,
    same_projection,
)
from workbench.observing.recognition.traced_run import Trace
from workbench.observing.recognition.value_paths import fit_value_paths, mixture_of, value_path_table

ROWS, HEADS, WIDTH = 50, 3, 4


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# ---- projections ----------------------------------------------------------------------------------------------------

OUTPUT = random(ROWS, 6 * WIDTH)


@pytest.mark.parametrize(
    "columns", [slice(0, 12), slice(8, 20), slice(12, 24), (0, 2, 4, 6, 1, 3, 5, 7), (23, 22, 21, 20), slice(5, 6)]
)
def test_columns_are_found_wherever_they_stand_and_whatever_factor_they_carry(columns):
    chosen = OUTPUT[:, columns if isinstance(columns, slice) else list(columns)]
    factors = torch.linspace(-2, 3, chosen.shape[1])
    assert matching_columns(OUTPUT, chosen * factors) == columns
    assert matching_columns(OUTPUT[:, : chosen.shape[1] - 1], chosen) is None, "there must be as many"
    nearly = chosen + 1e-3 * random(*chosen.shape, seed=1)
    assert matching_columns(OUTPUT, nearly) is None, "a millionth of a column's square is not the column"
    assert matching_columns(OUTPUT, torch.cat((chosen[:, :1], nearly[:, 1:]), 1)) == (
        columns if nearly.shape[1] == 1 else None
    )


def test_a_wide_output_that_holds_no_column_is_refused_before_all_columns_are_compared():
    """5,000 by 5,000 columns were minutes of a model's observation."""
    with torch.profiler.profile(profile_memory=True) as profile:
        assert matching_columns(random(ROWS, 5_000), random(ROWS, 5_000, seed=1)) is None
    assert max(event.cpu_memory_usage for event in profile.events()) < 50e6


def test_one_column_is_not_found_twice_and_very_wide_outputs_are_searched_side_by_side(monkeypatch):
    assert matching_columns(OUTPUT, OUTPUT[:, [3, 3]]) is None
    assert matching_columns(OUTPUT[:, :1], OUTPUT[:, :1] + OUTPUT[:, 1:2]) is None
    monkeypatch.setattr(projections, "_MAX_TABLE", 24 * 12 - 1)
    assert matching_columns(OUTPUT, OUTPUT[:, 8:20]) == slice(8, 20)
    assert matching_columns(OUTPUT, OUTPUT[:, 1::2]) is None
    monkeypatch.setattr(projections, "_MAX_TABLE", 24 * 12)
    assert matching_columns(OUTPUT, OUTPUT[:, 1::2]) == tuple(range(1, 24, 2))


STARTS = torch.arange(ROWS) % 10 == 0


def turned(heads, angle=0.7):
    """Pairs of numbers rotated by row, the rows of `STARTS` not."""
    x, y = heads.chunk(2, dim=-1)
    angles = (angle * (torch.arange(ROWS) % 10))[:, None, None]
    return torch.cat((x * angles.cos() - y * angles.sin(), x * angles.sin() + y * angles.cos()), -1)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 3, 4], [3, 4, 5], [5, 1, 3]])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_found_through_a_rotation_and_a_factor_also_where_all_have_one_norm(order, normed):
    heads = OUTPUT.unflatten(1, (6, WIDTH))
    heads = torch.nn.functional.normalize(heads, dim=-1) if normed else heads
    found = matching_head_columns(heads.flatten(1), 2.5 * turned(heads[:, order]), STARTS)
    straight = order == list(range(order[0], order[0] + 3))
    columns = tuple(4 * head + i for head in order for i in range(4))
    assert found == (slice(columns[0], columns[-1] + 1) if straight else columns)
    assert matching_head_columns(heads.flatten(1), turned(random(ROWS, 3, WIDTH, seed=9)), STARTS) is None
    assert matching_head_columns(heads.flatten(1)[:, :8], turned(heads[:, order]), STARTS) is None, "fewer heads"
    assert matching_head_columns(heads.flatten(1)[:, :-1], turned(heads[:, order]), STARTS) is None, "parts of heads"
    assert matching_head_columns(heads.flatten(1), turned(heads[:, [1, 1]]), STARTS) is None, "one head twice"
    mixed = torch.cat((heads[:, order[:2]], random(ROWS, 1, WIDTH, seed=9)), 1)
    assert matching_head_columns(heads.flatten(1), turned(mixed), STARTS) is None, "one that is another's"


@pytest.mark.parametrize("narrow", ["output", "target", "both"])
def test_columns_and_heads_that_were_rounded_to_sixteen_bits_are_found(narrow):
    output = OUTPUT.bfloat16() if narrow != "target" else OUTPUT
    columns, heads = OUTPUT[:, 8:20] * 1.7, turned(OUTPUT.unflatten(1, (6, WIDTH))[:, 1:4])
    columns, heads = (x.bfloat16() if narrow != "output" else x for x in (columns, heads))
    assert matching_columns(output, columns) == slice(8, 20)
    assert matching_head_columns(output, heads, STARTS) == slice(4, 16)


@pytest.mark.parametrize("columns", [slice(4, 16), tuple(range(15, 3, -1))])
def test_a_projections_heads_are_read_and_written_among_other_columns(columns):
    projection = Projection("attn.qkv", 0, (), columns, HEADS, axes=Axes())
    chosen = list(range(24))[columns] if isinstance(columns, slice) else list(columns)
    heads = projection.heads_in(OUTPUT)
    assert torch.equal(heads, OUTPUT[:, chosen].unflatten(1, (HEADS, WIDTH)))
    before, after = OUTPUT.clone(), projection.with_heads(OUTPUT, -heads)
    others = [i for i in range(24) if i not in chosen]
    assert torch.equal(OUTPUT, before)
    assert torch.equal(after[:, chosen], -OUTPUT[:, chosen])
    assert torch.equal(after[:, others], OUTPUT[:, others])


def ran(name, start, *outputs, parent=None):
    seen = [TracedTensor((i,), rows, tuple(rows.shape), Axes()) for i, rows in enumerate(outputs)]
    return Execution(name, "Linear", parent, start, start + 1, outputs=seen)


def test_a_projection_is_the_outermost_output_that_holds_the_heads_and_the_same_in_the_next_block():
    """A module inside another gives the same numbers; a second run of one is counted."""
    target = OUTPUT[:, 4:16].unflatten(1, (HEADS, WIDTH))
    outer = ran("0.qkv", 3, random(ROWS, 5, seed=2), OUTPUT)
    inner = ran("0.qkv.inner", 2, OUTPUT, parent=outer)
    runs = [ran("0.qkv", 1, random(ROWS, 24, seed=3)), inner, outer]
    found = find_projection(runs, target)
    assert found == Projection("0.qkv", 1, (1,), slice(4, 16), HEADS, axes=Axes())
    assert find_projection(runs, turned(target), starts=STARTS) == found
    assert find_projection(runs[:1], target) is None
    later = [ran("1.qkv", 11, OUTPUT, OUTPUT), ran("1.qkv", 12, OUTPUT, OUTPUT)]
    assert same_projection(found, later, "1.qkv") == Projection("1.qkv", 1, (1,), slice(4, 16), HEADS, axes=Axes())
    assert same_projection(found, later[:1], "1.qkv") is None, "it runs once only"
    assert same_projection(found, [later[0], ran("1.qkv", 12, OUTPUT)], "1.qkv") is None, "it returns less"
    assert same_projection(found, [later[0], ran("1.qkv", 12, OUTPUT, OUTPUT[:, :16])], "1.qkv") is not None
    assert same_projection(found, [later[0], ran("1.qkv", 12, OUTPUT, OUTPUT[:, :15])], "1.qkv") is None
    scattered = Projection("0.qkv", 0, (0,), (9, 0, 3), 1, axes=Axes())
    assert same_projection(scattered, [ran("1.qkv", 1, OUTPUT[:, :10])], "1.qkv") is not None
    assert same_projection(scattered, [ran("1.qkv", 1, OUTPUT[:, :9])], "1.qkv") is None


# ---- value paths ----------------------------------------------------------------------------------------------------


def test_a_fit_gives_the_coefficients_and_the_share_of_the_norm_that_is_left():
    x, y = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 0.0])
    values, left = fit(torch.tensor([5.0, 2.0, 0.0]), [x, y])
    assert values == pytest.approx([3.0, 2.0])
    assert left == pytest.approx(0.0, abs=1e-12)
    values, left = fit(torch.tensor([3.0, 0.0, 4.0]), [x])
    assert (values, left) == (pytest.approx([3.0]), pytest.approx(4 / 5))
    assert fit(torch.zeros(3), [x, y]) == ([0.0, 0.0], 0.0)
    assert fit(x, []) == ([], 1.0)
    values, _ = fit(2 * x, [x, x])
    assert values == pytest.approx([1.0, 1.0]), "of equal sources, equal shares"


def test_every_vector_has_weights_of_its_own():
    x, y, w = (random(ROWS, HEADS, n, seed=n) for n in (5, 6, 2))
    y = y[..., :5]
    weights, left = weights_by_token(w[..., :1] * x + w[..., 1:] * y, [x, y])
    torch.testing.assert_close(weights, w.double(), atol=1e-5, rtol=0)
    assert left < 1e-6
    assert weights_by_token(x * x, [x, y])[1] > 0.1
    none, left = weights_by_token(torch.zeros(3, 4), [torch.zeros(3, 4)])
    assert (none.abs().max(), left) == (0, 0)


def test_rotated_mixtures_are_told_from_rows_that_are_not_turned():
    first, own = random(ROWS, HEADS, WIDTH, seed=1), random(ROWS, HEADS, WIDTH, seed=2)
    starts = torch.arange(ROWS) < 3
    turn = torch.linalg.qr(random(ROWS, WIDTH, WIDTH, seed=3))[0]
    turn[starts] = torch.eye(WIDTH, dtype=turn.dtype)
    turned = lambda x: 0.5 * torch.einsum("rij,rhj->rhi", turn, x)  # noqa: E731
    mixed = turned(0.3 * first - 0.8 * own)
    found = fit_rotated((turned(first), first), (mixed, own), starts=starts)
    assert found[:2] == pytest.approx((0.3, -0.8), abs=1e-6)
    normed = torch.nn.functional.normalize(mixed, dim=-1)
    assert fit_rotated((turned(first), first), (normed, own), starts=starts) is None
    assert fit_rotated((turned(first), first), (mixed, own), starts=torch.zeros(ROWS, dtype=torch.bool)) is None


def test_head_outputs_are_explained_by_the_attention_and_at_most_a_sum_of_values():
    z, v, first = (random(ROWS, n, WIDTH, seed=i) for i, n in enumerate((6, 3, 3)))
    wide = lambda x: x.repeat_interleave(2, dim=1)  # noqa: E731
    assert explained(z, z, v, first)
    assert explained(z + 0.3 * wide(first) - 0.2 * wide(v), z, v, first)
    assert not explained(z * 1.01, z, v, first)
    assert not explained(z + 0.3 * wide(first.flip(0)), z, v, first)
    assert not explained(z + 0.3 * wide(v), z, v, first[:, :1]), "values of another shape explain nothing"
    narrow = random(ROWS, 3, WIDTH + 1, seed=7)
    assert not explained(z + 1, z, narrow, narrow)
    # a share of the head outputs: two float64 heads that read one key-value head differ, which no sum of values does
    z, v = random(ROWS, 2, WIDTH, dtype=torch.float64), random(ROWS, 1, WIDTH, seed=1, dtype=torch.float64)
    both, apart = torch.cat((v, v), 1), torch.cat((v, -v), 1)
    for left, told in ((0.95e-9, True), (1.05e-9, False)):
        assert explained(z + both + left * (z + both).norm() / apart.norm() * apart, z, v, v) is told
        assert explained(z * (1 + left), z, v, v) is told
    z, v = z.bfloat16(), v.bfloat16()  # changes of 5 % were taken for rounding, and those of 20 %
    assert explained(z + 0.05 * v, z, v, v)
    assert not explained(z * 1.05, z, v, v)


def attended(scale=0.5):
    """q, k, v, z [batch, pos, head, d_head] of a causal attention, its scores, and what they let be seen."""
    q, k, v = (random(2, 9, n, WIDTH, seed=i, dtype=torch.float64) for i, n in enumerate((4, 2, 2)))
    wide = [x.repeat_interleave(2, dim=2) for x in (k, v)]
    past = torch.ones(9, 9, dtype=torch.bool).tril()
    scores = torch.einsum("bihd,bjhd->bhij", q, wide[0]) * scale
    z = torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~past, -torch.inf).softmax(-1), wide[1])
    return q, k, v, z, scores, past


@pytest.mark.parametrize(("off", "same"), [(0.0, True), (0.8e-9, True), (1.2e-9, False)])
def test_an_attention_is_reproduced_up_to_rounding_in_its_own_type(off, same):
    q, k, v, z, _, past = attended()
    for mask, causal, kind in ((None, True, CAUSAL), (past, False, "packed sequences")):
        found = reference(q, k, v, scale=0.5, mask=mask, causal=causal, kind=kind)
        assert near(*found, z * (1 + off), v.dtype) is same
    assert reference(q, k, v, scale=0.5, mask="blocks", causal=True, kind="a mask of type str") is None
    assert not near(*reference(q, k, v, scale=0.4, mask=None, causal=True, kind=CAUSAL), z, v.dtype)


@pytest.mark.parametrize(("off", "same"), [(0.0, True), (0.8e-9, True), (1.2e-9, False)])
def test_scores_have_a_scale_where_they_are_one_multiple_of_the_dot_products_that_are_seen(off, same):
    q, k, _, _, scores, past = attended(scale=0.3)
    allowed = past.expand_as(scores)
    hidden = scores.masked_fill(~past, -torch.inf)
    far = scores.abs().masked_fill(~past, 0).flatten().argmax()
    hidden.view(-1)[far] *= 1 + off * 1.06  # one score alone: the factor follows it by a fraction
    found = score_factor(hidden, allowed, q, k)
    assert (found == pytest.approx(0.3)) if same else (found is None)
    assert score_factor(scores[:, :2], allowed[:, :2], q, k) is None, "other heads than the queries'"
    assert score_factor(torch.zeros_like(scores), allowed, q * 0, k) is None, "nothing to compare with"


def layers_of(values, owns, *, z=None, k=None, added=None):
    """Layers with just what value paths and architectures are read from."""
    made = []
    for i, (v, own) in enumerate(zip(values, owns, strict=True)):
        heads = random(ROWS, v.shape[1], v.shape[2], seed=100 + i, dtype=v.dtype)
        keys = random(ROWS, 2, WIDTH, seed=200 + i) if k is None else k[i]
        attention = SimpleNamespace(kind="fused", v=v, z=heads, k=keys, q=heads)
        rows = {"in": random(ROWS, 8, seed=300 + i), "out": random(ROWS, 8, seed=301 + i)}
        rows |= {} if own is None else {"own": own}
        rows |= {} if added is None or added[i] is None else {"z": heads + added[i]}
        made.append(LayerStructure(f"h.{i}", 0, (), (), [Part(attention, {})], attention, rows=rows, adds=True))
    return made


V = [random(ROWS, HEADS, WIDTH, seed=i) for i in range(4)]


def named(layers, paths):
    ends = [layer.rows["in"] for layer in layers] + [layers[-1].rows["out"]]
    arriving = stream_sums(ends, [layer.rows["out"] for layer in layers])
    return recognize_architecture(
        SimpleNamespace(layers=layers, arriving=arriving, between=[None] * len(layers)), paths
    )


def architecture_of(values, owns, **more):
    layers = layers_of(values, owns, **more)
    return named(layers, fit_value_paths(layers, {}))


def test_values_of_all_layers_so_far_make_a_dense_resformer_unless_heads_differ():
    dense = [V[0], 0.5 * V[0] + V[1], 0.2 * V[0] + 0.3 * V[1] + V[2], 0.1 * V[1] + 0.6 * V[2] + V[3]]
    layers = layers_of(dense, V)
    paths = fit_value_paths(layers, {})
    assert named(layers, paths) == ("resformer_dense", {}, "")
    assert paths[2].coefficients == pytest.approx({"first": 0.2, "own": 1.0, 1: 0.3}, abs=1e-6)
    assert paths[3].coefficients == pytest.approx({"first": 0.0, "own": 1.0, 1: 0.1, 2: 0.6}, abs=1e-6)
    assert [mixture_of(paths, i).sources for i in range(4)] == [(), (0,), (0, 1), (1, 2)]
    assert [mixture_of(paths, i).mixed for i in range(4)] == [False, True, True, True]
    by_head = [*dense[:3], torch.tensor([0.1, 0.2, 0.3])[:, None] * V[0] + V[3]]
    assert architecture_of(by_head, V)[0] == "unknown"
    pair = [V[0], V[1], 0.5 * V[1] + 0.5 * V[0], V[3]]
    assert architecture_of(pair, [V[0], V[1], None, V[3]])[0] == "unknown", "no values of its own among them"


def test_a_pull_toward_the_first_values_is_neutreno_and_any_other_addition_is_unknown():
    def pulled(c, d=None):
        return [None, *(c * (V[0] - v) + (0 if d is None else d * v) for v in V[1:])]

    name, options, reason = architecture_of(V, V, added=pulled(0.4))
    assert (name, options, reason) == ("neutreno", pytest.approx({"neutreno_lambda": 0.4}, abs=1e-5), "")
    mixed = [V[0], *(0.5 * V[0] + 0.5 * v for v in V[1:])]
    added = [None, *(0.4 * (V[0] - v) for v in mixed[1:])]
    assert architecture_of(mixed, V, added=added)[0] == "resformer+neutreno"
    name, _, reason = architecture_of(V, V, added=pulled(0.4, 0.1))
    assert (name, reason) == ("unknown", "something is added to the attention's output; see value_paths()")
    share = torch.tensor([0.1, 0.2, 0.3])[:, None]
    assert architecture_of(V, V, added=[None, *(share * (V[0] - v) for v in V[1:])])[0] == "unknown"
    layers = layers_of(V, V, added=pulled(0.4))
    paths = fit_value_paths(layers, {})
    assert [mixture_of(paths, i).sources for i in range(4)] == [(), (0,), (0,), (0,)]
    assert not mixture_of([p for p in paths if p.into == "output"], 1).mixed
    table = value_path_table(paths)
    assert list(table.columns) == ["layer", "source", "coefficient", "spread", "residual", "head", "into"]
    assert table[table["into"] == "output"]["source"].tolist() == ["first", "own"] * 3
    assert table["head"].isna().all()


def test_values_that_nothing_explains_are_told_with_the_layer_and_the_share():
    strange = random(ROWS, HEADS, WIDTH, seed=50)
    name, options, reason = architecture_of([V[0], V[1], strange, V[3]], V)
    assert (name, options) == ("unknown", {})
    assert reason.startswith("layer 2: ")
    assert reason.endswith(" of its value is unexplained")


def test_a_trace_holds_no_activation_that_the_module_has_let_go():
    module, alive = large(GPT()), []
    for block in module.transformer.h:
        block.mlp.register_forward_hook(lambda m, args, out: alive.append(weakref.ref(out)))
    trace = Trace(module, torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(0)))
    left = []
    module.lm_head.register_forward_pre_hook(lambda m, args: left.extend(r for r in alive if r() is not None))
    trace.run(module)
    assert len(alive) == 3
    assert not left
