"""The selection: experiment, model A and B with their steps; and, on pages of many runs, which models are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import streamlit as st

from workbench import plots
from workbench.errors import WorkbenchError
from workbench.plots.style import plain
from workbench.runs.catalogue import Entry, differing_settings
from workbench.runs.run import is_study
from workbench.views import Link
from workbench.views.page_links import PAGES, split_list
from workbench.views.registered_views import ONE_SEED
from workbench.views.source import OF_ALL_RUNS, facets, run_name

from . import url_widgets as widgets
from .cached_source import cached_source
from .tables import rows_table

EXPERIMENT_PX, MODEL_PX, STEP_PX = 225, 155, 90
FIRST = 10  # series that are drawn by default, and most that are shown as pills
CONTENT = {"repeated": "repeated tokens", "backcopy": "back-copy", "recorded": "recordings", "log": "training logs"}
"""The data of an experiment in short, by its kind."""


def choose_link(page: str, *, uses: str = "models", experiment: str | None = None) -> Link | None:
    """Draw the selection, the same row on every page, and return the page's link with every option; None if there are no runs.

    Args:
        uses: What the page shows: "models", the "experiment" alone, or "nothing" of the selection. Controls that are not used are disabled.
        experiment: Default experiment.
    """
    source, group, ready = cached_source(), None, list[Entry]()
    groups = source.catalogue().groups
    link = Link(page) if page not in PAGES else widgets.current_link(page)
    if groups and uses != "nothing":
        group = _experiment(page, groups, experiment)
        link = link.but(set=group)
        ready = [e for e in groups[group] if e.steps and uses == "models"]
    else:
        widgets.unused("Experiment", "all runs" if groups else "none", EXPERIMENT_PX)
    others = [e for e in source.catalogue().entries if e.steps and e.group != group]
    compared = st.query_params.get("compare") == "1"
    if ready and (compared or page not in OF_ALL_RUNS):
        link = _model(link, "a", "step", "Model A", ready, "resformer", others)
    else:
        widgets.unused("Model A", "all models" if ready else "not used" if others else "none", MODEL_PX)
        widgets.unused("Step of A", "last" if ready else "", STEP_PX)
    if widgets.toggle("Compare", "compare", disabled=not ready) and ready:
        link = _model(link.but(compare=1), "b", "step_b", "Model B", ready, "transformer", others, follow="step")
    else:
        widgets.unused("Model B", "none", MODEL_PX)
        widgets.unused("Step of B", "", STEP_PX)
        if ready:
            link = link.but(compare=None, b=None, step_b=None)
    if group is not None and uses == "models" and not ready:
        link = link.but(a=None, b=None, step=None, step_b=None, compare=None)
    # these pages have figures of several seeds, and each figure states its number
    pair = ready and link.on("compare") and page not in ("depth", "training", "differences")
    if pair and len({s.entry.architecture for s in source.subjects(link)}) > 1:
        st.session_state["messages"].badge(ONE_SEED, icon=":material/warning:", color="orange")
    return link if groups else None


def offer_weights(link: Link) -> None:
    """A link to an experiment with weights if this one has none."""
    runs = cached_source().catalogue()
    ready = [e for e in runs.entries if e.steps]
    if link.page != "start" and ready and not any(e.steps for e in runs.groups.get(link.text("set") or "", ())):
        entry = max(ready, key=lambda e: (e.kind == "text", e.architecture == "resformer"))
        label = f"{PAGES[link.page].title} of {run_name(entry)}: {entry.title}"
        widgets.page_link(link.page, label, ":material/arrow_forward:", set=entry.group, a=entry.name)


def _experiment(page: str, groups: dict[str, list[Entry]], default: str | None) -> str:
    source = cached_source()
    shipped = {group: runs[0].shipped for group, runs in groups.items()}  # listed below those of the folder
    groups = dict(sorted(groups.items(), key=lambda item: (shipped[item[0]], -len(item[1]), item[0])))
    asked = st.query_params.get("a")
    of_a = next((e.group for e in source.catalogue().entries if e.name == asked), None)
    default = default or (of_a if of_a and "set" not in st.query_params else source.group(Link(page))[0].group)
    known = tuple((name, runs[0].path, runs[0].stamp) for name, runs in groups.items())
    parts = [{group: groups[group] for group in groups if shipped[group] == part} for part in (False, True)]
    apart = source.keep(("told apart", known), lambda: differing_settings(parts[0]) | differing_settings(parts[1]))
    names, shapes = {}, {}
    for group, runs in groups.items():
        shapes[group] = group.split("-")[1].replace("x", " × ") if group.count("-") == 2 else ""
        imported = ", ".join(e.name for e in runs[:2]) + (" …" if len(runs) > 2 else "") if runs[0].imported else ""
        names[group] = imported or CONTENT.get(runs[0].kind, runs[0].title.partition(":")[0])
    alike: dict[tuple[str, str, bool], list[str]] = {}
    for group in groups:
        alike.setdefault((names[group], shapes[group], shipped[group]), []).append(group)

    def words(group: str) -> str:
        """The study, what differs from others of the same content and shape, the content and shape, and the counts."""
        runs, folder = groups[group], Path(groups[group][0].path).parent
        counts = {"model": len({e.series for e in runs}), "seed": len({e.seed for e in runs})}
        same = [apart[other].split(", ") for other in alike[names[group], shapes[group], shipped[group]]]
        more = [part for part in apart[group].split(", ") if any(part not in others for others in same)]
        numbers = [f"{n} {what}{'s' * (n > 1)}" for what, n in counts.items()]
        content = (names[group], shapes[group])
        # the name of a study says what its data are
        of = (folder.name, *more, *content[::-1]) if is_study(folder) else (*more, *content)
        return ", ".join(filter(None, (*of, *numbers)))

    group = str(widgets.choose(
        "Experiment", "set", list(groups), default, show=words, width=EXPERIMENT_PX,
        clears=("a", "step", "b", "step_b", "by", "find", "models"), keeps=("metric",),
    ))  # fmt: skip
    title = groups[group][0].title
    more = [part for part in apart[group].split(", ") if part and part not in title]
    kinds = {"recorded": "Recordings have no checkpoints.", "log": "Training logs have no weights."}
    absent = kinds.get(groups[group][0].kind, "No checkpoint yet.")
    absent = "Shipped with the project: records, no weights." if shipped[group] else absent
    with st.sidebar:
        st.caption(widgets.escaped(", ".join([title, *more])))
        if not any(e.steps for e in groups[group]):
            st.caption(absent)
    return group


def _model(
    link: Link, key: str, step_key: str, words: str, runs: list[Entry], prefer: str, others: list[Entry], follow: str | None = None
) -> Link:  # fmt: skip
    """A model and its step: of the experiment, or one of `others`, which for A changes the experiment."""
    entries = {e.name: e for e in (*runs, *others)}
    default = next((e.name for e in runs if e.architecture == prefer), runs[0].name)

    def show(name: str) -> str:
        entry = entries[name]
        elsewhere = f"{run_name(entry)}, {CONTENT.get(entry.kind, entry.kind)}"
        return run_name(entry) if entry.group == runs[0].group else elsewhere

    def clears(name: str) -> Sequence[str]:
        return ("set", "by", "find", "models") if key == "a" and entries[name].group != runs[0].group else ()

    name = widgets.choose(words, key, list(entries), default, show=show, width=MODEL_PX, clears=clears)
    before, st.session_state[f"shown_{key}"] = st.session_state.get(f"shown_{key}"), name
    known = {e.name for e in cached_source().catalogue().entries}
    if before not in (None, name, *known) and key not in st.query_params:  # a default that the address never named
        message = f"{words}: {before} was removed; {name} is shown."
        st.toast(message, icon=":material/folder_off:", duration="infinite")
    steps = list(entries[name].steps)
    led = link.whole(follow) if follow else None
    default_step = led if led in steps else steps[-1]
    show_step = lambda step: str(step) if entries[name].at_step(step) else "unknown"  # noqa: E731
    step = widgets.choose(
        f"Step of {words[-1]}", step_key, steps, default_step, show=show_step, slider=True, width=STEP_PX
    )
    return link.but(**{key: name, step_key: step})


def choose_models(link: Link) -> Link:
    """Draw a panel that selects series of the experiment, by default the first few; return the link with them."""
    source = cached_source()
    options = facets(source.group(link))
    asked = [name for name in split_list(st.query_params.get("by", "")) if name in options]
    by = ",".join(asked) if "by" in st.query_params else None
    bare = link.but(by=by, find=st.query_params.get("find"), models=None)
    runs = source.found(bare)
    place = {name: i for i, name in enumerate(plots.ordered({e.architecture for e in runs}))}
    in_order = sorted(runs, key=lambda e: (place[e.architecture], e.series.partition(plots.DETAIL)[0], e.seed))
    names = list(dict.fromkeys(e.series for e in in_order))
    many = len({e.series for e in source.found(bare.but(find=None))}) > FIRST
    chosen = asked_series(names)
    # an open panel closes if its name changes, so that of many models has no count
    panel = st.popover(
        "Models" if many else f"{len(chosen)} of {len(names)} models", icon=":material/checklist:", key="runs_panel",
        on_change="rerun" if many else "ignore",
    )  # fmt: skip
    if panel.open or not many:
        with panel:
            hint = "words of name, model, option or seed: resformer s0"
            widgets.text_line("Find", "find", clears=("models",), placeholder=hint)
            if options:
                default = [name for name in options if name != "seed"]
                widgets.choose_many("Separate lines by", "by", options, default, clears=("models",))
            if many:
                by_series: dict[str, list[Entry]] = {name: [] for name in names}
                for entry in runs:
                    by_series[entry.series].append(entry)

                def seeds_of(series: Sequence[Entry]) -> str:
                    """`0 to 49`, or each seed if some between are missing."""
                    seeds = sorted({e.seed for e in series})
                    together = len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1))
                    return f"{seeds[0]} to {seeds[-1]}" if together else ", ".join(map(str, seeds))

                rows = [
                    {"model": _words(name), "runs": len(series), "seeds": seeds_of(series),
                     "trained to step": max(e.steps[-1] if e.steps else e.last for e in series),
                     "measures": max(len(e.measured) for e in series)}
                    for name, series in by_series.items()
                ]  # fmt: skip
                lines = f"{len(names)} line{'s' * (len(names) != 1)}"
                st.caption(f"{len(runs)} run{'s' * (len(runs) != 1)} in {lines}; the {len(chosen)} selected are drawn.")
                rows_table(
                    "runs_of_page", pd.DataFrame(rows), [names.index(n) for n in chosen],
                    lambda places: widgets.update_url(models=",".join(names[i] for i in places)), "Models to draw",
                )  # fmt: skip
            elif names:
                chosen = widgets.choose_many("Models", "models", names, names, show=_words)
    if not names:
        raise WorkbenchError(f"No run of this experiment matches “{st.query_params.get('find')}”.")
    if not chosen:
        raise WorkbenchError("Select at least one model.")
    if many and len(chosen) < len(names):
        st.caption(f"{len(chosen)} of {len(names)} models are drawn", width="content")
    return bare.but(models=",".join(chosen))


def asked_series(names: Sequence[str]) -> list[str]:
    """Return the series that the address names, else the first few; warn of others."""
    text = st.query_params.get("models")
    wanted = split_list(text or "")
    gone = [name for name in wanted if name not in names]
    if len(names) > FIRST and gone:
        widgets.warn_ignored("models", ", ".join(gone), names)
    there = [name for name in names if name in wanted]
    return there if there or text == "" else list(names[:FIRST])


def _words(series: str) -> str:
    return plain(plots.label(series))
