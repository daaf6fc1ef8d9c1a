"""Figures of single experiments: the race to induction, replaced values, attention maps, gradients and coefficients."""

from __future__ import annotations

import html as markup
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.errors import WorkbenchError
from workbench.plots.records import checked, lines
from workbench.plots.style import GREY, SEQUENTIAL, colour, dressed, label, ordered, pale, subtitle, words

# ---- the race to induction -------------------------------------------------------------------------------------------


def _copying(frame: pd.DataFrame) -> pd.DataFrame:
    rows = frame[(frame["metric"] == "copy_loss") & frame["variant"].isna()]
    if rows.empty:
        raise WorkbenchError("no copy_loss here; it is written while training on repeated tokens")
    return checked(rows)


def formation_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """The step each run learned to copy at: the first whose copy loss is below half of its value at step 0.

    Columns architecture, seed, formation_step (null where it has not formed), formed (the step in words), last_step.
    """
    found = []
    for (architecture, run, seed), rows in _copying(frame).groupby(["architecture", "run", "seed"], dropna=False):
        curve = rows.sort_values("step").set_index("step")["value"]
        below = curve[curve < curve.iloc[0] / 2]
        step = int(below.index[0]) if len(below) else None
        row = {
            "architecture": architecture,
            "run": run,
            "seed": seed,
            "formation_step": step,
            "last_step": int(curve.index[-1]),
        }
        found.append(row | {"formed": "not formed" if step is None else f"step {step}"})
    table = pd.DataFrame(found).astype({"formation_step": "Int64", "seed": "Int64"})
    middle = table["formation_step"].astype("float64").fillna(np.inf).groupby(table["architecture"]).median()
    order = table["architecture"].map(middle)
    return (
        table.assign(order=order)
        .sort_values(["order", "architecture", "seed"])
        .drop(columns="order")
        .reset_index(drop=True)
    )


def verdict(steps: pd.DataFrame) -> str:
    """The order of the architectures in words, and which neighbours the seeds do not tell apart; derived from the numbers."""
    groups = {
        a: rows["formation_step"].astype("float64").fillna(np.inf)
        for a, rows in steps.groupby("architecture", sort=False)
    }
    if len(groups) < 2:
        return "One architecture so far: nothing to compare."
    names = sorted(groups, key=lambda a: float(groups[a].median()))
    close = [(a, b) for a, b in pairwise(names) if not groups[a].max() < groups[b].min()]
    order = " before ".join(LABELS_PLAIN.get(a, a) for a in names)
    if min(len(g) for g in groups.values()) < 2:
        return f"{order}: one seed, so the order is not established."
    if not close:
        return f"{order}: seeds disjoint."
    pairs = "; ".join(f"{LABELS_PLAIN.get(a, a)} and {LABELS_PLAIN.get(b, b)}" for a, b in close)
    return f"{order} by the middle seed; overlapping, so unresolved: {pairs}."


LABELS_PLAIN = {
    "transformer": "Transformer", "resformer": "ResFormer", "svformer": "SVFormer", "residual_k": "key residual",
    "neutreno": "NeuTRENO", "denseformer": "DenseFormer",
}  # fmt: skip


def race(frame: pd.DataFrame, *, log_x: bool = False) -> go.Figure:
    """Copy loss over training: mean and range over seeds, the halfway line, a diamond where each seed crosses it."""
    rows = _copying(frame)
    figure, shown, bands = make_subplots(1, 1), set[str](), set[str]()
    lines(figure, rows, "step", {"row": 1, "col": 1}, shown, bands)
    start = rows[rows["step"] == rows["step"].min()].groupby("run")["value"].mean()
    half = float(start.mean()) / 2
    figure.add_hline(y=half, line={"color": GREY, "dash": "dot"}, annotation={
        "text": "half of the loss at the start", "xanchor": "left", "x": 0, "yanchor": "top", "font": {"color": GREY}})  # fmt: skip
    steps = formation_steps(frame).dropna(subset="formation_step")
    for architecture in ordered(steps["architecture"]):
        mine = steps[steps["architecture"] == architecture]
        figure.add_scatter(
            x=mine["formation_step"].astype(int).tolist(), y=[float(start[r]) / 2 for r in mine["run"]], mode="markers",
            marker={"symbol": "diamond", "size": 10, "color": colour(architecture), "line": {"color": "white", "width": 1}},
            name=f"{label(architecture)}: crossing", legendgroup=label(architecture), showlegend=False,
            hovertemplate=[f"{label(architecture)}, seed {s}: step %{{x}}<extra></extra>" for s in mine["seed"]],
        )  # fmt: skip
    figure.update_xaxes(title_text="training step", type="log" if log_x else "linear")
    figure.update_yaxes(
        title_text="loss on the tokens that can be copied (nats)<br><sup>lower: copies better</sup>", rangemode="tozero"
    )
    under = subtitle(
        rows, "sequences of random tokens, written twice", *sorted(bands), "diamond: a seed crosses the line"
    )
    return dressed(figure, "When does each model learn to copy?", under, 340)


