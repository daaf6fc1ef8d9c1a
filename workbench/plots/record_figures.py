"""One figure for any records: its form follows from the axes that vary, and panels share their scales."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.errors import UnknownName, WorkbenchError, refuse_unknown
from workbench.plots.style import (
    DETAIL,
    DIVERGING,
    GREY,
    MINUS,
    NOISE,
    PANEL,
    SEQUENTIAL,
    at_least,
    axis_title,
    beyond_range,
    colour,
    colour_axis,
    dressed,
    label,
    ordered,
    outer_titles,
    pale,
    reading_direction,
    site,
    subtitle,
    symbol,
    true_minus,
    values_by_axis,
    words,
    wrapped,
)
from workbench.plots.style import part as part_of
from workbench.runs.tables import as_records
from workbench.statistics.intervals import MIN_SEEDS, confidence, over_seeds, t_quantile

KEY = ["metric", "variant", "site", "part", "data", "T", "unit"]
# the column of a map, in words; the x axis of lines and its title
MAPS = {"positions": ("position", "position"), "heads": ("head", "head"), "pairs": ("source", "the other layer")}
LINES = {"profile": ("layer", "layer"), "steps": ("step", "training step"), "ranks": ("index", "rank")}
FORMS = ("profile", "steps", "positions", "heads", "ranks", "pairs", "bars")
SPREADS = {"range": "range over seeds", "se": "standard error", "ci": "confidence interval"}  # of error bars over seeds
MAX_PANELS, SORTED = 24, "heads of a layer, largest value first"
MAX_POINTS, MAX_MARKS = 300, 8  # of a smoothed curve; marks along a curve of many points
MAX_PRINTED, MAX_ABREAST = 64, 8  # cells of a map, and of its row, that carry their number
MAX_WHOLE = 16  # largest span of an integer axis with a tick at each number
INIT, CONTROL = "step 0 (random init)", "control"
DASHES = {"none": "dashdot", "uniform_causal": "dot"}  # of controls, the others "longdash"
CONTROLS = {"none": "ratio 1: like the other tokens"}  # in words
EQUAL, NEAR, SQUEEZED, AIR, SHARE = 1e-9, 0.03, 4.0, 0.08, 0.25
"""What makes no difference; share of the range within which lines coincide; how many times the lines' range the baselines may need; air
above and below lines, of their range; least largest share of a map whose colours span 0 to 1."""


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
        if rows["control"].notna().all() or (form == "profile" and rows["layer"].isna().all()):
            continue
        values = dict(zip(KEY, key, strict=True))
        given = [k for k in varying if not pd.isna(values[k])]
        name = ", ".join("T = " * (k == "T") + {"site": site, "part": part_of}.get(k, words)(values[k]) for k in given)
        if "data" in varying and pd.isna(values["data"]):  # logged by training, beside what was measured on other data
            name = ", ".join(filter(None, ("training batches", name)))
        if minus := str(values["unit"]).endswith(MINUS):  # A and B are drawn of one seed each, their difference of all
            seeds = rows["run"].nunique()
            name = ": ".join(filter(None, (f"{MINUS}, mean over {seeds} seeds" if seeds > 1 else MINUS, name)))
        chosen = form or form_of(rows)
        if chosen in MAPS:
            measured, controls = rows[rows["control"].isna()], rows[rows["control"].notna()]
            one = controls["control"].nunique() == 1 and controls["value"].max() - controls["value"].min() <= EQUAL
            baseline = float(controls["value"].iloc[0]) if one and not minus else None
            for architecture in ordered(measured["architecture"]):
                mine = measured[measured["architecture"] == architecture]
                for step in sorted(mine["step"].unique()):
                    at = "" if np.isnan(step) or DETAIL in architecture else f", step {step:.0f}"
                    part = mine if np.isnan(step) else mine[mine["step"] == step]
                    titled = name if minus else f"{label(architecture)}{at}" + (f": {name}" if name else "")
                    yield Panel(chosen, titled, part, key, baseline)
        elif chosen == "ranks" or (chosen == "steps" and rows["layer"].nunique() + rows["head"].nunique() > 2):
            kept = rows["control"].isna() | (chosen == "ranks")
            cells = rows.loc[rows["control"].isna(), ["layer", "head"]].drop_duplicates().sort_values(["layer", "head"])
            for layer, head in cells.itertuples(index=False):
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
    refuse_unknown("spread", spread, SPREADS)
    frame = checked(frame if isinstance(frame, pd.DataFrame) else as_records(frame))
    panels = list(_panels(frame, form))
    if len(panels) > MAX_PANELS:
        raise WorkbenchError(f"{len(panels)} panels do not fit one figure; keep fewer metrics, variants, sites, steps")
    maps = [p for p in panels if p.form == "heads" and not _unit(p).endswith(MINUS)]
    sort = any(p.rows["run"].nunique() > 1 for p in maps)
    for panel in maps if sort else ():
        panel.rows = sorted_heads(panel.rows)
    figure, columns = _layout(panels)
    count, legend = -(-len(panels) // columns), Legend(ordered(frame["architecture"]), spread=spread)
    for i, panel in enumerate(panels):
        _draw(figure, panel, {"row": i // columns + 1, "col": i % columns + 1}, legend, smooth)
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
    # ranks over a wide range need a logarithmic axis; differences have both signs
    ranks = [i for i, p in enumerate(panels) if p.form == "ranks" and not str(p.key[-1]).endswith(MINUS)]
    values = pd.concat([panels[i].rows["value"] for i in ranks]) if ranks else pd.Series([1.0])
    for i in ranks if values.min() > 0 and values.max() > 100 * values.min() else ():
        figure.update_yaxes(type="log", row=i // columns + 1, col=i % columns + 1)
    metrics = frame["metric"].unique()
    title = title or (words(metrics[0]).capitalize() if len(metrics) == 1 else f"{len(metrics)} metrics")
    outer_titles(figure, len(panels), columns)
    smoothed = ""
    if smooth > 1:
        gaps = frame.sort_values("step").groupby("run")["step"].diff()
        apart = gaps[gaps > 0].groupby(frame["run"]).median().unique()
        steps = smooth if not len(apart) else round(smooth * float(apart[0]))
        smoothed = f"running mean over {steps} steps" + ("" if steps == smooth else f" ({smooth} records)")
        smoothed = smoothed if len(apart) < 2 else f"running mean over {smooth} records each"
    dashed = "dashed: step 0, random init" if INIT in legend.names else ""
    if frame.groupby(["architecture", "seed"])["run"].nunique().gt(1).any():
        legend.bands.add("runs of one seed averaged")
    axes = [(LINES.get(p.form, ("layer", ""))[0], p.rows) for p in panels]
    untold = any(p.form in ("profile", "ranks", "bars") for p in panels) and ", step " not in title
    legend.bands.update(fewer_seeds(axes, frame), [steps_after_init(frame)] if untold else [])
    under = subtitle(frame, *sorted(legend.bands), dashed, smoothed, *far, *(_map_words(frame, white) if keys else ()))
    figure = dressed(figure, title, under, (330 if count == 1 else 270) * count)
    if keys and any(p.form not in MAPS for p in panels):  # colour bars stand where the legend would
        figure.update_layout(legend={"orientation": "h", "x": 0, "y": -0.2 / count, "yanchor": "top"})
    least = 235 if all(p.form in MAPS for p in panels) else PANEL  # four maps in a row of a laptop's page
    return at_least(figure, least * columns) if columns > 1 else figure


def _layout(panels: Sequence[Panel]) -> tuple[go.Figure, int]:
    """Return an empty figure with a cell for each panel, and the number of columns."""
    maps, courses = (all(p.form in forms for p in panels) for forms in (MAPS, ("steps",)))
    columns = min(len(panels), 4 if maps else 3 if len(panels) > 6 or (courses and len(panels) == 3) else 2)
    count = -(-len(panels) // columns)
    titles = [p.title for p in panels] if len(panels) > 1 or panels[0].title else None
    own_titles = len({(p.key[0], p.key[1], p.key[-1]) for p in panels}) > 1  # of y axes, to the right too
    units = 0.32 if own_titles and not maps else 0.2
    made = make_subplots(
        count, columns, subplot_titles=titles, vertical_spacing=0.32 / count, horizontal_spacing=units / columns
    )
    return made, columns


def _map_words(frame: pd.DataFrame, white: Mapping[float | None, bool]) -> Iterator[str]:
    """Captions of maps: reading direction and baselines that are one number."""
    if frame["seed"].nunique() > 1:
        yield "mean over seeds"
    yield words(reading_direction(frame))
    for control, rows in frame[frame["control"].notna()].groupby("control"):
        if rows["value"].max() - rows["value"].min() < EQUAL:
            value = float(rows["value"].iloc[0])
            yield f"{'white: ' if white.get(value) else ''}{words(control)}: {value:.3g}"


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
            low, high = float(measured[name].min()), float(measured[name].max())
            if not np.ptp(every[name]) > SQUEEZED * (high - low) > SQUEEZED * NOISE * max(-low, high):
                continue  # baselines take little of the axis
            span = low - AIR * (high - low), high + AIR * (high - low)
            figure.layout[name].range = span
            for control, part in rows[rows["control"].notna()].groupby("control"):
                low, high = part["value"].min(), part["value"].max()
                if high < span[0] or low > span[1]:
                    values = f"{low:.3g}" if high - low < EQUAL else f"{low:.3g} to {high:.3g}"
                    told.append(f"off the scale: {words(str(control))}, {values}")
    return list(dict.fromkeys(told))


def _rounding(panels: Sequence[Panel], rows: pd.DataFrame, drawn: np.ndarray | None) -> float:
    """Return a range for differences that are rounding beside the values that were subtracted; 0 for other differences."""
    metric = rows["metric"].iloc[0]
    alike = [p.rows["value"].abs().max() for p in panels if p.key[0] == metric and not _unit(p).endswith(MINUS)]
    size = max((value for value in alike if np.isfinite(value)), default=0.0)
    return 0.01 * size if drawn is not None and np.abs(drawn).max() <= NOISE * size else 0.0


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
    whole = not signed and low >= 0 and unit.startswith("share") and (rows[["position", "index"]].nunique() < 2).all()
    limit = max(-low, high) or 1.0
    span = (-limit, limit) if signed else (0.0, 1.0 if high >= SHARE else high) if whole else (low, high)
    if high - low <= NOISE * max(-low, high):  # equal values have one colour, not those of their rounding
        span = span if signed or whole else (min(0.0, 2 * low), max(0.0, 2 * high) or 1.0)
    white = baseline is not None and low < baseline < high and (low < 0 or 2 * baseline >= high)
    if white and baseline is not None:
        reach = max(high - baseline, baseline - low)
        signed, span = True, (baseline - reach, baseline + reach)
    scale, bar = DIVERGING if signed else SEQUENTIAL, {"x": 1.02 + 0.1 * index, "thickness": 14}
    name = "coloraxis" if index == 0 else f"coloraxis{index + 1}"
    figure.update_layout({name: colour_axis(scale, *span, words(unit), **bar)})
    for trace in figure.data:
        if trace.type == "heatmap" and trace.meta == _scale_key(rows):
            trace.coloraxis = name
    return white


def _seeds(rows: pd.DataFrame) -> str:
    """Return the column that identifies repetitions of a model: the seed, or the run if a seed is unknown."""
    return "seed" if rows["seed"].notna().all() else "run"


def fewer_seeds(panels: Sequence[tuple[str, pd.DataFrame]], frame: pd.DataFrame) -> list[str]:
    """Return a caption's notes on models for which a number in a panel has fewer seeds than the model has in the figure's `frame`.

    Each of the `panels` has its x axis (a column) and its rows. Its steps are one curve if x is the step, and apart otherwise.
    """
    seed, counts, notes = _seeds(frame), [], []
    for i, (x, rows) in enumerate(panels):
        at = rows["step"] * (math.nan if x == "step" else 1.0)
        places = [rows["architecture"], at.rename("at"), rows[x].rename("x")]
        each = rows[rows["control"].isna()].groupby(places, dropna=False)[seed].nunique()
        counts.append(each.reset_index(name="n").assign(panel=i, axis=x))
    in_figure = frame[frame["control"].isna()].groupby("architecture")[seed].nunique().to_dict()
    for (name, step), part in pd.concat(counts).astype({"at": "float64"}).groupby(["architecture", "at"], dropna=False):
        low, high, title, axis = part["n"].min(), part["n"].max(), label(str(name)), part["axis"].iloc[0]
        by = axis if part.groupby("panel")["n"].nunique().gt(1).any() else "panel"
        many = f"{low} to {high} seeds, depending on the {by}" if low < high else f"{high} of {in_figure[name]} seeds"
        when = "" if step != step or ", step " in title else f" at step {step:.0f}"
        notes += [f"{title}{when}: {many}"] if low < in_figure[name] else []
    return notes


def steps_after_init(frame: pd.DataFrame) -> str:
    """Return a caption's note on the steps of a figure that draws several of them, by model if they differ; else empty."""
    known = frame[frame["control"].isna() & ~frame["architecture"].str.contains(", step ", regex=False)]
    steps = known[known["step"] > 0].groupby("architecture")["step"].unique()
    if known["step"].nunique() < 2 or not len(steps):
        return ""
    texts = {label(str(name)): "step " + ", ".join(f"{step:.0f}" for step in sorted(of)) for name, of in steps.items()}
    alike = set(texts.values())
    return "trained: " + (alike.pop() if len(alike) == 1 else ", ".join(f"{name} {at}" for name, at in texts.items()))


