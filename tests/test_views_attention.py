"""What the page Attention draws is the model's own attention: every head, one head's window, its strips and its numbers."""

from __future__ import annotations

import json
import zlib

import dashboard
import numpy as np
import pytest

from workbench import plots
from workbench.checkpoints.saving import save
from workbench.errors import BadData, UnknownName
from workbench.models import build
from workbench.runs.run import Run
from workbench.views import Link, attention, drawings
from workbench.views.registered_views import timelapse

TEXT = "return values / len(values) + 1"
LONG = "x = mean(values)\n" * 60


@pytest.fixture(scope="module")
def ask(populated, tmp_path_factory):
    folder = dashboard.copied(populated, tmp_path_factory.mktemp("copied") / "runs")
    shape = dashboard.MODEL | {"d_vocab": 270, "init_std": 0.8}  # sharp attention, so that heads differ
    for name in ("text-resformer-s0", "text-transformer-s0"):
        path = folder / name / "step_000020"
        for file in path.iterdir():
            file.unlink()
        save(build(name.split("-")[1], shape, seed=len(name)), path, seed=0, step=20, run=name)
    dashboard.run(folder, "long-resformer-s0", "resformer", 0, "text")
    long = shape | {"n_ctx": 2048}
    run = folder / "long-resformer-s0" / "run.json"
    run.write_text(json.dumps(json.loads(run.read_text()) | {"model": long}))
    for step in dashboard.STEPS:
        path = folder / "long-resformer-s0" / f"step_{step:06d}"
        for file in path.iterdir():
            file.unlink()
        save(build("resformer", long, seed=step), path, seed=0, step=step, run="long-resformer-s0")
    return dashboard.kept(folder)


def link(**options):
    return Link("attention", {"a": "text-resformer-s0", "prompt": TEXT} | {k: str(v) for k, v in options.items()})


def compared(**options):
    return link(compare=1, b="text-transformer-s0", **options)


def drawn(ask, name, of):
    ((_, drawing),) = drawings(ask, of, name)
    return drawing


def patterns(ask, name="text-resformer-s0", text=TEXT):
    """[layer, head, query, key] from the model's own hook points."""
    model = Run.open(ask.folder / name).load()
    _, cache = model.run_with_cache(model.to_tokens(np.array([model.tokenizer.encode(text)])))
    return np.stack([cache[f"blocks.{n}.attn.hook_pattern"][0].numpy() for n in range(2)])


def heat(drawing, i=0):
    return np.asarray(drawing.figure.data[i].z, dtype=float)


# ---- the map of one head ----


@pytest.mark.slow
def test_the_map_is_the_models_pattern_and_its_future_is_blank(ask):
    z, expected = heat(drawn(ask, "weights", link(layer=1, head=1))), patterns(ask)[1, 1]
    past = np.tril(np.ones_like(expected, dtype=bool))
    assert z[past] == pytest.approx(expected[past], abs=1e-5)
    assert np.isnan(z[~past]).all()


@pytest.mark.slow
def test_a_window_is_that_piece_of_the_map_with_its_tokens_named(ask):
    drawing = drawn(ask, "weights", link(layer=0, head=1, queries="6-9", keys="2-4"))
    assert heat(drawing) == pytest.approx(patterns(ask)[0, 1][6:10, 2:5], abs=1e-5)
    tokens = ask.tokens(ask.subjects(link())[0], TEXT)
    assert [t.rstrip("\u200b") for t in drawing.figure.data[0].x] == [f"{i}:{tokens[i]}" for i in range(2, 5)]
    assert "cell: one weight" in drawing.figure.layout.title.subtitle.text
    assert len(drawing.table) == 12