# ---- attention -------------------------------------------------------------------------------------------------------


def token_ticks(tokens: Sequence[str]) -> list[str]:
    """`index:token`, unique and safe inside a figure."""
    return [f"{i}:{markup.escape(t if len(t) <= 12 else t[:11] + '…')}" for i, t in enumerate(tokens)]


def _map(pattern: Any, tokens: Sequence[str]) -> go.Heatmap:
    z = np.array(pattern, dtype="float32")
    if z.ndim != 2 or z.shape != (len(tokens), len(tokens)):
        raise WorkbenchError(f"a pattern of shape {z.shape} does not fit {len(tokens)} tokens")
    z[np.triu_indices(len(z), 1)] = np.nan
    ticks = token_ticks(tokens)
    hover = "query %{y}<br>key %{x}<br>weight %{z:.3f}<extra></extra>"
    return go.Heatmap(z=z, x=ticks, y=ticks, coloraxis="coloraxis", hovertemplate=hover, hoverongaps=False)


def attention_map(pattern: Any, tokens: Sequence[str], title: str = "Attention", under: str = "") -> go.Figure:
    """Attention [query, key] of one head: queries top to bottom, keys left to right, the future left blank, scale 0 to 1."""
    return attention_pair([(title, pattern, tokens)], title, under)