def _curve(
    rows: pd.DataFrame, x: str, smooth: int = 1, *, paired: bool = False, spread: str = "range"
) -> tuple[pd.DataFrame, str, bool]:
    """Return mean, low and high over seeds (`paired`: over paired differences) at each x, their caption, and whether seeds vary.

    Runs of one seed are averaged first, as they share their initial weights and batches.
    """
    runs = rows.pivot_table(index=x, columns=_seeds(rows), values="value", aggfunc="mean").sort_index()
    if smooth > 1:
        own = {run: values.dropna().rolling(smooth, min_periods=1, center=True).mean() for run, values in runs.items()}
        runs = pd.DataFrame(own).reindex(runs.index)  # of its own records, where runs were logged at other steps
    mean, n = runs.mean(axis=1), runs.shape[1]
    curve = pd.DataFrame({"mean": mean, "low": mean, "high": mean})
    if n > 1 and (spread == "ci" or (paired and n >= MIN_SEEDS)):
        intervals = [over_seeds(values.dropna()) for _, values in runs.iterrows()]
        low, high = ([getattr(i, end) for i in intervals] for end in ("low", "high"))
        kind = f"band: {confidence()} interval over seeds"
        kind = f"mean and {confidence()} interval over {n} paired seeds" if paired else kind
        return curve.assign(low=low, high=high), kind, True
    if n > 1 and spread == "se":
        se = runs.std(axis=1, ddof=1) / np.sqrt(runs.notna().sum(axis=1))
        return curve.assign(low=mean - se, high=mean + se), "band: ± standard error over seeds", True
    if n > 1:
        kind = f"mean and range over {n} paired seeds" if paired else "band: range over seeds"
        return curve.assign(low=runs.min(axis=1), high=runs.max(axis=1)), kind, True
    se = rows.groupby(x)["se"].mean().reindex(mean.index).astype("float64")
    if not se.notna().any():
        return curve, "", False
    times, kind = (t_quantile(math.inf), f"{confidence()} interval") if spread == "ci" else (1.0, "± standard error")
    bound = " (averaged like the values: an upper bound)" if rows[x].duplicated().any() else ""
    return curve.assign(low=mean - times * se, high=mean + times * se), f"one seed: {kind} over documents{bound}", False


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
            if band and alone:
                band = "one pair of runs, ± standard error with the documents of A and B taken as independent"
            note = beyond_range(part["unit"].iloc[0], curve["mean"], curve["low"], curve["high"], difference=paired)
            legend.bands.update((f"{MINUS}: {band}" if band and paired else band, note if of_seeds else ""))
            _line(figure, curve, architecture, x, step, where, legend, init=step == 0 and at_init, of_seeds=of_seeds)
    controls = rows[rows["control"].notna()]
    if at_init:  # of what is drawn in full, not a mean with those of random init
        controls = controls[controls["step"].eq(controls.groupby("run")["step"].transform("max"))]
    for control, part in controls.groupby("control"):
        line, name = part.groupby(x)["value"].mean(), CONTROLS.get(str(control), words(control))
        by_model = part.groupby([x, "architecture"])["value"].mean().groupby(level=0)
        name += ", mean over models" if (by_model.max() - by_model.min()).max() > EQUAL else ""
        figure.add_scatter(
            x=line.index, y=line, mode="lines", name=name, line={"color": GREY, "dash": DASHES.get(str(control), "longdash"), "width": 1.6},
            legendgroup=str(control), showlegend=str(control) not in legend.names, meta=CONTROL,
            hovertemplate=f"{name}<br>{x} %{{x}}: %{{y:.3g}}<extra></extra>", **where,
        )  # fmt: skip
        legend.names.add(str(control))
        init = measured[measured["step"] == 0].groupby(x)["value"].mean() if at_init else measured.iloc[:0]["value"]
        if len(init) and (init - line).abs().max() < NEAR * np.ptp([*measured["value"], *line]):
            legend.bands.add(f"step 0 coincides with {name}")
        above = control == "uniform_causal" and (measured["value"] > line.max()).any()
        if above and measured["metric"].iloc[0] == "importance_entropy" and measured["variant"].isna().all():
            legend.bands.add("the maximum is ln T, above uniform causal")