@pytest.mark.slow
def test_a_long_prompt_is_pooled_and_a_window_of_it_refines_to_single_weights(ask):
    tokens = len(Run.open(ask.folder / "long-resformer-s0").load().tokenizer.encode(LONG))
    assert tokens > attention.CELLS
    of = link(a="long-resformer-s0", prompt=LONG, layer=1, head=0)
    pooled = heat(drawn(ask, "weights", of))
    assert pooled.shape == (attention.CELLS, attention.CELLS)
    assert np.nansum(pooled, 1) == pytest.approx(1.0, abs=1e-4)  # a row's mass is all of it at every zoom
    exact = drawn(ask, "weights", of.but(queries=f"{tokens - 40}-{tokens - 1}", keys="0-29"))
    expected = patterns(ask, "long-resformer-s0", LONG)[1, 0]
    assert heat(exact) == pytest.approx(expected[-40:, :30], abs=1e-5)
    most = heat(drawn(ask, "weights", of.but(pool="max")))
    assert np.nanmax(most) == pytest.approx(expected.max(), abs=1e-5)


def test_two_models_share_a_scale_and_their_difference_has_its_own(ask):
    drawing = drawn(ask, "weights", compared(layer=1, head=0))
    a, b = patterns(ask)[1, 0], patterns(ask, "text-transformer-s0")[1, 0]
    past = np.tril(np.ones_like(a, dtype=bool))
    assert heat(drawing, 2)[past] == pytest.approx((a - b)[past], abs=2e-5)
    shared, own = drawing.figure.layout.coloraxis, drawing.figure.layout.coloraxis2
    assert (shared.cmin, shared.cmax) == (0, pytest.approx(max(a[1:].max(), b[1:].max()), abs=1e-5))
    assert own.cmax == -own.cmin == pytest.approx(np.abs(a - b).max(), abs=1e-5)
    assert [t.coloraxis for t in drawing.figure.data] == ["coloraxis", "coloraxis", "coloraxis2"]


def test_models_that_read_other_tokens_are_not_subtracted(ask):
    drawing = drawn(ask, "weights", link(compare=1, b="race-svformer-s0", prompt="abcabc"))
    assert len(drawing.figure.data) == 2
    assert "not drawn" in drawing.figure.layout.title.subtitle.text


# ---- all heads ----


@pytest.mark.slow
def test_numbers_of_a_head_stand_beside_evenly_spread_attention(ask):
    drawing, expected = drawn(ask, "numbers", compared()), patterns(ask)
    T = expected.shape[-1]
    table = drawing.table
    own = table[(table["model"] == "A: ResFormer · s0, step 20") & (table["layer"] == 1) & (table["head"] == 0)]
    rows = -np.nansum(expected[1, 0] * np.log(np.where(expected[1, 0] > 0, expected[1, 0], 1)), -1)
    assert own["row_entropy"].item() == pytest.approx(rows.mean(), abs=1e-5)
    assert own["effective_keys"].item() == pytest.approx(np.exp(rows).mean(), rel=1e-4)
    evenly = table[table["model"].str.endswith("spread evenly")].iloc[0]
    assert evenly["effective_keys"] == pytest.approx((T + 1) / 2)
    minus = table[table["model"] == plots.MINUS]
    other = table[table["model"].str.startswith("B: T") & table["head"].notna()]
    assert minus["sink_mass"].tolist() == pytest.approx(
        (table["sink_mass"][:4].to_numpy() - other["sink_mass"].to_numpy()).tolist()
    )


# ---- strips ----


def test_time_lapse_plays_the_map_over_the_checkpoints(ask):
    played = timelapse(attention.weights, ask, link(a="long-resformer-s0", layer=0, head=1))
    assert [f.name for f in played.figure.frames] == ["step 0", "step 8", "step 20"]
    first, last = (np.asarray(played.figure.frames[i].data[0].z, dtype=float) for i in (0, 2))
    assert np.nanmax(np.abs(first - last)) > 0.01


