"""Entry script of every page: navigation, the page, and folders that cannot be read as runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pandas as pd
import streamlit as st

from workbench.places import module
from workbench.views.page_links import PAGES

__package__ = module("app")  # Streamlit runs this file as a script

from . import page_layout
from . import url_widgets as widgets
from .cached_source import cached_source, root

SIDEBAR_PX, TAB = 220, " · workbench"


def main() -> None:
    st.set_page_config(page_icon="🔬", layout="wide", initial_sidebar_state=SIDEBAR_PX)
    pages = {}
    for name, described in PAGES.items():
        script, icon = f"screens/{name}.py", f":material/{described.icon}:"
        screen = script if (Path(__file__).parent / script).exists() else partial(page_layout.all_views, name)
        title = f"{described.title}{TAB}"
        pages[name] = st.Page(screen, title=title, icon=icon, url_path=name, default=name == "start")
    pages["kept"] = st.Page("screens/kept.py", title=f"Kept{TAB}", icon=":material/push_pin:", url_path="kept")
    page = st.navigation(list(pages.values()), position="hidden")
    st.session_state["page"] = page.url_path or "start"
    if widgets.SAME_PAGE in st.query_params:
        widgets.update_url(**{widgets.SAME_PAGE: None})
    with st.sidebar:
        st.subheader("workbench", anchor=False)
        st.session_state["navigation"] = st.container(), pages
    widgets.warn_of_unknown_keys()
    page.run()
    catalogue, listed = cached_source().catalogue(), cached_source().listed()
    with st.sidebar:
        shipped = listed and all(e.shipped for e in listed)
        where = "shipped with the project, read-only" if shipped else f"in {widgets.escaped(root())}"
        st.caption(f"{len(listed)} runs {where}")
    if problems := catalogue.problems:
        with st.expander(f"{len(problems)} folders cannot be read as runs", icon=":material/folder_off:"):
            table = pd.DataFrame({"folder": list(problems), "problem": list(problems.values())})
            st.dataframe(table, hide_index=True, width="stretch", alt="Folders that cannot be read")


main()
