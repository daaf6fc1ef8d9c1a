"""The forms of a figure of records: lines over layers, steps or ranks with their bands, heat maps, bars."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from workbench.plots.style import GREY, MINUS, colour, label, ordered, pale, symbol, words
from workbench.statistics.intervals import MIN_SEEDS, confidence, over_seeds, t_quantile

KEY = ["metric", "variant", "site", "part", "data", "T", "unit"]
# column, in words
MAPS = {"positions": ("position", "position"), "heads": ("head", "head"), "pairs": ("source", "the other layer")}
MAX_POINTS = 300  # of a smoothed curve
MAX_MARKS = 8  # along a curve of many points
MAX_PRINTED, MAX_ABREAST = 64, 8  # cells of a map, and of its row, that carry their number
INIT, CONTROL = "step 0 (random init)", "control"
MAX_WHOLE = 16  # largest span of an integer axis with a tick at each number
SPREADS = {"range": "range over seeds", "se": "standard error", "ci": "confidence interval"}
"""What error bars over seeds show."""
DASHES = ("dot", "dashdot", "longdash")  # of controls


@dataclass
class Panel:
    """Rows of one metric, variant, site, data and length, and the form in which they are drawn."""

    form: str
    title: str
    rows: pd.DataFrame
    key: tuple[Any, ...]
    baseline: float | None = None
    """Of a map, where it is one number."""


@dataclass
class Legend:
    """Shared state of a figure's panels: series, legend entries so far, and the meaning of bands."""

    series: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    bands: set[str] = field(default_factory=set)
    spread: str = "range"
    """Error bars over seeds: a key of `SPREADS`."""


def whole_ticks(numbers: Any) -> int | None:
    """Return a tick distance of 1 for a short axis of integers, which plotly would divide; None for a longer one."""
    known = pd.Series(numbers, dtype="float64").dropna()
    return 1 if len(known) and known.max() - known.min() <= MAX_WHOLE and not (known % 1).any() else None


def _curve(
    rows: pd.DataFrame, x: str, smooth: int = 1, *, paired: bool = False, spread: str = "range"
) -> tuple[pd.DataFrame, str, bool]:
    """Return mean, low and high over seeds (`paired`: over paired differences) at each x, their caption, and whether seeds vary."""
    runs = rows.pivot_table(index=x, columns="run", values="value", aggfunc="mean").sort_index()
    if smooth > 1:
        runs = runs.rolling(smooth, min_periods=1, center=True).mean()
    mean, n = runs.mean(axis=1), runs.shape[1]
    curve = pd.DataFrame({"mean": mean, "low": mean, "high": mean})
    if n > 1 and (spread == "ci" or (paired and n >= MIN_SEEDS)):
        intervals = [over_seeds(values.dropna()) for _, values in runs.iterrows()]
        low, high = ([getattr(i, end) for i in intervals] for end in ("low", "high"))
        kind = (
            f"{confidence()} interval over {n} paired seeds" if paired else f"band: {confidence()} interval over seeds"
        )
        return curve.assign(low=low, high=high), kind, True
    if n > 1 and spread == "se":
        se = runs.std(axis=1, ddof=1) / np.sqrt(runs.notna().sum(axis=1))
        return curve.assign(low=mean - se, high=mean + se), "band: ± standard error over seeds", True
    if n > 1:
        return curve.assign(low=runs.min(axis=1), high=runs.max(axis=1)), "band: range over seeds", True
    se = rows.groupby(x)["se"].mean().reindex(mean.index).astype("float64")
    if not se.notna().any():
        return curve, "", False
    times, kind = (t_quantile(math.inf), f"{confidence()} interval") if spread == "ci" else (1.0, "± standard error")
    return curve.assign(low=mean - times * se, high=mean + times * se), f"one seed: {kind} over documents", False


