"""What a forward pass calls, read from outside: where tensors stand, how their axes lie, which products are an attention."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from workbench.hook_names import STATISTICS
from workbench.kernels.full_pattern_reference import statistics_of
from workbench.observing.interception.eager_attention_products import attention_axes, product_call
from workbench.observing.interception.masks import (
    CAUSAL,
    FUTURE,
    NOTHING,
    mask_kind,
    masked_statistics,
    pattern_statistics,
)
from workbench.observing.interception.position_axes import Axes, Positions
from workbench.observing.interception.sdpa_and_flex_attention import interface_call, sdpa_call
from workbench.observing.interception.tensor_paths import head_repeats, ids_among, replaced_at, tensors_in

B, T, H, D = 2, 3, 5, 4
PLAIN = Positions(B, T)


def numbers(*shape):
    """Different numbers everywhere, so that no two places are taken for each other."""
    return torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)


# ---- places ---------------------------------------------------------------------------------------------------------


class Output(NamedTuple):
    logits: torch.Tensor
    states: list


def test_tensors_are_found_and_replaced_where_they_stand():
    a, b, c, d = numbers(4, 1).unbind()
    output = Output(a, [{"k": b, "n": 3}, (c, [d])])
    found = dict(tensors_in(output))
    assert list(found) == [(0,), (1, 0, "k"), (1, 1, 0)], "in order, and none below the third level"
    assert (found[0,], found[1, 0, "k"], found[1, 1, 0]) == (a, b, c)
    assert list(tensors_in(a)) == [((), a)]
    new = torch.zeros(1)
    for path in found:
        changed = replaced_at(output, path, new)
        assert isinstance(changed, Output)
        assert {p: (x is new) for p, x in tensors_in(changed)} == {p: p == path for p in found}
        assert dict(tensors_in(output)) == found, "the original stays as it was"
    assert replaced_at((a, b), (1,), new) == (a, new)
    assert replaced_at(a, (), new) is new


@pytest.mark.parametrize(
    ("shape", "order"),
    [((B, T, H), "btw"), ((T, B, H), "tbw"), ((B, H, T, D), "bhtd"), ((B, T, H, D), "bthd"), ((B * T, H), "rw")],
)
def test_every_layout_is_read_and_written_by_position(shape, order):
    x = numbers(*shape)
    rows = PLAIN.by_position(x, *PLAIN.fitting(x.shape))
    assert rows.shape == (B * T, H * D if len(shape) == 4 else H)
    for b in range(B):
        for t in range(T):
            place = tuple({"b": b, "t": t, "r": b * T + t}.get(c, slice(None)) for c in order)
            assert torch.equal(rows[b * T + t], x[place].flatten())
    assert torch.equal(PLAIN.unshaped(rows.view(B, T, -1), x, *PLAIN.fitting(x.shape)), x)


@pytest.mark.parametrize(
    "shape", [(B * T,), (B, T), (B * T, 1, H), (T, H, B), (B, H, D, T), (B + 1, T, H), (B * T + 1, H)]
)
def test_what_has_no_positions_has_no_rows(shape):
    assert not PLAIN.fitting(shape)
    assert PLAIN.by_position(torch.ones(B, T, H, dtype=torch.long), Axes()) is None


def test_repeated_heads_are_counted_where_all_repeat_alike():
    k, v = numbers(B, T, 2, D), -numbers(B, T, 2, D)
    each = lambda x, n: x.repeat_interleave(n, dim=2)  # noqa: E731
    assert head_repeats(k, v) == 1
    assert head_repeats(each(k, 3), each(v, 3)) == 3
    assert head_repeats(each(k, 3), each(v, 3).roll(1, dims=2)) == 1
    assert head_repeats(k.repeat(1, 1, 3, 1)) == 1, "only side by side, as groups are"
    assert head_repeats(each(k[:, :, :1], 6)) == 6


# ---- calls ----------------------------------------------------------------------------------------------------------


def test_a_fused_call_is_read_by_position_and_by_name_with_pytorchs_defaults():
    q, k, v = (torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(i)) for i in range(3))
    call = sdpa_call(F.scaled_dot_product_attention, (q, k), {"value": v})
    assert (call.mask, call.causal, call.dropout, call.scale) == (None, False, 0.0, 0.5)
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    full = sdpa_call(F.scaled_dot_product_attention, (q, k, v, mask, 0.25, False), {"scale": 0.0})
    assert (full.mask is mask, full.causal, full.dropout, full.scale) == (True, False, 0.25, 0.0)
    causal = sdpa_call(F.scaled_dot_product_attention, (q, k, v), {"is_causal": True, "scale": 2})
    assert (causal.causal, causal.scale) == (True, 2.0)
    wanted = F.scaled_dot_product_attention(q, k, 3 * v, is_causal=True, scale=2)
    raw = causal.run({"value": 3 * v})
    assert torch.equal(raw, wanted)
    assert torch.equal(causal.z(raw, PLAIN), wanted.transpose(1, 2))
    assert torch.equal(causal.raw(causal.z(raw, PLAIN), raw, PLAIN), raw)


class Part(torch.nn.Module):
    is_causal = True


@pytest.mark.parametrize(
    ("kwargs", "causal"),
    [({}, True), ({"is_causal": False}, False), ({"attention_mask": torch.zeros(1, 1, T, T)}, False),
     ({"attention_mask": torch.zeros(1, 1, T, T), "is_causal": True}, False)],
)  # fmt: skip
def test_a_call_through_the_interface_is_causal_unless_it_says_so_or_brings_a_mask(kwargs, causal):
    q, k, v = (numbers(B, H, T, D) * s for s in (1, 2, 3))
    seen = []

    def function(module, query, key, value, attention_mask, **rest):
        seen.append((module, rest))
        return value.transpose(1, 2), None

    part = Part()
    mask = kwargs.get("attention_mask")
    rest = {key: value for key, value in kwargs.items() if key != "attention_mask"}
    call = interface_call(function, (part, q, k, v, mask), rest | {"sliding_window": 7})
    assert (call.causal, call.scale, call.dropout, call.window) == (causal, 0.5, 0.0, 7)
    assert call.mask is mask
    raw = call.run({"value": v * 2})
    assert torch.equal(raw[0], 2 * v.transpose(1, 2))
    assert seen == [(part, rest | {"sliding_window": 7})]
    assert torch.equal(call.z(raw[0], PLAIN), raw[0])
    assert torch.equal(call.raw(raw[0], raw[0], PLAIN), raw[0])
    assert interface_call(function, (part, q, k, v, mask), {"scaling": 0.125, "dropout": 0.5}).scale == 0.125
    assert interface_call(function, (part, q, k, v, mask), {"dropout": 0.5}).dropout == 0.5
    part.is_causal = False
    assert not interface_call(function, (part, q, k, v, None), {}).causal


def by_letters(call):
    """What a call's letters say that it computes."""
    return torch.einsum("{},{}->{}".format(*call.letters), *call.operands)


