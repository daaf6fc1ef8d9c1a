"""Depth: any measure over layers, for chosen models and steps, beside its value at random init and its baseline."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from app import state, url
from workbench import plots

VIEWS = {
    "auto": "as its axes suggest",
    "profile": "lines over layers",
    "positions": "map: layer by position",
    "heads": "map: layer by head",
    "steps": "lines over training steps",
}
NONE = "plain"


def draw() -> None:
    st.title("Depth")
    entries, _ = state.listing()
    if not entries:
        st.info("No runs here yet: `make demo` trains and measures some.")
        return
    runs = state.choose_models(state.choose_set(entries))
    if not runs:
        return
    frame = state.table(runs, "records")
    if frame.empty:
        st.info("Nothing has been measured on these runs yet. From a terminal, for example:")
        st.code("workbench measure <run> importance_entropy token_similarity --steps ends", language="bash")
        return
    rows = _choice(frame)
    if rows is None:
        return
    drawn, view = rows
    state.show(lambda: plots.plot(drawn, form=None if view == "auto" else view), drawn, "depth", download=True)
    if plots.form_of(drawn) == "profile":
        st.caption(
            "Solid: the chosen step. Dashed: the same models at random init. Dotted grey: what the measure gives under its "
            "baseline, for instance attention spread evenly over all earlier tokens. Only what differs from both was learned."
        )


def _choice(frame: pd.DataFrame) -> tuple[pd.DataFrame, str] | None:
    """The rows to draw, from the select boxes."""
    first, second, third = st.columns(3)
    with first:
        metrics = sorted(frame["metric"].unique())
        metric = url.choose("Measure", "metric", metrics, "token_identity_share", show=lambda m: m.replace("_", " "))
    rows = frame[frame["metric"] == metric]
    with second:
        sites = sorted(rows["site"].dropna().unique())
        site = url.choose("Where", "site", sites, "own_v", show=plots.site) if sites else None
    rows = rows if site is None else rows[rows["site"] == site]
    with third:
        variants = [NONE] * bool(rows["variant"].isna().any()) + sorted(rows["variant"].dropna().unique())
        variant = (
            url.choose("Variant", "variant", variants, show=lambda v: v.replace("_", " "))
            if len(variants) > 1
            else variants[0]
        )
    rows = rows[rows["variant"].isna()] if variant == NONE else rows[rows["variant"] == variant]
    first, second, third = st.columns(3)
    with first:
        view = url.choose("View", "view", _views(rows), show=VIEWS.__getitem__)
    with second:
        steps = sorted(int(s) for s in rows["step"].dropna().unique())
        step = url.choose("Training step", "step", steps, steps[-1], slider=True) if steps and view != "steps" else None
    with third:
        seeds = ["all", *(str(s) for s in sorted(rows["seed"].dropna().unique()))]
        seed = url.choose("Seed", "seed", seeds)
    _explain(metric)
    rows = rows if seed == "all" else rows[rows["seed"] == int(seed)]
    if step is not None:
        maps = view in ("positions", "heads") or (
            view == "auto" and plots.form_of(rows[rows["step"] == step]) in ("positions", "heads")
        )
        rows = rows[rows["step"].isin([step] if maps else [0, step])]
    return rows, view


def _views(rows: pd.DataFrame) -> list[str]:
    """Views that these rows have the axes for."""
    has = {"profile": "layer", "positions": "position", "heads": "head", "steps": "step"}
    return ["auto", *(view for view, axis in has.items() if rows[axis].nunique() > 1)]


def _explain(metric: str) -> None:
    """The measure in words; opened on demand, since the registry needs the numerical libraries."""
    about = st.expander("What this measure is, and its caution", on_change="rerun", key="w_explain")
    if about.open:
        summary, whole = state.metric_info(metric)
        with about:
            st.text(whole or summary or "No description.")


if __name__ == "__main__":
    draw()