def _line(
    figure: go.Figure, curve: pd.DataFrame, architecture: str, x: str, step: float | None, where: dict[str, int],
    legend: Legend, *, init: bool, of_seeds: bool,
) -> None:  # fmt: skip
    """Draw a curve with its band or whiskers; random init beside another step is dashed and shares one legend entry."""
    name, at = label(architecture), "" if step is None else f" at step {step:.0f}"
    drawn = f"{name.partition(', step ')[0] if at else name}{at}"  # the name may have the step of the trained model
    whiskers, varies = None, (curve["low"] < curve["high"]).any()
    if varies and not of_seeds:
        up, down = curve["high"] - curve["mean"], curve["mean"] - curve["low"]
        whiskers = {"array": up, "arrayminus": down, "thickness": 0.8, "width": 2}
    elif varies:
        outline = np.concatenate([curve["high"], curve["low"][::-1]])
        around = np.concatenate([curve.index, curve.index[::-1]])
        figure.add_scatter(
            x=around, y=outline, fill="toself", fillcolor=pale(architecture, 0.10 if init else 0.18, legend.series), line_width=0,
            hoverinfo="skip", showlegend=False, legendgroup=name, name=f"{name} band", mode="lines", **where,
        )  # fmt: skip
    figure.add_scatter(
        x=curve.index, y=curve["mean"], mode="lines+markers", name=drawn if init else name,
        line={"color": colour(architecture, legend.series), "dash": "dash" if init else "solid", "width": 1.3 if init else 2.2},
        marker={"size": 5 if init else 7, "symbol": symbol(architecture, legend.series) + ("-open" if init else ""),
                "maxdisplayed": MAX_MARKS if len(curve) > 24 else 0},
        legendgroup=name, showlegend=not init and name not in legend.names, error_y=whiskers,
        customdata=[[int(n)] for n in curve.index] if x == "layer" and (curve.index % 1 == 0).all() else None,
        hovertemplate=f"{drawn}<br>{x} %{{x}}: %{{y:.3g}}<extra></extra>", **where,
    )  # fmt: skip
    if not init:
        legend.names.add(name)
    elif INIT not in legend.names:
        legend.names.add(INIT)
        line = {"color": GREY, "dash": "dash", "width": 1.3}
        figure.add_scatter(x=[None], y=[None], mode="lines", name=INIT, line=line, hoverinfo="skip", **where)