def test_products_are_those_of_two_tensors_over_one_axis():
    a, b = numbers(B, H, T, D), numbers(B, H, D, T)
    call = product_call(torch.matmul, (a, b), {})
    assert torch.equal(by_letters(call), a @ b)
    assert torch.equal(call.run(), a @ b)
    assert torch.equal(call.run({1: 2 * b}), a @ (2 * b))
    assert torch.equal(by_letters(product_call(torch.matmul, (a, b[0]), {})), a @ b[0]), "lead axes are broadcast"
    bias, flat = numbers(B, T, T), (a[:, 0], b[:, 0])
    for args, kwargs in (((bias, *flat), {}), ((bias,), {"batch1": flat[0], "batch2": flat[1], "alpha": 2})):
        added = product_call(torch.baddbmm, args, kwargs)
        assert torch.equal(by_letters(added), flat[0] @ flat[1])
        assert torch.equal(added.run(), torch.baddbmm(*args, **kwargs))
        assert torch.equal(added.operands[1], flat[1])
    for args in ((a, b[0, 0]), (a,), (a, 2.0)):
        assert product_call(torch.matmul, args, {}) is None


def test_an_einsum_is_a_product_where_its_equation_names_every_axis_once():
    a, b = numbers(B, T, H, D), numbers(B, T, H, D)
    call = product_call(torch.einsum, ("bihd, bjhd -> bhij", a, b), {})
    assert call.letters == ("bihd", "bjhd", "bhij")
    assert torch.equal(call.run({0: -a}), torch.einsum("bihd,bjhd->bhij", -a, b))
    assert product_call(torch.einsum, ("bihd,bjhd->bhij", [a, b]), {}).operands[1] is b
    spelled = product_call(torch.einsum, ("...hd,...gd->...hg", a, b), {})
    assert torch.equal(torch.einsum("{},{}->{}".format(*spelled.letters), a, b), spelled.run())
    assert product_call(torch.einsum, ("...hd,...gd->...hg", a, b[:1]), {}) is None, "an axis is broadcast"
    q = call.arranged(0, "bhidz")
    assert torch.equal(q, a.transpose(1, 2)[..., None]), "an axis that it lacks has length 1"
    assert torch.equal(call.restored(0, q, "bhidz"), a)
    for equation, tensors in (
        ("bihd,bjhd", (a, b)), ("...d,...d->...", (a, b[0])), ("bihd->bhid", (a,)), ("iihd,bjhd->bhij", (a, b)), ("b,b,b->b", (a, b, a)),
    ):  # fmt: skip
        assert product_call(torch.einsum, (equation, *tensors), {}) is None


