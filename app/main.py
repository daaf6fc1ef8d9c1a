"""Entry script of every page: navigation, the page, and folders that cannot be read as runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pandas as pd
import streamlit as st

from workbench.places import module
from workbench.views.link import PAGES

__package__ = module("app")  # Streamlit runs this file as a script

from . import page_frame, widgets
from .cached_source import cached_source, root

SIDEBAR_PX, TAB = 220, " · workbench"


def main() -> None:
    st.set_page_config(page_icon="🔬", layout="wide", initial_sidebar_state=SIDEBAR_PX)
    pages = {name: _streamlit_page(name) for name in PAGES}
    kept = st.Page("screens/kept.py", title=f"Kept{TAB}", icon=":material/push_pin:", url_path="kept")
    page = st.navigation([*pages.values(), kept], position="hidden")
    with st.sidebar:
        st.subheader("workbench", anchor=False)
        for name, described in PAGES.items():
            icon = f":material/{described.icon}:"
            widgets.page_link(name, described.title, icon, described.about, target=pages[name])
        widgets.page_link("kept", "Kept", ":material/push_pin:", "Kept views with their notes", target=kept)
    widgets.warn_of_unknown_keys()
    page.run()
    _problems()


def _streamlit_page(name: str) -> st.Page:
    described, script = PAGES[name], f"screens/{name}.py"
    screen = script if (Path(__file__).parent / script).exists() else partial(page_frame.all_views, name)
    icon = f":material/{described.icon}:"
    return st.Page(screen, title=f"{described.title}{TAB}", icon=icon, url_path=name, default=name == "start")


def _problems() -> None:
    found = cached_source().catalogue()
    problems = found.problems
    with st.sidebar:
        shipped = found.entries and all(e.shipped for e in found.entries)
        where = "shipped with the project, read-only" if shipped else f"in {widgets.escaped(root())}"
        st.caption(f"{len(found.entries)} runs {where}")
    if problems:
        with st.expander(f"{len(problems)} folders cannot be read as runs", icon=":material/folder_off:"):
            table = pd.DataFrame({"folder": list(problems), "problem": list(problems.values())})
            st.dataframe(table, hide_index=True, width="stretch", alt="Folders that cannot be read")


main()
