"""Boxes that import a model and measure models from a page, in the background, with progress and a cancel button."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import streamlit as st

from workbench.errors import WorkbenchError
from workbench.runs.catalogue import Entry
from workbench.runs.run import Run
from workbench.views.source import import_model, measure_metrics

from . import background, widgets
from .cached_source import root

MIN_TEXT = 200  # characters of a text to measure on


def open_box(*, expanded: bool) -> None:
    """A box that imports a checkpoint as a run and shows it."""
    with st.expander("Open a model of yours", icon=":material/upload_file:", expanded=expanded):
        label, example = "Folder, file, or name of a cached Hub model", "/models/checkpoint.pt or gpt2"
        path = st.text_input(label, key="open_path", placeholder=example)
        st.caption(f"Files are read, never run. The model becomes a run in {widgets.escaped(root())}.")
        if st.button("Open", key="open_model", disabled=not path.strip()):
            st.session_state["opening"] = path.strip()
        if (asked := st.session_state.get("opening")) is None:
            return
        work = partial(import_model, asked, root())
        try:
            run: Run = background.run(("open", asked), f"Importing {asked}", work)
        except background.Running:
            return
        except WorkbenchError as error:
            st.warning(widgets.escaped(error))
        else:
            widgets.update_url(a=run.name, set=None, step=None, models=None, show="model")
            st.session_state["opening"] = None
            st.rerun()
        st.session_state["opening"] = None


def measure_box(
    key: str, entries: Sequence[Entry], plan: Sequence[tuple[int, str]], label: str, documents: int
) -> bool:
    """A button that measures (step, metric) of runs and stores the records; return True if they are stored now.

    Imported runs need a text, as their training text is unknown; shipped runs are read-only and are left out.
    """
    runs = [e for e in entries if e.steps and not e.shipped]
    if not runs:
        return False
    asked, text = st.session_state.setdefault("measuring", {}), None
    if any(e.imported for e in runs):
        text = st.text_area(
            "Text to measure on", key=f"text_{key}", height=100, help=f"The training text is unknown. At least {MIN_TEXT} characters."
        )  # fmt: skip
    short = text is not None and len(text) < MIN_TEXT
    if st.button(label, key=f"measure_{key}", icon=":material/play_arrow:", disabled=short):
        asked[key] = text, tuple(e.stamp for e in runs)
    if key not in asked:
        return False
    given, stamps = asked[key]  # visitors who asked before anything changed wait for one job
    paths, words = [Path(e.path) for e in runs], f"Measuring {len(runs)} run{'s' * (len(runs) > 1)}"
    try:
        background.run(
            ("measure", key, tuple(paths), tuple(plan), given, stamps), words,
            lambda progress: measure_metrics(paths, plan, given, documents, progress),
        )  # fmt: skip
    except background.Running:
        return False
    except WorkbenchError as error:
        st.warning(widgets.escaped(error))
        del asked[key]
        return False
    del asked[key]
    return True
