"""One figure for any records: its form follows from the axes that vary, comparisons share their scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.errors import UnknownName, WorkbenchError
from workbench.plots.style import (
    DETAIL,
    DIVERGING,
    GREY,
    MINUS,
    SEQUENTIAL,
    axis_title,
    colour,
    dressed,
    label,
    ordered,
    outer_titles,
    pale,
    reading,
    site,
    subtitle,
    symbol,
    words,
)

KEY = ["metric", "variant", "site", "part", "data", "T", "unit"]
FORMS = ("profile", "steps", "positions", "heads", "ranks", "pairs", "bars")
MAPS = {
    "positions": ("position", "position"),
    "heads": ("head", "head"),
    "pairs": ("source", "the other layer"),
}  # column, in words
MOST_PANELS = 24
MOST_POINTS = 300  # of a smoothed curve
MOST_MARKS = 8  # along a curve of many points
MOST_PRINTED, MOST_ABREAST = 64, 8  # cells of a map, and of its row, that carry their number


@dataclass
class _Panel:
    form: str
    title: str
    rows: pd.DataFrame
    key: tuple[Any, ...]


def checked(frame: pd.DataFrame) -> pd.DataFrame:
    """A copy with plain numbers on its axes; raises `WorkbenchError` where nothing was measured."""
    frame = frame[frame["value"].notna()]
    if frame.empty or frame["control"].isna().sum() == 0:
        raise WorkbenchError("no records to plot; measure something first")
    frame = frame.copy()
    frame["architecture"] = frame["architecture"].fillna("model")
    frame["run"] = frame["run"].fillna(frame["architecture"])
    for name in ("step", "layer", "source", "head", "position", "index", "seed"):
        frame[name] = frame[name].astype("float64")
    return frame


def form_of(rows: pd.DataFrame) -> str:
    """The form that shows the axes of these records: heat maps for heads and positions, else curves, else bars."""
    measured = rows[rows["control"].isna()]
    varies = {axis: measured[axis].nunique() for axis in ("layer", "source", "head", "position", "index", "step")}
    if varies["step"] > 2:
        return "steps"
    if varies["position"] > 1:
        return "positions"
    if varies["index"] > 1:
        return "ranks"
    if varies["source"] > 1:
        return "pairs"
    return "heads" if varies["head"] > 1 else "profile" if varies["layer"] > 1 else "bars"


def _panels(frame: pd.DataFrame, form: str | None) -> Iterator[_Panel]:
    varying = [k for k in KEY if k != "unit" and frame[k].nunique(dropna=False) > 1]
    for group, rows in frame.groupby(KEY, dropna=False, sort=False):
        key: tuple[Any, ...] = tuple(group)
        if rows["control"].notna().all():
            continue
        values = dict(zip(KEY, key, strict=True))
        name = ", ".join(
            f"{'T = ' if k == 'T' else ''}{site(values[k]) if k == 'site' else words(values[k])}"
            for k in varying
            if not pd.isna(values[k])
        )
        if minus := str(values["unit"]).endswith(MINUS):
            name = f"{MINUS}: {name}" if name else MINUS
        chosen = form or form_of(rows)
        if chosen in MAPS:
            measured = rows[rows["control"].isna()]
            for architecture in ordered(measured["architecture"]):
                mine = measured[measured["architecture"] == architecture]
                for step in sorted(mine["step"].unique()):
                    at = "" if np.isnan(step) or DETAIL in architecture else f", step {step:.0f}"
                    part = mine if np.isnan(step) else mine[mine["step"] == step]
                    titled = name if minus else f"{label(architecture)}{at}" + (f": {name}" if name else "")
                    yield _Panel(chosen, titled, part, key)
        elif chosen == "ranks" or (chosen == "steps" and rows["layer"].nunique() + rows["head"].nunique() > 2):
            kept = rows["control"].isna() | (chosen == "ranks")
            places = (
                rows.loc[rows["control"].isna(), ["layer", "head"]].drop_duplicates().sort_values(["layer", "head"])
            )
            for layer, head in places.itertuples(index=False):
                same = (rows["layer"] == layer) & ((rows["head"] == head) | np.isnan(head)) & kept
                at = f"layer {layer:.0f}" + ("" if np.isnan(head) else f", head {head:.0f}")
                yield _Panel(chosen, f"{name}: {at}" if name else at, rows[same], key)
        else:
            yield _Panel(chosen, name, rows, key)


def plot(
    frame: pd.DataFrame,
    *,
    form: str | None = None,
    log_x: bool = False,
    log_y: bool = False,
    smooth: int = 1,
    title: str = "",
) -> go.Figure:
    """A figure of records, its form chosen by their axes; different metrics, data or lengths get panels of their own.

    `form`: one of `FORMS` instead. `log_x`, `log_y`: logarithmic axes. `smooth`: running mean over so many records.
    `title`: instead of the metric's name.
    Raises `WorkbenchError` where there is nothing to plot or more than one figure can hold.
    """
    if form is not None and form not in FORMS:
        raise UnknownName("form", form, FORMS)
    frame = checked(frame)
    panels = list(_panels(frame, form))
    if len(panels) > MOST_PANELS:
        raise WorkbenchError(
            f"{len(panels)} panels do not fit one figure; keep fewer metrics, variants, sites or steps"
        )
    abreast = len(panels) > 6 or (len(panels) == 3 and all(p.form in MAPS for p in panels))
    columns = min(len(panels), 3 if abreast else 2)
    count = -(-len(panels) // columns)
    titles = [p.title for p in panels] if len(panels) > 1 or panels[0].title else None
    figure = make_subplots(
        count,
        columns,
        subplot_titles=titles,
        vertical_spacing=0.32 / count,
        horizontal_spacing=(0.32 if any(p.key[-1] != panels[0].key[-1] for p in panels) else 0.2) / columns,
    )
    shown: set[str] = set()
    bands: set[str] = set()
    for i, panel in enumerate(panels):
        where = {"row": i // columns + 1, "col": i % columns + 1}
        _DRAW[panel.form](figure, panel, where, shown, bands, smooth)
    keys = list(dict.fromkeys(p.key for p in panels if p.form in MAPS))
    for i, key in enumerate(keys):
        _colour_axis(figure, i, pd.concat([p.rows for p in panels if p.key == key]), [p.key for p in panels].index(key))
    _link_axes(figure, panels, columns)
    if log_x:
        figure.update_xaxes(type="log", title_text="training step (log scale, step 0 not shown)")
    if log_y:
        figure.update_yaxes(type="log")
    for i in _steep(panels):
        figure.update_yaxes(type="log", row=i // columns + 1, col=i % columns + 1)
    metrics = frame["metric"].unique()
    title = title or (words(metrics[0]).capitalize() if len(metrics) == 1 else f"{len(metrics)} metrics")
    outer_titles(figure, len(panels), columns)
    smoothed = _smoothed(frame, smooth) if smooth > 1 else ""
    dashed = "dashed: step 0, random init" if "step 0 (random init)" in shown else ""
    under = subtitle(frame, *sorted(bands), dashed, smoothed, *(_map_words(frame) if keys else ()))
    figure = dressed(figure, title, under, (330 if count == 1 else 270) * count)
    if keys and any(p.form not in MAPS for p in panels):  # colour bars stand where the legend would
        figure.update_layout(legend={"orientation": "h", "x": 0, "y": -0.2 / count, "yanchor": "top"})
    return figure


def _steep(panels: Sequence[_Panel]) -> list[int]:
    """The panels over ranks that fall too far for a plain axis; a difference has both signs and keeps it."""
    found = [i for i, p in enumerate(panels) if p.form == "ranks" and not str(p.key[-1]).endswith(MINUS)]
    values = pd.concat([panels[i].rows["value"] for i in found]) if found else pd.Series([1.0])
    return found if values.min() > 0 and values.max() > 100 * values.min() else []


def _smoothed(frame: pd.DataFrame, smooth: int) -> str:
    """How wide the running mean is in training steps, also where not every step was written down."""
    gaps = frame.sort_values("step").groupby("run")["step"].diff()
    apart = gaps[gaps > 0].median()
    steps = smooth if pd.isna(apart) else round(smooth * float(apart))
    return f"running mean over {steps} steps" + ("" if steps == smooth else f" ({smooth} records)")


def _map_words(frame: pd.DataFrame) -> Iterator[str]:
    """What a map cannot draw: which way to read it, and its baselines where they are one number."""
    if frame["seed"].nunique() > 1:
        yield "mean over seeds"
    yield words(reading(frame))
    for control, rows in frame[frame["control"].notna()].groupby("control"):
        if rows["value"].max() - rows["value"].min() < 1e-9:
            yield f"{words(control)}: {rows['value'].iloc[0]:.3g}"


def _link_axes(figure: go.Figure, panels: Sequence[_Panel], columns: int) -> None:
    """Panels of one metric and unit share the y axis, so that they can be compared; its unit and its direction stand at the left."""
    first: dict[tuple[str, ...], str] = {}
    kinds = [None if p.form in MAPS else (p.form, str(p.key[0]), str(p.key[1]), _unit(p)) for p in panels]
    for i, (panel, kind) in enumerate(zip(panels, kinds, strict=True)):
        if kind is None:
            continue
        new = kind not in first
        leads = i % columns == 0 or (new and kind not in kinds[::columns])
        where = {"row": i // columns + 1, "col": i % columns + 1}
        title = axis_title(kind[-1], reading(panel.rows)) if leads else ""
        figure.update_yaxes(title_text=title, matches=None if new else first[kind], **where)
        first.setdefault(kind, "y" if i == 0 else f"y{i + 1}")


def _unit(panel: _Panel) -> str:
    unit = panel.rows["unit"].dropna()
    return str(unit.iloc[0]) if len(unit) else words(panel.key[0])


def _colour_axis(figure: go.Figure, index: int, rows: pd.DataFrame, panel: int) -> None:
    low, high = float(rows["value"].min()), float(rows["value"].max())
    unit = str(rows["unit"].dropna().iloc[0]) if rows["unit"].notna().any() else ""
    signed = low < 0 < high or unit.endswith(MINUS)
    whole = not signed and unit.startswith("share") and rows["position"].nunique() < 2 and rows["index"].nunique() < 2
    limit = max(-low, high) or 1.0
    span = (-limit, limit) if signed else (0.0, 1.0) if whole else (low, high)
    bar = {"title": {"text": words(unit)}, "x": 1.02 + 0.1 * index, "thickness": 14}
    name = "coloraxis" if index == 0 else f"coloraxis{index + 1}"
    figure.update_layout(
        {name: {"colorscale": DIVERGING if signed else SEQUENTIAL, "cmin": span[0], "cmax": span[1], "colorbar": bar}}
    )
    for trace in figure.data:
        if trace.type == "heatmap" and trace.meta == rows["metric"].iloc[0] + str(tuple(map(str, rows[KEY].iloc[0]))):
            trace.coloraxis = name


def _curve(rows: pd.DataFrame, x: str, smooth: int = 1) -> tuple[pd.DataFrame, str]:
    """Mean, low and high over seeds at each x, and what the band between them is."""
    runs = rows.pivot_table(index=x, columns="run", values="value", aggfunc="mean").sort_index()
    if smooth > 1:
        runs = runs.rolling(smooth, min_periods=1, center=True).mean()
    mean = runs.mean(axis=1)
    if runs.shape[1] > 1:
        return pd.DataFrame({"mean": mean, "low": runs.min(axis=1), "high": runs.max(axis=1)}), "band: range over seeds"
    se = rows.groupby(x)["se"].mean().reindex(mean.index)
    if not se.notna().any():
        return pd.DataFrame({"mean": mean, "low": mean, "high": mean}), ""
    return pd.DataFrame(
        {"mean": mean, "low": mean - se, "high": mean + se}
    ), "one seed: ± standard error over documents"


def lines(
    figure: go.Figure,
    rows: pd.DataFrame,
    x: str,
    where: dict[str, int],
    shown: set[str],
    bands: set[str],
    smooth: int = 1,
) -> None:
    """One line per architecture (and step, in a profile) with its band, and the controls in dotted grey."""
    measured = rows[rows["control"].isna()]
    for architecture in ordered(measured["architecture"]):
        mine = measured[measured["architecture"] == architecture]
        steps = [None] if x == "step" else sorted(mine["step"].dropna().unique()) or [None]
        for step in steps:
            part = mine if step is None else mine[mine["step"] == step]
            curve, band = _curve(part, x, smooth)
            if smooth > 1 and len(curve) > MOST_POINTS:  # what was smoothed loses nothing
                curve = curve.iloc[np.unique(np.linspace(0, len(curve) - 1, MOST_POINTS).round().astype(int))]
            bands.add(f"{MINUS}: ± standard error of independent means" if band and architecture == MINUS else band)
            init = step == 0 and len(measured["step"].dropna().unique()) > 1
            name = label(architecture)
            if (curve["low"] < curve["high"]).any():
                outline = np.concatenate([curve["high"], curve["low"][::-1]])
                around = np.concatenate([curve.index, curve.index[::-1]])
                figure.add_scatter(
                    x=around, y=outline, fill="toself", fillcolor=pale(architecture, 0.10 if init else 0.18), line_width=0,
                    hoverinfo="skip", showlegend=False, legendgroup=name, name=f"{name} band", mode="lines", **where,
                )  # fmt: skip
            at = "" if step is None else f" at step {step:.0f}"
            figure.add_scatter(
                x=curve.index,
                y=curve["mean"],
                mode="lines+markers",
                name=f"{name}{at if init else ''}",
                line={
                    "color": colour(architecture),
                    "dash": "dash" if init else "solid",
                    "width": 1.3 if init else 2.2,
                },
                marker={
                    "size": 5 if init else 7,
                    "symbol": symbol(architecture) + ("-open" if init else ""),
                    "maxdisplayed": MOST_MARKS if len(curve) > 24 else 0,
                },
                legendgroup=name,
                showlegend=not init and name not in shown,
                hovertemplate=f"{name}{at}<br>{x} %{{x}}: %{{y:.4g}}<extra></extra>",
                **where,
            )
            shown |= set() if init else {name}
            if init and "step 0 (random init)" not in shown:
                shown.add("step 0 (random init)")
                _legend_only(figure, "step 0 (random init)", "dash", where)
    for dash, (control, part) in zip(
        ("dot", "dashdot", "longdash"), rows[rows["control"].notna()].groupby("control"), strict=False
    ):
        line = part.groupby(x)["value"].mean()
        figure.add_scatter(
            x=line.index,
            y=line,
            mode="lines",
            name=words(control),
            line={"color": GREY, "dash": dash, "width": 1.6},
            legendgroup=str(control),
            showlegend=str(control) not in shown,
            hovertemplate=f"{words(control)}<br>{x} %{{x}}: %{{y:.4g}}<extra></extra>",
            **where,
        )
        shown.add(str(control))


def _legend_only(figure: go.Figure, name: str, dash: str, where: dict[str, int]) -> None:
    line = {"color": GREY, "dash": dash, "width": 1.3}
    figure.add_scatter(x=[None], y=[None], mode="lines", name=name, line=line, hoverinfo="skip", **where)


def _draw_profile(
    figure: go.Figure, panel: _Panel, where: dict[str, int], shown: set[str], bands: set[str], _: int
) -> None:
    lines(figure, panel.rows[panel.rows["layer"].notna()], "layer", where, shown, bands)
    figure.update_xaxes(title_text="layer", dtick=1 if panel.rows["layer"].max() <= 16 else None, **where)


def _draw_steps(
    figure: go.Figure, panel: _Panel, where: dict[str, int], shown: set[str], bands: set[str], smooth: int
) -> None:
    lines(figure, panel.rows, "step", where, shown, bands, smooth)
    figure.update_xaxes(title_text="training step", **where)


def _draw_ranks(
    figure: go.Figure, panel: _Panel, where: dict[str, int], shown: set[str], bands: set[str], _: int
) -> None:
    lines(figure, panel.rows, "index", where, shown, bands)
    figure.update_xaxes(title_text="rank", **where)


def _draw_map(figure: go.Figure, panel: _Panel, where: dict[str, int], *_: Any) -> None:
    column, axis = MAPS[panel.form]
    grid = panel.rows.pivot_table(index="layer", columns=column, values="value", aggfunc="mean", dropna=False)
    name = panel.title.split(":")[0]
    hover = f"{name}<br>layer %{{y}}, {axis} %{{x}}: %{{z:.4g}}<extra></extra>"
    key = panel.rows["metric"].iloc[0] + str(tuple(map(str, panel.rows[KEY].iloc[0])))
    z, x, y = grid.to_numpy(dtype="float32"), grid.columns.astype(int).tolist(), grid.index.astype(int).tolist()
    printed = "%{z:.2g}" if z.size <= MOST_PRINTED and z.shape[1] <= MOST_ABREAST else None
    figure.add_heatmap(z=z, x=x, y=y, name=panel.title, meta=key, hovertemplate=hover, texttemplate=printed, **where)
    figure.update_xaxes(
        title_text=axis, dtick=1 if axis in ("head", "the other layer") and grid.shape[1] <= 16 else None, **where
    )
    figure.update_yaxes(title_text="layer", dtick=1 if len(grid) <= 16 else None, **where)


def _draw_bars(
    figure: go.Figure, panel: _Panel, where: dict[str, int], shown: set[str], bands: set[str], _: int
) -> None:
    measured = panel.rows[panel.rows["control"].isna()]
    steps = sorted(measured["step"].dropna().unique()) or [np.nan]
    for step in steps:
        rows = measured if pd.isna(step) else measured[measured["step"] == step]
        names = ordered(rows["architecture"])
        curves = [_curve(rows[rows["architecture"] == a].assign(one=0.0), "one") for a in names]
        bands |= {band.replace("band", "whisker") for _, band in curves}
        mean, low, high = ([float(c[k].iloc[0]) for c, _ in curves] for k in ("mean", "low", "high"))
        init = step == 0 and len(steps) > 1
        figure.add_bar(
            x=[label(a) for a in names],
            y=mean,
            name="" if pd.isna(step) else f"step {step:.0f}",
            showlegend=False,
            marker={
                "color": [pale(a) if init else colour(a) for a in names],
                "line": {"color": [colour(a) for a in names], "width": 1},
            },
            error_y={"array": np.subtract(high, mean), "arrayminus": np.subtract(mean, low), "color": GREY},
            hovertemplate=f"%{{x}}{'' if pd.isna(step) else f' at step {step:.0f}'}: %{{y:.4g}}<extra></extra>",
            **where,
        )
        if init:
            bands.add("pale bars: step 0, random init")


_DRAW: dict[str, Callable[..., None]] = {
    "profile": _draw_profile, "steps": _draw_steps, "ranks": _draw_ranks, "bars": _draw_bars, **dict.fromkeys(MAPS, _draw_map),
}  # fmt: skip
