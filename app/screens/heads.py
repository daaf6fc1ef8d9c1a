"""Heads: a ranking of the heads of all models; a row selects a head, with its history and passages beside the ranking."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from workbench.places import module
from workbench.views import Link, heads

__package__ = module("app.screens")  # Streamlit runs this file as a script

from .. import url_widgets as widgets
from ..cached_source import cached_source
from ..elements.figure import Point
from ..figure_menu import show
from ..measure_selection import choose_measure
from ..model_selection import choose_models
from ..page_layout import controls, page
from ..prompt_box import OF_A_PROMPT
from ..tables import row_table

ABOUT = (
    "The heads of all models, ranked by a stored measure. Dotted: the measure under its baseline. Hollow: the same head at random "
    "init. Click a row to select a head. A head number means nothing across runs: layer 3, head 2 of another seed is another head. "
    f"*Type*, by the stored measures: sink (mean attention to position 0 above {heads.SINK_MASS}), previous token or induction "
    "(score above 0.4), other."
)
COLUMNS = {
    "rank": "#",
    "name": "head",
    "value": "value",
    "type": "type",
    "se": "± se",
    "baseline": "baseline",
    "init": "at init",
}


def heads_page(link: Link) -> None:
    source = cached_source()
    if not link.on("compare"):  # all runs at their last step, unless the address names a run or a step
        a = st.query_params.get("a")
        in_group = a in {e.name for e in source.group(link)}
        step = link.text("step") if "step" in st.query_params else None
        link = link.but(a=a if in_group else None, step=step)
    with controls():
        if not link.on("compare"):
            link = choose_models(link)
        link, picked = _choices(link)
    left, right = st.columns(2, gap="medium")
    with left:
        table = heads.ranked(source, link)

        def take(point: Point) -> None:
            if point.at is not None:
                _take_head(link, table.iloc[point.at[0]])

        show(heads.ranking, link, take=take)
        names = {"value": widgets.spaced(link.text("metric") or "value")}
        if (
            table["baseline_of"].nunique() == 1
            and (of := table["baseline_of"].dropna().iloc[0]) not in COLUMNS.values()
        ):
            names["baseline"] = of
        shown = table[list(COLUMNS)].rename(columns=COLUMNS | names)
        row_table(
            f"all_heads_{link.text('metric')}_{link.text('variant')}",
            shown.dropna(axis=1, how="all"), heads.is_picked(table, picked), table,
            lambda row: _take_head(link, row), "Ranking of all heads",
        )  # fmt: skip
    with right:
        show(heads.history, link)
        panel = st.expander("Sink score by part", on_change="rerun", key="open_sink_parts")
        if panel.open:
            with panel:
                show(heads.sink, link, long="Reading validation text at every checkpoint")
        drawing = show(heads.passages, link, long="Reading validation text")
        if not picked.entry.steps:
            return
        selected = pd.Series(dtype=bool)
        if drawing is not None:
            passages, lock = drawing.table, drawing.table["lock"].astype("string").fillna("")
            selected = (passages["prompt"] == st.query_params.get("prompt")) & (lock == st.query_params.get("lock", ""))

            def read(row: pd.Series) -> None:
                at = None if pd.isna(row["lock"]) else int(row["lock"])
                head = {"a": picked.entry.name, "layer": picked.layer, "head": picked.head}
                gone = dict.fromkeys(("stored", *OF_A_PROMPT))
                widgets.update_url(**gone | head | {"prompt": row["prompt"], "lock": at})

            texts = passages[["weight", "prompt"]].rename(columns={"prompt": "text"})
            row_table("passages", texts, selected, passages, read, "Passages of the selected head")
        on = "the selected passage" if selected.any() else "the current prompt"
        widgets.page_link(
            "attention", f"{picked.name} in Attention, on {on}", ":material/grid_on:", a=picked.entry.name,
            layer=str(picked.layer), head=str(picked.head),
        )  # fmt: skip
        if drawing is not None and not selected.any():
            st.caption("Click a passage to read it on Attention.")


def _choices(link: Link) -> tuple[Link, heads.RunHead]:
    source = cached_source()
    bare = link.but(**dict.fromkeys(("metric", "site", "variant", "end", "layer", "head")))
    options = heads.head_options(source, bare)
    of_layers, asked = heads.of_layers(source, bare, options), st.query_params.get("metric")
    bare, options = choose_measure(bare, lambda asked: heads.head_options(source, asked), of_layers)
    if asked in of_layers:
        words = widgets.spaced(asked).capitalize()
        st.caption(f"{words} is not measured per head; ranked by {widgets.spaced(options.metric)}.")
    bare = bare.but(
        end=widgets.choose("Sort", "end", list(heads.ENDS), options.end, show=heads.ENDS.__getitem__, width=150)
    )
    at = bare
    for key in ("layer", "head"):
        asked = link.text(key)
        entry = heads.head_of(source, at).entry
        count = entry.n_layers if key == "layer" else entry.n_heads
        if asked is not None and asked in map(str, range(count)):
            at = at.but(**{key: asked})
        elif asked is not None:
            widgets.warn_ignored(key, asked, range(count))
    picked = heads.head_of(source, at)
    return bare.but(a=picked.entry.name, layer=picked.layer, head=picked.head), picked


def _take_head(link: Link, row: pd.Series) -> None:
    other = {}
    if row["tag"] == "B":  # A and B change places, so that the same two stay compared
        other = {"b": link.text("a"), "step_b": link.text("step"), "step": link.text("step_b")}
    widgets.update_url(a=row["run"], layer=row["layer"], head=row["head"], **other)


if __name__ == "__main__":
    page("heads", ABOUT, heads_page)