def lines(
    figure: go.Figure, rows: pd.DataFrame, x: str, where: dict[str, int], legend: Legend, smooth: int = 1
) -> None:
    """Draw one line per architecture (and step, in a profile), and controls of the last step in dotted grey.

    Seeds give a line a band. The error over documents of a single seed is drawn as whiskers: it says nothing about seeds.
    """
    measured = rows[rows["control"].isna()]
    at_init = x != "step" and len(measured["step"].dropna().unique()) > 1
    for architecture in ordered(measured["architecture"]):
        mine = measured[measured["architecture"] == architecture]
        for step in [None] if x == "step" else sorted(mine["step"].dropna().unique()) or [None]:
            part = mine if step is None else mine[mine["step"] == step]
            paired = architecture == MINUS
            curve, band, of_seeds = _curve(part, x, smooth, paired=paired, spread=legend.spread)
            if smooth > 1 and len(curve) > MAX_POINTS:  # what was smoothed loses nothing
                curve = curve.iloc[np.unique(np.linspace(0, len(curve) - 1, MAX_POINTS).round().astype(int))]
            alone = paired and part["run"].nunique() == 1
            band = "± standard error of independent means, one pair of runs" if band and alone else band
            legend.bands.add(f"{MINUS}: {band}" if band and paired else band)
            _line(figure, curve, architecture, x, step, where, legend, init=step == 0 and at_init, of_seeds=of_seeds)
    controls = rows[rows["control"].notna()]
    if at_init:  # of what is drawn in full, not a mean with those of random init
        controls = controls[controls["step"].eq(controls.groupby("run")["step"].transform("max"))]
    for dash, (control, part) in zip(DASHES, controls.groupby("control"), strict=False):
        line = part.groupby(x)["value"].mean()
        figure.add_scatter(
            x=line.index, y=line, mode="lines", name=words(control), line={"color": GREY, "dash": dash, "width": 1.6},
            legendgroup=str(control), showlegend=str(control) not in legend.names, meta=CONTROL,
            hovertemplate=f"{words(control)}<br>{x} %{{x}}: %{{y:.4g}}<extra></extra>", **where,
        )  # fmt: skip
        legend.names.add(str(control))


def _line(
    figure: go.Figure, curve: pd.DataFrame, architecture: str, x: str, step: float | None, where: dict[str, int],
    legend: Legend, *, init: bool, of_seeds: bool,
) -> None:  # fmt: skip
    """Draw a curve with its band or whiskers; random init beside another step is dashed and shares one legend entry."""
    name, at = label(architecture), "" if step is None else f" at step {step:.0f}"
    whiskers, varies = None, (curve["low"] < curve["high"]).any()
    if varies and not of_seeds:
        whiskers = {
            "array": curve["high"] - curve["mean"],
            "arrayminus": curve["mean"] - curve["low"],
            "thickness": 0.8,
            "width": 2,
        }
    elif varies:
        outline = np.concatenate([curve["high"], curve["low"][::-1]])
        around = np.concatenate([curve.index, curve.index[::-1]])
        figure.add_scatter(
            x=around, y=outline, fill="toself", fillcolor=pale(architecture, 0.10 if init else 0.18, legend.series), line_width=0,
            hoverinfo="skip", showlegend=False, legendgroup=name, name=f"{name} band", mode="lines", **where,
        )  # fmt: skip
    figure.add_scatter(
        x=curve.index, y=curve["mean"], mode="lines+markers", name=f"{name}{at if init else ''}",
        line={"color": colour(architecture, legend.series), "dash": "dash" if init else "solid", "width": 1.3 if init else 2.2},
        marker={"size": 5 if init else 7, "symbol": symbol(architecture, legend.series) + ("-open" if init else ""),
                "maxdisplayed": MAX_MARKS if len(curve) > 24 else 0},
        legendgroup=name, showlegend=not init and name not in legend.names, error_y=whiskers,
        customdata=[[int(n)] for n in curve.index] if x == "layer" and (curve.index % 1 == 0).all() else None,
        hovertemplate=f"{name}{at}<br>{x} %{{x}}: %{{y:.4g}}<extra></extra>", **where,
    )  # fmt: skip
    if not init:
        legend.names.add(name)
    elif INIT not in legend.names:
        legend.names.add(INIT)
        line = {"color": GREY, "dash": "dash", "width": 1.3}
        figure.add_scatter(x=[None], y=[None], mode="lines", name=INIT, line=line, hoverinfo="skip", **where)