def attention_pair(
    maps: Sequence[tuple[str, Any, Sequence[str]]], title: str = "Attention", under: str = ""
) -> go.Figure:
    """Attention maps (name, pattern, tokens) side by side on one scale from 0 to 1."""
    figure = make_subplots(
        1, len(maps), subplot_titles=[m[0] for m in maps] if len(maps) > 1 else None, horizontal_spacing=0.12
    )
    for i, (name, pattern, tokens) in enumerate(maps):
        trace = _map(pattern, tokens)
        trace.name = name
        figure.add_trace(trace, 1, i + 1)
        every = max(1, -(-len(tokens) // 26))
        ticks = {"tickvals": trace.x[::every], "tickfont": {"size": 10}, "type": "category", "showgrid": False}
        figure.update_xaxes(title_text="key: where attention goes", tickangle=-90, **ticks, row=1, col=i + 1)
        figure.update_yaxes(
            title_text="query: who attends" if i == 0 else "", autorange="reversed", **ticks, row=1, col=i + 1
        )
    figure = dressed(figure, title, under, 430)
    bar = {"title": {"text": "attention"}, "thickness": 14}
    return figure.update_layout(coloraxis={"colorscale": SEQUENTIAL, "cmin": 0, "cmax": 1, "colorbar": bar})


def along_tokens(frame: pd.DataFrame, tokens: Sequence[Sequence[str]], title: str) -> go.Figure:
    """A number per token for each of two runs: the effective value solid, the layer's own dashed, on one y axis."""
    frame = checked(frame)
    runs = list(dict.fromkeys(frame["run"]))
    figure = make_subplots(
        1, len(runs), shared_yaxes=True, subplot_titles=[markup.escape(r) for r in runs], horizontal_spacing=0.05
    )
    for i, (run, words_of) in enumerate(zip(runs, tokens, strict=True)):
        ticks = token_ticks(words_of)
        for site, dash in (("v", "solid"), ("own_v", "dash")):
            rows = frame[(frame["run"] == run) & (frame["site"] == site)].sort_values("position")
            if rows.empty:
                continue
            architecture, name = rows["architecture"].iloc[0], {"v": "effective", "own_v": "own"}[site]
            figure.add_scatter(
                x=ticks, y=rows["value"], name=f"{label(architecture)}, {name}", mode="lines+markers", marker_size=4,
                line={"color": colour(architecture), "dash": dash}, row=1, col=i + 1,
            )  # fmt: skip
        every = max(1, -(-len(ticks) // 26))
        figure.update_xaxes(tickvals=ticks[::every], type="category", tickangle=-90, tickfont_size=10, row=1, col=i + 1)
    figure.update_yaxes(title_text=words(frame["unit"].iloc[0]), rangemode="tozero", row=1, col=1)
    return dressed(figure, title, "solid: effective value, what attention sums; dashed: the layer's own part", 300)


def next_tokens(found: Sequence[tuple[str, str, Sequence[str], Sequence[float]]]) -> go.Figure:
    """Most probable next tokens of (name, architecture, tokens, probabilities), side by side on one scale."""
    figure = make_subplots(1, len(found), shared_xaxes="all", subplot_titles=[markup.escape(f[0]) for f in found])
    for i, (name, architecture, tokens, chances) in enumerate(found):
        ticks = [f"{markup.escape(t)}  " for t in tokens]
        figure.add_bar(
            x=list(chances), y=list(range(len(ticks))), orientation="h", marker_color=colour(architecture), name=markup.escape(name),
            showlegend=False, text=[f"{c:.1%}" for c in chances], textposition="outside", cliponaxis=False, row=1, col=i + 1,
        )  # fmt: skip
        figure.update_yaxes(tickvals=list(range(len(ticks))), ticktext=ticks, autorange="reversed", row=1, col=i + 1)
        figure.update_xaxes(
            title_text="probability", range=[0, min(1.0, 1.15 * max(max(f[3]) for f in found))], row=1, col=i + 1
        )
    return dressed(figure, "What comes next?", "the most probable tokens after the last one; higher: more certain", 280)


# ---- replaced values -------------------------------------------------------------------------------------------------


def ablation(frame: pd.DataFrame) -> go.Figure:
    """Change of the loss where deep values are replaced by their mean per token, or by zero: per layer and together."""
    rows = checked(frame[(frame["metric"] == "value_ablation") & frame["variant"].isin(["token_mean", "zero"])])
    deep = rows[(rows["layer"].isna()) | (rows["layer"] > 0)]
    if deep.empty:
        raise WorkbenchError("no values after the first layer were replaced; measure value_ablation on a deeper model")
    names = ordered(deep["architecture"])
    figure = make_subplots(
        1, len(names), shared_yaxes=True, subplot_titles=[label(n) for n in names], horizontal_spacing=0.03
    )
    last = int(deep["layer"].max())
    ticks = {**{float(n): str(n) for n in range(1, last + 1)}, last + 1.0: f"1–{last}"}
    for i, name in enumerate(names):
        for variant, look in (("zero", pale(name, 0.35)), ("token_mean", colour(name))):
            part = deep[(deep["architecture"] == name) & (deep["variant"] == variant)]
            found = part.assign(x=part["layer"].fillna(last + 1.0)).groupby("x")["value"].agg(["mean", "min", "max"])
            said = {"zero": "zero", "token_mean": "mean of its token"}[variant]
            figure.add_bar(
                x=[ticks[x] for x in found.index], y=found["mean"], name=said, marker={"color": look, "line": {"color": colour(name), "width": 1}},
                error_y={"array": found["max"] - found["mean"], "arrayminus": found["mean"] - found["min"], "color": GREY, "thickness": 1},
                showlegend=False, hovertemplate=f"{label(name)}, layer %{{x}} replaced by {said}: %{{y:+.4f}} nats<extra></extra>", row=1, col=i + 1,
            )  # fmt: skip
        figure.update_xaxes(title_text="layer", type="category", row=1, col=i + 1)
    figure.update_yaxes(title_text="change of the loss (nats)<br><sup>higher: it mattered more</sup>", row=1, col=1)
    missing = [label(a) for a in ordered(set(rows["architecture"]) - set(names))]
    without = f"{', '.join(missing)}: no values of its own after the first layer" if missing else ""
    under = subtitle(
        deep,
        "pale: values set to zero",
        "full: values replaced by their token's mean",
        "whisker: range over seeds",
        without,
    )
    return dressed(figure, "What is lost when deep values forget their context?", under, 320)


def unresolved(frame: pd.DataFrame) -> list[str]:
    """One line each on what the records of small models do not settle: losses inside seed bands, sinks, published sizes."""
    return [*_loss_lines(frame), *_sink_lines(frame), *TOO_SMALL]


TOO_SMALL = (
    "Published savings in parameters and tokens, results at a billion parameters and long contexts cannot be checked here.",
)


def _last(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    rows = frame[(frame["metric"] == metric) & frame["variant"].isna()]
    return rows[rows["step"] == rows.groupby("run")["step"].transform("max")]


def _loss_lines(frame: pd.DataFrame) -> list[str]:
    rows = _last(frame, "loss")
    spans = rows.groupby("architecture")["value"].agg(["min", "mean", "max", "size"]).sort_values("mean")
    if len(spans) < 2 or spans["size"].min() < 2:
        return ["Final losses are compared once two architectures have two seeds each."]
    close = [
        f"{_plain(a)} and {_plain(b)}" for a, b in pairwise(spans.index) if spans.loc[a, "max"] >= spans.loc[b, "min"]
    ]
    if close:
        return [f"Final losses inside each other's seed range, so unresolved: {'; '.join(close)}."]
    order = ", ".join(f"{_plain(a)} {spans.loc[a, 'mean']:.2f}" for a in spans.index)
    return [
        f"Final losses do not overlap over seeds ({order} nats), but after so few steps that says who learns fastest, not who ends best."
    ]


def _sink_lines(frame: pd.DataFrame) -> list[str]:
    mass, rate = _last(frame, "sink_mass"), _last(frame, "sink_rate")
    found, even = mass[mass["control"].isna()]["value"], mass[mass["control"].notna()]["value"]
    if found.empty or even.empty:
        return []
    formed = float(rate[rate["control"].isna()]["value"].max()) if len(rate) else 0.0
    if formed > 0:
        return [
            f"Some heads count as attention sinks here (at most {formed:.0%} of a layer's heads); see sink rate on the Depth page."
        ]
    return [
        f"No attention sink formed: the strongest head gives the first token {found.max():.1%} of its attention, even attention would give "
        f"{even.max():.1%}. So claims about sinks, drained values and towering first states are not tested."
    ]


def _plain(architecture: str) -> str:
    return LABELS_PLAIN.get(architecture, architecture)


# ---- training --------------------------------------------------------------------------------------------------------


def relative(frame: pd.DataFrame, baseline: str = "transformer") -> pd.DataFrame:
    """Each run's numbers minus those of the baseline of the same seed, step and data; the baseline itself is left out."""
    axes = ["metric", "seed", "step", "data", "T", "site", "part", "layer", "head", "position", "variant", "control"]
    base = frame[frame["architecture"] == baseline].groupby(axes, dropna=False, as_index=False)["value"].mean()
    paired = frame[frame["architecture"] != baseline].merge(base, on=axes, suffixes=("", "_base"))
    if paired.empty:
        raise WorkbenchError(f"nothing to compare: no other run shares a seed with a {baseline}")
    return paired.assign(value=paired["value"] - paired["value_base"], se=np.nan)[frame.columns]


def gradient_map(frame: pd.DataFrame) -> go.Figure:
    """Gradient norm of each matrix and layer over training, logarithmic colour, one panel per architecture on one scale."""
    rows = checked(
        frame[
            (frame["metric"] == "gradient_norm")
            & frame["variant"].isna()
            & frame["part"].str.startswith("W_", na=False)
        ]
    )
    names = ordered(rows["architecture"])
    columns = min(len(names), 2)
    count = -(-len(names) // columns)
    figure = make_subplots(
        count, columns, subplot_titles=[label(n) for n in names], vertical_spacing=0.22 / count, horizontal_spacing=0.14
    )
    top, bottom = -np.inf, np.inf
    for i, name in enumerate(names):
        mine = rows[rows["architecture"] == name]
        where = mine["part"] + mine["layer"].map(lambda n: "" if pd.isna(n) else f" {n:.0f}")
        grid = (
            mine.assign(where=where)
            .pivot_table(index="where", columns="step", values="value", aggfunc="mean")
            .sort_index(ascending=False)
        )
        z = np.log10(
            grid.to_numpy(dtype="float32"), where=grid.to_numpy() > 0, out=np.full(grid.shape, np.nan, dtype="float32")
        )
        top, bottom = max(top, float(np.nanmax(z))), min(bottom, float(np.nanmin(z)))
        hover = f"{label(name)}<br>%{{y}} at step %{{x}}: %{{customdata:.3g}}<extra></extra>"
        x, y = grid.columns.tolist(), grid.index.tolist()
        at = {"row": i // columns + 1, "col": i % columns + 1}
        figure.add_heatmap(
            z=z, x=x, y=y, customdata=grid, coloraxis="coloraxis", name=label(name), hovertemplate=hover, **at
        )
        figure.update_yaxes(tickfont_size=9, dtick=1, **at)
        figure.update_xaxes(title_text="training step", **at)
    ticks = list(range(int(np.floor(bottom)), int(np.ceil(top)) + 1))
    bar = {
        "title": {"text": "norm"},
        "tickvals": ticks,
        "ticktext": [f"10<sup>{t}</sup>" for t in ticks],
        "thickness": 14,
    }
    figure = dressed(
        figure,
        "Gradient norms",
        subtitle(rows, "mean over seeds; rows: matrix and layer; lighter: stronger pull"),
        430 * count,
    )
    return figure.update_layout(coloraxis={"colorscale": SEQUENTIAL, "cmin": bottom, "cmax": top, "colorbar": bar})


def coefficients(frame: pd.DataFrame) -> go.Figure:
    """Learned coefficients over training: a panel per layer, a line per coefficient (mean over seeds, band: their range)."""
    rows = checked(frame[frame["metric"] == "coefficient"])
    if rows["architecture"].nunique() > 1:
        raise WorkbenchError(
            f"coefficients of different architectures mean different things; keep one of {ordered(rows['architecture'])}"
        )
    layers = sorted(rows["layer"].dropna().unique())
    columns = min(len(layers), 2)
    count = -(-len(layers) // columns)
    titles = [f"after block {n:.0f}" for n in layers]
    figure = make_subplots(
        count, columns, subplot_titles=titles, shared_yaxes="all", vertical_spacing=0.3 / count, horizontal_spacing=0.06
    )
    parts = sorted(rows["part"].unique())
    shades = [f"hsl({int(210 + 300 * i / max(len(parts), 1)) % 360},60%,48%)" for i in range(len(parts))]
    for i, layer in enumerate(layers):
        for part, shade in zip(parts, shades, strict=True):
            curve = (
                rows[(rows["layer"] == layer) & (rows["part"] == part)]
                .groupby("step")["value"]
                .agg(["mean", "min", "max"])
            )
            if curve.empty:
                continue
            at = {"row": i // columns + 1, "col": i % columns + 1}
            bars = {
                "array": curve["max"] - curve["mean"],
                "arrayminus": curve["mean"] - curve["min"],
                "thickness": 0.6,
                "width": 0,
            }
            said = words(part).replace("alpha 0", "embedding").replace("alpha ", "output of block ")
            figure.add_scatter(
                x=curve.index, y=curve["mean"], error_y=bars, name=said, line={"color": shade}, mode="lines",
                legendgroup=part, showlegend=not any(t.legendgroup == part for t in figure.data), **at,
            )  # fmt: skip
            figure.update_xaxes(title_text="training step", **at)
    figure.update_yaxes(title_text="weight", col=1)
    title = f"Learned coefficients of {label(rows['architecture'].iloc[0])}"
    return dressed(figure, title, subtitle(rows, "whisker: range over seeds"), 250 * count)
