"""The documents behind a number, or those in which A and B differ most, with a table; a selected one becomes the prompt of all pages."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from workbench.errors import WorkbenchError
from workbench.views import Link, depth

from . import url_widgets as widgets
from .cached_source import cached_source
from .figure_menu import show
from .page_layout import toolbar
from .prompt_box import OF_A_PROMPT
from .tables import row_table


def documents_behind(link: Link) -> None:
    """Draw the documents behind the link's measure for model A, or of A - B with `minus=1`.

    Args:
        link: A link of the page Depth with a measure and `behind=1`, from any page.
    """
    source = cached_source()
    bare = link.but(layer=None, head=None)
    try:
        number = depth.number_behind(source, bare)
    except WorkbenchError as error:
        st.info(widgets.escaped(str(error)[:1].upper() + str(error)[1:]), icon=":material/info:")
        for metric in depth.measures_by_document(source, link):
            label, gone = f"Documents by {widgets.spaced(metric)}", dict.fromkeys(("site", "variant", "layer", "head"))
            widgets.page_link(
                "depth", label, ":material/arrow_forward:", target=None, metric=metric, behind="1", **gone
            )
        return
    with toolbar("cell"):
        if number.layers:
            bare = bare.but(layer=widgets.choose("Layer", "layer", number.layers, number.layer, width=90))
            number = depth.number_behind(source, bare)
        if number.heads:
            head = widgets.choose("Head", "head", [None, *number.heads], None, show=str, width=90, placeholder="all")
            bare = bare.but(head=head)
        orders = depth.ORDERS_OF_TWO if link.on("minus") else depth.ORDERS
        order = widgets.choose("Documents", "order", list(orders), show=orders.__getitem__, width=220)
        bare = bare.but(order=order)
    drawing = show(depth.behind, bare, long="Reading documents")
    if drawing is None or drawing.table["prompt"].isna().all():
        return
    table = drawing.table
    selected = table["prompt"] == st.query_params.get("prompt")

    def take(row: pd.Series) -> None:
        widgets.update_url(**dict.fromkeys(("stored", *OF_A_PROMPT)) | {"prompt": row["prompt"]})

    words = {"prompt": "beginning", "effect_on_mean": "effect on the mean"}
    words |= {"value": "A − B"} if link.on("minus") else {}
    shown = table[["document", "value", "effect_on_mean", "prompt"]].rename(columns=words)
    row_table("documents", shown, selected, table, take, "Documents behind the number")
    if selected.any():
        widgets.page_link("attention", "Selected document in Attention", ":material/grid_on:", a=number.entry.name)
    else:
        st.caption("Click a document to read it on Attention and the other pages.")
