"""One figure for any records: its form follows from the axes that vary, and panels share their scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.errors import UnknownName, WorkbenchError
from workbench.plots.forms import CONTROL, DRAW, INIT, KEY, MAPS, SPREADS, Legend, Panel
from workbench.plots.style import (
    DETAIL,
    DIVERGING,
    MINUS,
    NOISE,
    PANEL,
    SEQUENTIAL,
    at_least,
    axis_title,
    dressed,
    label,
    ordered,
    outer_titles,
    reading_direction,
    site,
    subtitle,
    values_by_axis,
    words,
)
from workbench.runs.tables import as_records

FORMS = ("profile", "steps", "positions", "heads", "ranks", "pairs", "bars")
MAX_PANELS, SORTED = 24, "heads of a layer, largest value first"
EQUAL, SQUEEZED, AIR = 1e-9, 4.0, 0.08
"""What makes no difference; how many times the lines' range the baselines may need; air above and below lines, of their range."""


def checked(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a copy with float axes; raises `WorkbenchError` if it holds no measured values."""
    frame = frame[frame["value"].notna()]
    if frame.empty or frame["control"].isna().sum() == 0:
        raise WorkbenchError("no records to plot; measure something first")
    frame = frame.copy()
    frame["architecture"] = frame["architecture"].fillna("model")
    frame["run"] = frame["run"].fillna(frame["architecture"])
    alone = frame["seed"].isna() & (frame.groupby("architecture")["run"].transform("nunique") > 1)
    if alone.any():  # models without a seed are no repetitions of one another: each is a series of its own
        frame["architecture"] = frame["architecture"].where(~alone, frame["architecture"] + DETAIL + frame["run"])
    for name in ("step", "layer", "source", "head", "position", "index", "seed"):
        frame[name] = frame[name].astype("float64")
    return frame


def sorted_heads(rows: pd.DataFrame) -> pd.DataFrame:
    """Number the heads of every layer of a run by their value, the largest first: head numbers of two runs are unrelated."""
    axes = ["run", "step", "layer", *KEY, "control"]
    places = rows.groupby([c for c in axes if c in rows], dropna=False)["value"].rank(ascending=False, method="first")
    return rows.assign(head=(places - 1).where(rows["head"].notna()))


def name_sorted_heads(figure: go.Figure) -> None:
    """Name the axis of `sorted_heads`."""
    figure.for_each_xaxis(lambda axis: axis.update(title_text=SORTED) if axis.title.text == "head" else None)


def form_of(rows: pd.DataFrame) -> str:
    """Choose the form for these records: heat maps for heads and positions, else curves, else bars."""
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


def _panels(frame: pd.DataFrame, form: str | None) -> Iterator[Panel]:
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
            measured, baseline = rows[rows["control"].isna()], None if minus else _one_number(rows)
            for architecture in ordered(measured["architecture"]):
                mine = measured[measured["architecture"] == architecture]
                for step in sorted(mine["step"].unique()):
                    at = "" if np.isnan(step) or DETAIL in architecture else f", step {step:.0f}"
                    part = mine if np.isnan(step) else mine[mine["step"] == step]
                    titled = name if minus else f"{label(architecture)}{at}" + (f": {name}" if name else "")
                    yield Panel(chosen, titled, part, key, baseline)
        elif chosen == "ranks" or (chosen == "steps" and rows["layer"].nunique() + rows["head"].nunique() > 2):
            kept = rows["control"].isna() | (chosen == "ranks")
            places = (
                rows.loc[rows["control"].isna(), ["layer", "head"]].drop_duplicates().sort_values(["layer", "head"])
            )
            for layer, head in places.itertuples(index=False):
                same = (rows["layer"] == layer) & ((rows["head"] == head) | np.isnan(head)) & kept
                at = f"layer {layer:.0f}" + ("" if np.isnan(head) else f", head {head:.0f}")
                yield Panel(chosen, f"{name}: {at}" if name else at, rows[same], key)
        else:
            yield Panel(chosen, name, rows, key)


def plot(
    frame: Any, *, form: str | None = None, log_x: bool = False, log_y: bool = False, smooth: int = 1,
    title: str = "", spread: str = "range",
) -> go.Figure:  # fmt: skip
    """Plot records; the form follows from their axes, and each metric, data set and length gets its own panel.

    Args:
        frame: Records as a pandas table or any Arrow table.
        form: One of `FORMS`; by default chosen from the axes.
        log_x: Logarithmic x axis.
        log_y: Logarithmic y axis.
        smooth: Width of a running mean (records).
        title: Title; by default the metric's name.
        spread: Error bars over seeds: "range", "se" (standard error) or "ci" (confidence interval).

    Returns:
        A plotly figure.

    Raises:
        UnknownName: `form` is not one of `FORMS`, or `spread` not one of `SPREADS`.
        WorkbenchError: There is nothing to plot, or more than one figure can hold.
    """
    if form is not None and form not in FORMS:
        raise UnknownName("form", form, FORMS)
    if spread not in SPREADS:
        raise UnknownName("spread", spread, SPREADS)
    frame = checked(frame if isinstance(frame, pd.DataFrame) else as_records(frame))
    panels = list(_panels(frame, form))
    if len(panels) > MAX_PANELS:
        raise WorkbenchError(
            f"{len(panels)} panels do not fit one figure; keep fewer metrics, variants, sites or steps"
        )
    maps = [p for p in panels if p.form == "heads" and not _unit(p).endswith(MINUS)]
    sort = any(p.rows["run"].nunique() > 1 for p in maps)
    for panel in maps if sort else ():
        panel.rows = sorted_heads(panel.rows)
    figure, columns = _layout(panels)
    count, legend = -(-len(panels) // columns), Legend(ordered(frame["architecture"]), spread=spread)
    for i, panel in enumerate(panels):
        DRAW[panel.form](figure, panel, {"row": i // columns + 1, "col": i % columns + 1}, legend, smooth)
    keys = list(dict.fromkeys(p.key for p in panels if p.form in MAPS))
    white = {}  # baselines in the middle of a diverging scale
    for i, key in enumerate(keys):
        mine = [p for p in panels if p.key == key]
        white[mine[0].baseline] = _colour_axis(figure, i, pd.concat([p.rows for p in mine]), mine[0].baseline)
    if sort:
        name_sorted_heads(figure)
    far = _link_axes(figure, panels, columns, logarithmic=log_y)
    if log_x:
        figure.update_xaxes(type="log", title_text="training step (log scale, step 0 not shown)", tickformat="d")
    if log_y:
        figure.update_yaxes(type="log")
    for i in _steep(panels):
        figure.update_yaxes(type="log", row=i // columns + 1, col=i % columns + 1)
    metrics = frame["metric"].unique()
    title = title or (words(metrics[0]).capitalize() if len(metrics) == 1 else f"{len(metrics)} metrics")
    outer_titles(figure, len(panels), columns)
    smoothed = _smoothed(frame, smooth) if smooth > 1 else ""
    dashed = "dashed: step 0, random init" if INIT in legend.names else ""
    under = subtitle(frame, *sorted(legend.bands), dashed, smoothed, *far, *(_map_words(frame, white) if keys else ()))
    figure = dressed(figure, title, under, (330 if count == 1 else 270) * count)
    if keys and any(p.form not in MAPS for p in panels):  # colour bars stand where the legend would
        figure.update_layout(legend={"orientation": "h", "x": 0, "y": -0.2 / count, "yanchor": "top"})
    return at_least(figure, PANEL * columns) if columns > 1 else figure


def _layout(panels: Sequence[Panel]) -> tuple[go.Figure, int]:
    """Return an empty figure with a cell for each panel, and the number of columns."""
    abreast = len(panels) > 6 or (len(panels) == 3 and all(p.form in (*MAPS, "steps") for p in panels))
    columns = min(len(panels), 3 if abreast else 2)
    count = -(-len(panels) // columns)
    titles = [p.title for p in panels] if len(panels) > 1 or panels[0].title else None
    units = 0.32 if any(p.key[-1] != panels[0].key[-1] for p in panels) else 0.2
    made = make_subplots(
        count, columns, subplot_titles=titles, vertical_spacing=0.32 / count, horizontal_spacing=units / columns
    )
    return made, columns


def _steep(panels: Sequence[Panel]) -> list[int]:
    """Indices of rank panels that need a logarithmic axis; differences have both signs and keep a linear one."""
    found = [i for i, p in enumerate(panels) if p.form == "ranks" and not str(p.key[-1]).endswith(MINUS)]
    values = pd.concat([panels[i].rows["value"] for i in found]) if found else pd.Series([1.0])
    return found if values.min() > 0 and values.max() > 100 * values.min() else []


def _smoothed(frame: pd.DataFrame, smooth: int) -> str:
    """Caption of the running mean's width in training steps."""
    gaps = frame.sort_values("step").groupby("run")["step"].diff()
    apart = gaps[gaps > 0].median()
    steps = smooth if pd.isna(apart) else round(smooth * float(apart))
    return f"running mean over {steps} steps" + ("" if steps == smooth else f" ({smooth} records)")


def _one_number(rows: pd.DataFrame) -> float | None:
    """Return the baseline if it is a single number."""
    controls = rows[rows["control"].notna()]
    if controls["control"].nunique() != 1 or controls["value"].max() - controls["value"].min() > EQUAL:
        return None
    return float(controls["value"].iloc[0])


def _map_words(frame: pd.DataFrame, white: Mapping[float | None, bool]) -> Iterator[str]:
    """Captions of maps: reading direction and baselines that are one number."""
    if frame["seed"].nunique() > 1:
        yield "mean over seeds"
    yield words(reading_direction(frame))
    for control, rows in frame[frame["control"].notna()].groupby("control"):
        if rows["value"].max() - rows["value"].min() < EQUAL:
            value = float(rows["value"].iloc[0])
            yield f"{'white: ' if white.get(value) else ''}{words(control)}, {value:.3g}"


def _link_axes(figure: go.Figure, panels: Sequence[Panel], columns: int, *, logarithmic: bool) -> list[str]:
    """Share the y axis among panels of one metric and unit; the leftmost shows unit and reading direction.

    Baselines that would compress the lines are left off the scale; the returned captions name them.
    """
    first: dict[tuple[str, ...], str] = {}
    kinds = [None if p.form in MAPS else (p.form, str(p.key[0]), str(p.key[1]), _unit(p)) for p in panels]
    for i, (panel, kind) in enumerate(zip(panels, kinds, strict=True)):
        if kind is None:
            continue
        new = kind not in first
        leads = i % columns == 0 or (new and kind not in kinds[::columns])
        where = {"row": i // columns + 1, "col": i % columns + 1}
        title = axis_title(kind[-1], reading_direction(panel.rows)) if leads else ""
        figure.update_yaxes(title_text=title, matches=None if new else first[kind], **where)
        first.setdefault(kind, "y" if i == 0 else f"y{i + 1}")
    told, every, measured = [], values_by_axis(figure), values_by_axis(figure, skip=CONTROL)
    for shared, axis in first.items():
        rows = pd.concat([p.rows for p, of in zip(panels, kinds, strict=True) if of == shared])
        name = f"yaxis{axis[1:]}"
        if shared[-1].endswith(MINUS) and (reach := _rounding(panels, rows, every.get(name))):
            figure.layout[name].range = (-reach, reach)
        if not logarithmic and shared[0] in ("profile", "steps") and name in measured:
            span = _without_far_baselines(measured[name], every[name])
            if span is None:
                continue
            figure.layout[name].range = span
            told += [
                f"off the scale: {words(name)}, {_from_to(part['value'])}"
                for name, part in rows[rows["control"].notna()].groupby("control")
                if part["value"].max() < span[0] or part["value"].min() > span[1]
            ]
    return list(dict.fromkeys(told))


def _without_far_baselines(measured: np.ndarray, every: np.ndarray) -> tuple[float, float] | None:
    """Return a padded range of the measured lines and their error bars if baselines would take most of the axis."""
    low, high = float(measured.min()), float(measured.max())
    if not np.ptp(every) > SQUEEZED * (high - low) > SQUEEZED * NOISE * max(-low, high):
        return None
    return low - AIR * (high - low), high + AIR * (high - low)


def _rounding(panels: Sequence[Panel], rows: pd.DataFrame, drawn: np.ndarray | None) -> float:
    """Return a range for differences that are rounding beside the values that were subtracted; 0 for other differences."""
    metric = rows["metric"].iloc[0]
    alike = [p.rows["value"].abs().max() for p in panels if p.key[0] == metric and not _unit(p).endswith(MINUS)]
    size = max((value for value in alike if np.isfinite(value)), default=0.0)
    return 0.01 * size if drawn is not None and np.abs(drawn).max() <= NOISE * size else 0.0


def _from_to(values: pd.Series) -> str:
    low, high = values.min(), values.max()
    return f"{low:.3g}" if high - low < EQUAL else f"{low:.3g} to {high:.3g}"


def _unit(panel: Panel) -> str:
    unit = panel.rows["unit"].dropna()
    return str(unit.iloc[0]) if len(unit) else words(panel.key[0])


def _colour_axis(figure: go.Figure, index: int, rows: pd.DataFrame, baseline: float | None) -> bool:
    """Set the colour scale of maps with one key; return whether it is diverging with the baseline in white.

    It is if values lie on both sides of the baseline and the scale would not reach below 0 for a quantity that does not.
    """
    low, high = float(rows["value"].min()), float(rows["value"].max())
    unit = str(rows["unit"].dropna().iloc[0]) if rows["unit"].notna().any() else ""
    signed = low < 0 < high or unit.endswith(MINUS)
    whole = (
        not signed
        and low >= 0
        and unit.startswith("share")
        and rows["position"].nunique() < 2
        and rows["index"].nunique() < 2
    )
    limit = max(-low, high) or 1.0
    span = (-limit, limit) if signed else (0.0, 1.0) if whole else (low, high)
    if high - low <= NOISE * max(-low, high):  # equal values have one colour, not those of their rounding
        span = span if signed or whole else (min(0.0, 2 * low), max(0.0, 2 * high) or 1.0)
    white = baseline is not None and low < baseline < high and (low < 0 or 2 * baseline >= high)
    if white and baseline is not None:
        reach = max(high - baseline, baseline - low)
        signed, span = True, (baseline - reach, baseline + reach)
    bar = {"title": {"text": words(unit)}, "x": 1.02 + 0.1 * index, "thickness": 14}
    name = "coloraxis" if index == 0 else f"coloraxis{index + 1}"
    figure.update_layout(
        {name: {"colorscale": DIVERGING if signed else SEQUENTIAL, "cmin": span[0], "cmax": span[1], "colorbar": bar}}
    )
    for trace in figure.data:
        if trace.type == "heatmap" and trace.meta == rows["metric"].iloc[0] + str(tuple(map(str, rows[KEY].iloc[0]))):
            trace.coloraxis = name
    return white