@pytest.mark.slow
def test_keys_of_one_layer_alone_can_be_chosen_where_a_layer_sees_several(ask):
    dashboard.run(ask.folder, "cross-s0", "cross_layer", 0, "text")
    of = link(a="cross-s0", layer=1, head=0)
    names = attention.attention_options(ask, of).branches
    assert len(names) > 1
    parts = [heat(drawn(ask, "weights", of.but(branch=name))) for name in names]
    assert sum(np.nan_to_num(p) for p in parts) == pytest.approx(
        np.nan_to_num(heat(drawn(ask, "weights", of))), abs=1e-6
    )
    said = [drawn(ask, "weights", of.but(branch=n)).figure.layout.title.subtitle.text for n in names]
    assert "keys of the layer itself only" in said[names.index("own")]
    assert any("keys of the first layer only" in s for s in said)
    beside = link(a="text-transformer-s0", layer=1, head=0)
    compared = of.but(
        compare=1, b="text-transformer-s0", branch=names[0]
    )  # which has no such keys: all of its are shown
    shown = [np.asarray(t.z, dtype=float) for t in drawn(ask, "weights", compared).figure.data]
    for found, alone in zip(shown, (parts[0], heat(drawn(ask, "weights", beside))), strict=False):
        np.testing.assert_allclose(found, alone, atol=1e-6)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"layer": 2}, UnknownName, "layer"),
        ({"queries": "5-4"}, BadData, "first and the last"),
        ({"lock": 99}, UnknownName, "position"),
        ({"scale": "log"}, UnknownName, "scale"),
        ({"branch": "other"}, UnknownName, "set of keys"),
    ],
)
def test_what_is_not_there_is_refused_by_name(ask, options, error, word):
    with pytest.raises(error, match=word):
        drawn(ask, "weights", link(**options))


# ---- what the page's element is sent ----


def unpacked(sent):
    data = zlib.decompress(sent)
    size = int.from_bytes(data[:4], "little")
    header = json.loads(data[4 : 4 + size])

    def at(place, kind):
        return np.frombuffer(data, kind, place[1], 4 + size + place[0])

    return header, at


def test_the_element_gets_every_number_in_few_bytes(ask):
    from app.elements.attention import packed_attention

    choice, found = attention.seen(ask, compared(layer=1, head=0, lock=5))
    data = packed_attention(choice, found, "said")
    header, at = unpacked(data)
    assert header["minus"]
    for panel, name in zip(header["panels"], ("text-resformer-s0", "text-transformer-s0"), strict=True):
        expected = patterns(ask, name)
        past = np.tril(np.ones(expected.shape[-2:], dtype=bool))
        weights = at(panel["weights"], np.uint16) * (panel["top"] / 65535)
        assert weights == pytest.approx(expected[1, 0][past], abs=1e-5)
        tiles = at(panel["tiles"], np.uint8) * (panel["brightest"] / 255)
        assert tiles == pytest.approx(expected[..., past].ravel(), abs=0.5 / 255 + 1e-6)
        assert at(panel["row"], np.float32)[:6] == pytest.approx(expected[1, 0][5, :6], abs=1e-5)
        assert (at(panel["row"], np.float32)[6:] == -1).all()
        assert (
            panel["sink"][2] == pytest.approx(found[0].overview.statistics["sink_mass"][2], abs=1e-4)
            or panel["tag"] == "B"
        )
        for place in (panel["weights"], panel["tiles"], panel["row"], panel["received"]):
            assert place[0] % 4 == 0


@pytest.mark.parametrize(
    ("options", "exact"),
    [
        ({}, False),
        ({"compare": "1", "b": "long-resformer-s0", "step_b": "8", "queries": "700-1000", "keys": "0-350"}, True),
    ],
)
def test_a_view_of_a_long_prompt_stays_below_half_a_megabyte(ask, options, exact):
    from app.elements.attention import packed_attention

    choice, found = attention.seen(ask, link(a="long-resformer-s0", prompt=LONG * 2, lock=1100, **options))
    assert choice.length == 1200
    assert all(s.window.exact == exact for s in found)
    assert len(packed_attention(choice, found, "")) < 450_000


# ---- other tokens, other words ----


@pytest.mark.slow
def test_a_query_of_a_is_held_in_b_only_where_both_read_the_same_tokens(ask):
    other = link(a="race-svformer-s0", compare=1, b="text-resformer-s0", prompt="qvzqvz", lock=2)
    choice, (a, b) = attention.seen(ask, other)
    assert not choice.alike
    assert a.row is not None
    assert b.row is None
    assert {t.name for t in drawn(ask, "query", other).figure.data} == {plots.label(a.subject.series)}
    assert all(s.row is not None for s in attention.seen(ask, compared(lock=2))[1])
