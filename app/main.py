"""What runs at each look at a page: the pages, the navigation, and what is wrong with the folder of runs."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from app import url
from app.source import root, source

PAGES = {
    "start": ("Start", ":material/flag:", "What is here, and one model at a glance"),
    "training": ("Training", ":material/trending_down:", "Losses, gradients, coefficients over time"),
    "depth": ("Depth", ":material/layers:", "Any measure over layers"),
    "attention": ("Attention", ":material/grid_on:", "Where every head looks"),
    "prompt": ("Prompt", ":material/chat:", "Your text: what is read, kept and predicted"),
    "intervene": ("Intervene", ":material/build:", "Change something, see what follows"),
}


def main() -> None:
    st.set_page_config(page_title="workbench", page_icon="🔬", layout="wide")
    pages = [
        st.Page(f"views/{name}.py", title=title, icon=icon, url_path=name, default=name == "start")
        for name, (title, icon, _) in PAGES.items()
    ]
    page = st.navigation(pages, position="hidden")
    with st.sidebar:
        st.subheader("workbench")
        for name, (title, icon, about) in PAGES.items():
            url.link(name, title, icon, about)
    url.check_link()
    page.run()
    _problems()


def _problems() -> None:
    """Folders that cannot be read, named once at the foot of every page."""
    found = source().catalogue()
    problems = found.problems
    with st.sidebar:
        st.caption(f"{len(found.entries)} runs in {url.plain(root())}")
    if problems:
        with st.expander(f"{len(problems)} folders here could not be read as runs", icon=":material/folder_off:"):
            table = pd.DataFrame({"folder": list(problems), "what is wrong": list(problems.values())})
            st.dataframe(table, hide_index=True, width="stretch", alt="Folders that could not be read")


main()
