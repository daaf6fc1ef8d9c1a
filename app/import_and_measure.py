"""Boxes that import a model and measure models from a page, in the background, with progress and a cancel button."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import streamlit as st

from workbench.checkpoints.paths import RUN_FILE
from workbench.errors import WorkbenchError
from workbench.runs.catalogue import Entry
from workbench.runs.run import Run
from workbench.views.source import import_model, measure_metrics

from . import background_tasks
from . import url_widgets as widgets
from .cached_source import cached_source, root

MIN_TEXT = 200  # characters of a text to measure on


def open_box() -> None:
    """A line that imports a checkpoint as a run and shows it."""
    with st.form("open_form", border=False), st.container(horizontal=True, vertical_alignment="bottom"):
        label = "Open a model of yours: folder, file, or name of a cached Hub model"
        example = "/models/checkpoint.pt or gpt2"
        path = st.text_input(
            label, key="open_path", placeholder=example,
            help=f"Files are read, never run. The model becomes a run in {widgets.escaped(root())}.",
        ).strip()  # fmt: skip
        if st.form_submit_button("Open", key="open_model", icon=":material/upload_file:") and path:
            st.session_state["opening"] = path
    if (asked := st.session_state.get("opening")) is None:
        return
    place, entries = Path(asked).expanduser().resolve(), cached_source().catalogue().entries
    name = next((e.name for e in entries if asked == e.name or place == Path(e.path).resolve()), None)
    try:
        work = partial(import_model, asked, root())
        name = name or background_tasks.run(("open", asked), f"Importing {asked}", work).name
    except background_tasks.Running:
        return
    except WorkbenchError as error:
        st.warning(widgets.escaped(error))
        before = [e for e in entries if e.imported and Run.open(e.path).info["imported"]["from"] == asked]
        for e in before:
            widgets.page_link(
                "start", f"Imported before: {e.name}", ":material/radiology:", a=e.name, set=e.group, show="model"
            )
        if place.exists():
            widgets.page_link(
                "depth", "Its learned depth weights alone", ":material/layers:", weights="1", path=str(place)
            )
        if place.exists() and not before:
            is_run, path = (place / RUN_FILE).exists(), shlex.quote(str(place))
            st.caption(
                "To show it with the runs of its folder:" if is_run else "In a terminal, with --name or other options:"
            )
            parent = shlex.quote(str(place.parent))
            command = f"app --runs {parent}" if is_run else f"import {path} --runs {shlex.quote(str(root()))}"
            st.code(f"workbench {command}", language=None, wrap_lines=True)
    else:
        widgets.update_url(a=name, set=None, step=None, models=None, show="model")
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
        background_tasks.run(
            ("measure", key, tuple(paths), tuple(plan), given, stamps), words,
            lambda progress: measure_metrics(paths, plan, given, documents, progress),
        )  # fmt: skip
    except background_tasks.Running:
        return False
    except WorkbenchError as error:
        st.warning(widgets.escaped(error))
        del asked[key]
        return False
    del asked[key]
    return True