def axes(scores, values, pattern=0, key=None):
    lengths = dict.fromkeys("abx", B) | dict.fromkeys("ijst", T) | {"h": H, "k": H, "y": H, "g": 7}
    calls = []
    for equation in (scores, values):
        tensors = (torch.ones([lengths.get(c, D) for c in term]) for term in equation.split("->")[0].split(","))
        calls.append(product_call(torch.einsum, (equation, *tensors), {}))
    return attention_axes(*calls, pattern, B, T, scores[-1] if key is None else key)


@pytest.mark.parametrize(
    ("scores", "values", "pattern", "told"),
    [
        ("bihd,bjhd->bhij", "bhij,bjhe->bihe", 0, ((0, "bhid", "bhjd"), ("bhij", "bhje", "bhie"))),
        ("bjhd,bihd->bhij", "bjhe,bhij->bhie", 1, ((1, "bhid", "bhjd"), ("bhij", "bhje", "bhie"))),
        ("bkgid,bkjd->bkgij", "bkgij,bkjd->bkgid", 0, ((0, "bkgid", "bkgjd"), ("bkgij", "bkgjd", "bkgid"))),
        ("ahic,ahcj->ahij", "xyst,xytu->xysu", 0, ((0, "ahic", "ahjc"), ("xyst", "xytu", "xysu"))),
        ("bihd,bjhd->ihbj", "ihbj,bjhe->bihe", 0, ((0, "bhid", "bhjd"), ("bhij", "bhje", "bhie"))),
        ("bikgd,bjkd->bigkj", "bigkj,bjkd->bikgd", 0, ((0, "bkgid", "bkgjd"), ("bkgij", "bkgjd", "bkgid"))),
    ],
)  # fmt: skip
def test_the_axes_of_an_attention_are_read_off_its_two_products(scores, values, pattern, told):
    assert axes(scores, values, pattern) == told


@pytest.mark.parametrize(
    ("scores", "values"),
    [
        ("bihde,bjhde->bhij", "bhij,bjhd->bihd"),  # two axes are summed over
        ("bihd,bjh->bhij", "bhij,bjhd->bihd"),  # none is
        ("bihd,bhd->bhid", "bhij,bjhd->bihd"),  # keys that have no positions
        ("bihd,bjhd->bhij", "bhij,bjh->bih"),  # values of no width
        ("bihd,bjhd->bhij", "bhij,bjhde->bihde"),  # and of two
    ],
)
def test_products_of_another_form_are_no_attention(scores, values):
    assert axes(scores, values) is None