def _draw(figure: go.Figure, panel: Panel, where: dict[str, int], legend: Legend, smooth: int) -> None:
    """Draw a panel in its form."""
    if panel.form in MAPS:
        _draw_map(figure, panel, where)
    elif panel.form == "bars":
        _draw_bars(figure, panel, where, legend)
    else:
        x, title = LINES[panel.form]
        rows = panel.rows[panel.rows["layer"].notna()] if x == "layer" else panel.rows
        lines(figure, rows, x, where, legend, smooth if x == "step" else 1)
        figure.update_xaxes(title_text=title, dtick=whole_ticks(panel.rows[x]), **where)


def _draw_map(figure: go.Figure, panel: Panel, where: dict[str, int]) -> None:
    column, axis = MAPS[panel.form]
    placed = panel.rows.dropna(subset=["layer", column])
    grid = placed.pivot_table(index="layer", columns=column, values="value", aggfunc="mean", dropna=False)
    hover = f"{panel.title.split(':')[0]}<br>layer %{{y}}, {axis} %{{x}}: %{{z:.3g}}<extra></extra>"
    key = _scale_key(panel.rows)
    z, x, y = grid.to_numpy(dtype="float32"), grid.columns.astype(int).tolist(), grid.index.astype(int).tolist()
    printed = z.size <= MAX_PRINTED and z.shape[1] <= MAX_ABREAST
    text = (
        [[true_minus(f"{v:#.2g}".removesuffix(".")) if np.isfinite(v) else "" for v in row] for row in z]
        if printed
        else None
    )
    figure.add_heatmap(
        z=z, x=x, y=y, name=panel.title, meta=key, hovertemplate=hover, text=text, texttemplate="%{text}" if printed else None,
        textfont_size=11, **where,
    )  # fmt: skip
    figure.update_xaxes(title_text=axis, dtick=whole_ticks(grid.columns), **where)
    figure.update_yaxes(title_text="layer", dtick=whole_ticks(grid.index), showgrid=False, zeroline=False, **where)


def _draw_bars(figure: go.Figure, panel: Panel, where: dict[str, int], legend: Legend) -> None:
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
            x=[wrapped(label(a), 18) for a in names], y=mean, name=when, showlegend=False,
            marker={"color": [pale(a, among=legend.series) for a in names] if init else looks, "line": line},
            error_y={"array": np.subtract(high, mean), "arrayminus": np.subtract(mean, low), "color": GREY},
            hovertemplate=f"%{{x}}{when and f' at {when}'}: %{{y:.3g}}<extra></extra>", **where,
        )  # fmt: skip
        if init:
            legend.bands.add("pale bars: step 0, random init")


def _scale_key(rows: pd.DataFrame) -> str:
    """A name of the colour scale that maps of these rows share."""
    return str(rows["metric"].iloc[0] + str(tuple(map(str, rows[KEY].iloc[0]))))
