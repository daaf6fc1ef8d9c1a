"""Which runs a page of many draws: search words, what tells their lines apart, and a table or pills of the models found."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from workbench import plots
from workbench.errors import WorkbenchError
from workbench.plots.style import plain
from workbench.runs.catalogue import Entry
from workbench.views import Link
from workbench.views.link import listed
from workbench.views.source import facets

from . import widgets
from .cached_source import cached_source
from .row_table import rows_table

FIRST = 8  # series drawn where none were chosen, and most that stand as pills
APART = "Lines are told apart by, beside the architecture"


def choose_models(link: Link) -> Link:
    """The chosen series of the experiment, the first few found unless told otherwise; the link with them, and how they were found."""
    source = cached_source()
    options = facets(source.group(link))
    asked = [name for name in listed(st.query_params.get("by", "")) if name in options]
    by = ",".join(asked) if "by" in st.query_params else None
    bare = link.but(by=by, find=st.query_params.get("find"), models=None)
    runs = source.found(bare)
    names = _in_order(runs)
    many = len({e.series for e in source.found(bare.but(find=None))}) > FIRST
    chosen = _asked(names)
    # an open panel closes where its name changes, so that of many models has no count
    panel = st.popover(
        "Models" if many else f"{len(chosen)} of {len(names)} models", icon=":material/checklist:", key="runs_panel",
        on_change="rerun" if many else "ignore",
    )  # fmt: skip
    if panel.open or not many:
        with panel:
            widgets.text_line(
                "Find", "find", clears=("models",), placeholder="words of name, model, option or seed: resformer s0"
            )
            if options:
                default = [name for name in options if name != "seed"]
                widgets.choose_many(APART, "by", options, default, clears=("models",))
            if many:
                _table(names, runs, chosen)
            elif names:
                chosen = widgets.choose_many("Models", "models", names, names, show=_words)
    if not names:
        raise WorkbenchError(f"No run of this experiment has all of the words “{st.query_params.get('find')}”.")
    if not chosen:
        raise WorkbenchError("Choose at least one model.")
    return bare.but(models=",".join(chosen))


def _in_order(runs: Sequence[Entry]) -> list[str]:
    """The series of runs: by architecture in the order of the registry, then options, then seed."""
    place = {name: i for i, name in enumerate(plots.ordered({e.architecture for e in runs}))}
    by_place = sorted(runs, key=lambda e: (place[e.architecture], e.series.partition(plots.DETAIL)[0], e.seed))
    return list(dict.fromkeys(e.series for e in by_place))


def _asked(names: Sequence[str]) -> list[str]:
    """The series that the address names, as far as they are there."""
    text = st.query_params.get("models")
    there = [name for name in names if name in listed(text or "")]
    gone = [name for name in listed(text or "") if name not in names]
    if len(names) > FIRST and gone:
        widgets.warn_ignored("models", ", ".join(gone), names)
    return there if there or text == "" else list(names[:FIRST])


def _table(names: Sequence[str], runs: Sequence[Entry], chosen: Sequence[str]) -> None:
    """A row for each series, those that are drawn selected."""
    kin: dict[str, list[Entry]] = {name: [] for name in names}
    for entry in runs:
        kin[entry.series].append(entry)
    rows = [
        {"model": _words(name), "runs": len(mine), "seeds": _seeds(mine),
         "trained to step": max(e.steps[-1] if e.steps else e.last for e in mine), "measures": max(len(e.measured) for e in mine)}
        for name, mine in kin.items()
    ]  # fmt: skip

    def take(places: list[int]) -> None:
        widgets.update_url(models=",".join(names[i] for i in places))

    st.caption(f"{len(runs)} runs in {len(names)} line{'s' * (len(names) != 1)}; the {len(chosen)} selected are drawn.")
    rows_table("runs_of_page", pd.DataFrame(rows), [names.index(n) for n in chosen], take, "Models to draw")


def _seeds(runs: Sequence[Entry]) -> str:
    """The seeds of runs, as `0 to 49`, or each by itself where some between are not there."""
    seeds = sorted({e.seed for e in runs})
    whole = len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1))
    return f"{seeds[0]} to {seeds[-1]}" if whole else ", ".join(map(str, seeds))


def _words(series: str) -> str:
    return plain(plots.label(series))