# ---- masks ----------------------------------------------------------------------------------------------------------

AT = torch.arange(6)
PAST = AT[:, None] >= AT


@pytest.mark.parametrize(
    ("mask", "causal", "window", "told"),
    [
        (None, True, None, CAUSAL),
        (None, False, None, FUTURE),
        (None, True, 5, "sliding window of 5"),
        (None, True, 6, CAUSAL),
        (PAST, False, None, CAUSAL),
        (torch.ones(1, 6, dtype=torch.bool), True, None, CAUSAL),
        (torch.ones(1, 6, dtype=torch.bool), False, None, FUTURE),
        (PAST & (AT[:, None] - AT < 3), False, None, "sliding window of 3"),
        (PAST & (AT[:, None] - AT < 1), False, None, "sliding window of 1"),
        (PAST & (AT >= 2), False, None, "padding"),
        (PAST & (AT[:, None] // 3 == AT // 3), False, None, "packed sequences"),
        (PAST & ((AT[:, None] - AT) != 2), False, None, "hides some earlier positions"),
        (PAST & (AT[:, None] // 2 - AT // 2 < 2), False, None, "hides some earlier positions"),
        (PAST & False, False, None, NOTHING),
        (torch.where(PAST, 0.0, -1e4), False, None, CAUSAL),
        (torch.where(PAST, 0.0, -1000.0), False, None, CAUSAL),
        (torch.where(PAST, 0.0, -400.0), False, None, FUTURE),
        (torch.where(PAST & (AT >= 2), 0.0, -9999.0), False, None, "padding"),
        (torch.where(PAST, 0.5, -math.inf), False, None, "adds a bias to the scores"),
        ("blocks", True, None, "a mask of type str"),
    ],
)
def test_masks_are_told_by_what_they_hide(mask, causal, window, told):
    assert mask_kind(mask, causal, 6, window) == told


@pytest.mark.fast(4)
@pytest.mark.parametrize("form", ["of each head", "of all heads", "of each text", "bias", "rows of nothing", "none"])
def test_statistics_under_a_mask_are_those_of_the_whole_pattern(form):
    """300 positions: more than one strip of queries; two heads read each key-value head."""
    t, heads = 300, 4
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, t, n, 4, generator=generator, dtype=torch.double) for n in (heads, 2, 2))
    at = torch.arange(t)
    past = at[:, None] >= at
    mask = {
        "of each head": torch.stack([past & (at[:, None] - at < 9 * (h + 1)) for h in range(heads)]),
        "of all heads": past & (at % 3 > 0),
        "of each text": torch.stack([past & (at >= 3 * b) for b in range(2)])[:, None],
        "bias": torch.where(past, (at - at[:, None]) * 0.01, -math.inf).double(),
        "rows of nothing": past & (at[:, None] > 4),
        "none": None,
    }[form]
    z, found = masked_statistics(q, k, v, scale=0.7, mask=mask, causal=form == "none")
    k, v = (x.repeat_interleave(2, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * 0.7
    mask = past if mask is None else mask
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    pattern = scores.softmax(-1).nan_to_num(0.0)
    wanted = statistics_of(scores, pattern)
    own = pattern_statistics(scores.logsumexp(-1), pattern)
    torch.testing.assert_close(z, torch.einsum("bhij,bjhd->bihd", pattern, v))
    for name in STATISTICS:
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), msg=name)
        torch.testing.assert_close(getattr(own, name), getattr(wanted, name), msg=name)


def test_the_ids_of_a_call_are_its_first_integers_with_two_axes():
    ids, mask = torch.arange(6).view(2, 3), torch.ones(3, 3, dtype=torch.bool)
    assert ids_among((mask, torch.rand(2, 3)), {"ids": ids}) is ids
    assert ids_among((mask,), {}) is None
