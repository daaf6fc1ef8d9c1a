"""The selection, the same on every page: the experiment in the sidebar; model A at a step, and model B beside it, in the header."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import streamlit as st

from workbench.models.registry import label
from workbench.plots import DETAIL
from workbench.runs.catalogue import Entry, told_apart
from workbench.runs.run import is_study
from workbench.views import Link

from . import widgets
from .cached_source import cached_source

MODEL_PX, STEP_PX = 170, 120
OF_ALL_RUNS = ("training", "heads")
"""Pages that show all models of the experiment unless two are compared."""


def choose(page: str, *, models: bool = True, experiment: str | None = None) -> Link | None:
    """Draw the selection; returns the page's link with every choice written out, None where there is nothing to look at.

    `models`: whether the page shows models or the experiment alone; `experiment`: the one that is chosen where the address
    names none.
    """
    source = cached_source()
    found = source.catalogue()
    if not found.entries:
        return None
    groups = dict(sorted(found.groups.items(), key=lambda item: (-len(item[1]), item[0])))
    with st.sidebar:
        group = _experiment(page, groups, experiment)
    link = widgets.current_link(page).but(set=group)
    if not models:
        return link
    ready = [e for e in groups[group] if e.steps]
    if not ready:
        return link.but(a=None, b=None, step=None, step_b=None, compare=None)
    compared = st.query_params.get("compare") == "1"
    if compared or page not in OF_ALL_RUNS:
        link = _model(link, "a", "step", "Model A", ready, "resformer")
    compared = widgets.toggle(
        "Compare", "compare", help="With a second model or step: every page then shows A, B and A − B"
    )
    if not compared:
        return link.but(compare=None, b=None, step_b=None)
    others = ready + [e for e in found.entries if e.steps and e.group != group]
    return _model(link.but(compare=1), "b", "step_b", "Model B", others, "transformer", follow="step")


def _experiment(page: str, groups: dict[str, list[Entry]], default: str | None) -> str:
    source = cached_source()
    asked = st.query_params.get("a")
    of_a = next((e.group for e in source.catalogue().entries if e.name == asked), None)
    default = default or (of_a if of_a and "set" not in st.query_params else source.group(Link(page))[0].group)
    known = tuple((name, runs[0].path, runs[0].stamp) for name, runs in groups.items())
    apart = source.keep(("told apart", known), lambda: told_apart(groups))
    names = {name: _name(runs) for name, runs in groups.items()}
    alike = Counter(names.values())
    group = widgets.choose(
        "Experiment", "set", list(groups), default,
        show=lambda g: _titled(names[g], apart[g] if alike[names[g]] > 1 else "", len(groups[g])),
        help="Runs of one data, shape and recipe: what may be compared", clears=("a", "step", "b", "step_b", "by", "find", "models"),
    )  # fmt: skip
    title = groups[group][0].title
    more = [part for part in apart[group].split(", ") if part and part not in title]
    st.caption(widgets.escaped(", ".join([title, *more])))
    if not any(e.steps for e in groups[group]):
        st.caption(_without_checkpoints(groups[group]))
    return str(group)


def _model(
    link: Link, key: str, step_key: str, label: str, runs: list[Entry], prefer: str, follow: str | None = None
) -> Link:
    """A select box of runs and a slider of the chosen one's steps."""
    names = [e.name for e in runs]
    default = next((e.name for e in runs if e.architecture == prefer), names[0])
    name = widgets.choose(label, key, names, default, show=_run_words({e.name: e for e in runs}), width=MODEL_PX)
    _say_if_gone(key, label, name, names)
    steps = list(next(e for e in runs if e.name == name).steps)
    led = link.whole(follow) if follow else None
    step = widgets.choose(
        f"Training step of {label[-1]}", step_key, steps, led if led in steps else steps[-1], slider=True, width=STEP_PX
    )
    return link.but(**{key: name, step_key: step})


def _say_if_gone(key: str, label: str, name: str, names: list[str]) -> None:
    """Say so where the run that was shown by default is no longer there: its address never named it."""
    before = st.session_state.get(f"shown_{key}")
    st.session_state[f"shown_{key}"] = name
    if before is not None and before != name and key not in st.query_params:
        everything = {e.name for e in cached_source().catalogue().entries}
        if before not in everything:
            gone = f"{label}: {before} is no longer there; {name} is shown."
            st.toast(gone, icon=":material/folder_off:", duration="infinite")


def _without_checkpoints(runs: list[Entry]) -> str:
    if all(e.shipped for e in runs):
        return "Shipped with the project: numbers, no weights."
    return "Recordings hold no checkpoints." if all(e.kind == "recorded" for e in runs) else "No checkpoint here yet."


def _name(runs: list[Entry]) -> str:
    """An experiment's study, or its data."""
    folder = Path(runs[0].path).parent
    return folder.name if is_study(folder) else runs[0].kind


def _titled(name: str, apart: str, count: int) -> str:
    """An experiment in the few words that a select box shows: its name, and what sets it apart from others of that name."""
    return f"{name}{', ' if apart else ''}{apart}: {count} run{'s' if count > 1 else ''}"


def _run_words(entries: dict[str, Entry]) -> Callable[[str], str]:
    """A run as figures name it; an imported one by its own name."""

    def words(name: str) -> str:
        entry = entries[name]
        return name if entry.imported else f"{label(entry.series)}{DETAIL}s{entry.seed}"

    return words
