"""The dashboard's entry: `streamlit run app/main.py -- --runs DIR`; pages, navigation, and what is wrong with the folder."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from app import state, url

PAGES = {
    "start": ("Start", ":material/flag:", "The demo's two experiments"),
    "xray": ("X-ray", ":material/radiology:", "One model at a glance"),
    "training": ("Training", ":material/trending_down:", "Losses, gradients, coefficients"),
    "depth": ("Depth", ":material/layers:", "Any measure over layers"),
    "prompt": ("Prompt", ":material/chat:", "Your text, two models"),
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
            url.link(f"views/{name}.py", title, icon, about)
    url.check_link()
    page.run()
    _problems()


def _problems() -> None:
    """Folders that cannot be read, named once at the foot of every page."""
    entries, problems = state.listing()
    with st.sidebar:
        st.caption(f"{len(entries)} runs in {url.plain(state.root())}")
    if problems:
        with st.expander(f"{len(problems)} folders here could not be read as runs", icon=":material/folder_off:"):
            found = pd.DataFrame({"folder": list(problems), "what is wrong": list(problems.values())})
            st.dataframe(found, hide_index=True, width="stretch", alt="Folders that could not be read")


main()