def _draw_profile(figure: go.Figure, panel: Panel, where: dict[str, int], legend: Legend, _: int) -> None:
    lines(figure, panel.rows[panel.rows["layer"].notna()], "layer", where, legend)
    figure.update_xaxes(title_text="layer", dtick=whole_ticks(panel.rows["layer"]), **where)


def _draw_steps(figure: go.Figure, panel: Panel, where: dict[str, int], legend: Legend, smooth: int) -> None:
    lines(figure, panel.rows, "step", where, legend, smooth)
    figure.update_xaxes(title_text="training step", dtick=whole_ticks(panel.rows["step"]), **where)


def _draw_ranks(figure: go.Figure, panel: Panel, where: dict[str, int], legend: Legend, _: int) -> None:
    lines(figure, panel.rows, "index", where, legend)
    figure.update_xaxes(title_text="rank", dtick=whole_ticks(panel.rows["index"]), **where)


def _draw_map(figure: go.Figure, panel: Panel, where: dict[str, int], *_: Any) -> None:
    column, axis = MAPS[panel.form]
    placed = panel.rows.dropna(subset=["layer", column])
    grid = placed.pivot_table(index="layer", columns=column, values="value", aggfunc="mean", dropna=False)
    name = panel.title.split(":")[0]
    hover = f"{name}<br>layer %{{y}}, {axis} %{{x}}: %{{z:.4g}}<extra></extra>"
    key = panel.rows["metric"].iloc[0] + str(tuple(map(str, panel.rows[KEY].iloc[0])))
    z, x, y = grid.to_numpy(dtype="float32"), grid.columns.astype(int).tolist(), grid.index.astype(int).tolist()
    printed = "%{z:.2g}" if z.size <= MAX_PRINTED and z.shape[1] <= MAX_ABREAST else None
    figure.add_heatmap(z=z, x=x, y=y, name=panel.title, meta=key, hovertemplate=hover, texttemplate=printed, **where)
    figure.update_xaxes(title_text=axis, dtick=whole_ticks(grid.columns), **where)
    figure.update_yaxes(title_text="layer", dtick=whole_ticks(grid.index), **where)


def _draw_bars(figure: go.Figure, panel: Panel, where: dict[str, int], legend: Legend, _: int) -> None:
    measured = panel.rows[panel.rows["control"].isna()]
    steps = sorted(measured["step"].dropna().unique()) or [np.nan]
    for step in steps:
        rows = measured if pd.isna(step) else measured[measured["step"] == step]
        names = ordered(rows["architecture"])
        curves = [_curve(rows[rows["architecture"] == a].assign(one=0.0), "one", spread=legend.spread) for a in names]
        legend.bands |= {band.replace("band", "whisker") for _, band, _ in curves}
        mean, low, high = ([float(c[k].iloc[0]) for c, *_ in curves] for k in ("mean", "low", "high"))
        init = step == 0 and len(steps) > 1
        looks = [colour(a, legend.series) for a in names]
        when, line = "" if pd.isna(step) else f"step {step:.0f}", {"color": looks, "width": 1}
        figure.add_bar(
            x=[label(a).replace(" ", "<br>") for a in names], y=mean, name=when, showlegend=False,
            marker={"color": [pale(a, among=legend.series) for a in names] if init else looks, "line": line},
            error_y={"array": np.subtract(high, mean), "arrayminus": np.subtract(mean, low), "color": GREY},
            hovertemplate=f"%{{x}}{when and f' at {when}'}: %{{y:.4g}}<extra></extra>", **where,
        )  # fmt: skip
        if init:
            legend.bands.add("pale bars: step 0, random init")


DRAW: dict[str, Callable[..., None]] = {
    "profile": _draw_profile, "steps": _draw_steps, "ranks": _draw_ranks, "bars": _draw_bars,
    **dict.fromkeys(MAPS, _draw_map),
}  # fmt: skip
