"""Figures of extreme records: bands, whiskers and ticks lie inside their axes, and colour scales cover their values."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from workbench import plots
from workbench.plots.heat_maps import signed
from workbench.plots.style import values_by_axis
from workbench.plots.token_map_figures import separation_figure
from workbench.runs.records import provenance, records

MODELS = ("transformer", "resformer")
EXTREMES = {
    "one seed": {"seeds": 1}, "equal values": {"spread": 0.0}, "rounding noise": {"spread": 1e-11}, "tiny spread": {"spread": 1e-4},
    "huge spread": {"spread": 1e6}, "large error": {"seeds": 1, "se": 0.5}, "48 layers": {"layers": 48}, "1 layer": {"layers": 1},
    "a NaN": {"missing": True}, "negative": {"level": -3.0}, "zero": {"level": 0.0, "spread": 0.0},
}  # fmt: skip


def measured(
    level=0.0078125, spread=0.01, se=0.002, seeds=3, layers=4, heads=0, missing=False, metric="sink_mass", steps=(0, 20)
):
    rng, known = np.random.default_rng(0), provenance(assumed=False, reading="higher: more", key="k")
    axes = {"data": "validation", "T": 16, "n": 4, "provenance": known, "metric": metric, "unit": "share"}
    rows = []
    for model in MODELS:
        for seed in range(seeds):
            for step in steps:
                for layer in range(layers):
                    for head in range(heads) if heads else (None,):
                        value = level + spread * rng.uniform(-1, 1)
                        value = np.nan if missing and (seed, layer) == (0, 0) else value
                        at = {
                            "run": f"{model}-{seed}",
                            "architecture": model,
                            "seed": seed,
                            "step": step,
                            "layer": layer,
                            "head": head,
                        }
                        rows.append(axes | at | {"value": value, "se": se})
            for layer in range(layers):
                at = {"run": f"{model}-{seed}", "architecture": model, "seed": seed, "step": steps[-1], "layer": layer}
                rows.append(axes | at | {"control": "uniform_causal", "value": 0.25})
    return records(rows)


def check(figure):
    """Everything drawn lies inside its axis; integer axes have whole ticks; colour scales reach their values."""
    every = values_by_axis(figure)
    for name, drawn in values_by_axis(figure, skip="control").items():
        axis = figure.layout[name]
        if axis.range is not None and axis.type != "log":
            assert axis.range[0] <= drawn.min(), name
            assert drawn.max() <= axis.range[1], name
        elif axis.type != "log":
            span = np.ptp(every[name])
            assert span > 1e-6 * np.abs(every[name]).max() or not np.abs(every[name]).max(), f"{name} shows rounding"
    for scale in {t.coloraxis for t in figure.data if t.type == "heatmap"}:
        colours, maps = figure.layout[scale], [t for t in figure.data if t.type == "heatmap" and t.coloraxis == scale]
        z = np.concatenate([np.asarray(t.z, dtype=float).ravel() for t in maps])
        z = z[np.isfinite(z)]
        if len(z):
            assert colours.cmin <= z.min() + 1e-6 * abs(z.min()), "values below the colour scale"
            assert z.max() <= colours.cmax + 1e-6 * abs(z.max()), "values above the colour scale"
            minus = all(t.name.startswith(plots.MINUS) for t in maps)
            assert minus or colours.cmin >= 0 or z.min() < 0, "the scale has negative values and the map none"
    for axis in (*figure.select_xaxes(), *figure.select_yaxes()):
        if (
            axis.title.text in ("layer", "head", "rank", "position")
            and axis.type != "category"
            and axis.tickvals is None
        ):
            letter, number = axis.plotly_name[0], axis.plotly_name[5:]
            drawn = [
                t[letter]
                for t in figure.data
                if str(t[f"{letter}axis"] or letter)[1:] == number and t[letter] is not None
            ]
            numbers = np.array([v for values in drawn for v in values if v is not None], dtype=float)
            assert axis.dtick == 1 or np.ptp(numbers) > 16, f"{axis.title.text} has ticks between whole numbers"


CASES = [("profile", name) for name in EXTREMES] + [
    ("heads", "one seed"), ("heads", "equal values"), ("heads", "48 layers"), ("heads", "negative"), ("bars", "huge spread"),
    ("bars", "equal values"), ("bars", "large error"), ("steps", "one seed"), ("steps", "rounding noise"), ("steps", "a NaN"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.fast(3)
@pytest.mark.parametrize(("form", "extreme"), CASES)
def test_a_figure_of_extreme_records_shows_all_it_draws(form, extreme):
    given = EXTREMES[extreme] | ({"heads": 4} if form == "heads" else {})
    given |= {"layers": 1} if form == "bars" else {"steps": (0, 5, 20), "layers": 1} if form == "steps" else {}
    frame = measured(**given)
    check(plots.plot(frame, form=form, spread="ci" if extreme in ("huge spread", "large error") else "range"))
    a, b = (frame[frame["architecture"] == name] for name in MODELS)
    seed = int(extreme == "a NaN")
    check(plots.compared([a[a["seed"] == seed], b[b["seed"] == seed]], form=form))


@pytest.mark.parametrize("values", [np.zeros((3, 3)), np.full((48, 24), 1e9), np.full((1, 1), np.nan), np.eye(4) - 0.5])
def test_maps_of_extreme_numbers_have_a_scale_that_covers_them(values):
    rows, columns = ([str(i) for i in range(n)] for n in values.shape)
    texts = np.full(values.shape, "token", dtype=object)
    figure = plots.grids([("a", plots.Grid(values, rows, columns, "nats", "layer", "token", texts))], "Map")
    check(figure)
    assert figure.layout.height >= 14 * len(rows), "the words of neighbouring rows overlap"


@pytest.mark.slow
@pytest.mark.parametrize("values", [[0.0], [1.0] * 48, [-0.2, np.nan, 0.9], [0.5, 0.5 + 1e-9]])
def test_lines_by_layer_beside_their_chance_show_all_that_they_draw(values):
    layers = range(len(values))
    table = pd.DataFrame(
        {"architecture": "transformer", "measure": "share", "layer": layers, "value": values, "chance": 1.0}
    )
    check(separation_figure(table, "Lines", ""))
    two = pd.concat([table, table.assign(architecture="resformer")])
    for figure in (separation_figure(table, "Lines", ""), separation_figure(two, "Lines", "")):
        named = {trace.name: (trace.line.color, trace.line.dash) for trace in figure.data if trace.showlegend}
        assert len(named) == len(figure.data), "the legend has every line as it is drawn"


@pytest.mark.parametrize(
    ("values", "texts"),
    [([0.5, -0.0123], ["+0.500", "−0.012"]), ([0.00623, -1e-7], ["+6.2e−3", "0"]), ([-123.4, 0.4], ["−123", "0"])],
)
def test_signed_numbers_fit_a_cell(values, texts):
    assert signed(np.array(values)).tolist() == texts
