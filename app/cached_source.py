"""The dashboard's source of numbers: `workbench.views.Source` with a cache on the server, keyed by plain values.

At most two models are in memory. Answers about models are cached, so nothing is computed twice.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from workbench.claims.stored_verdicts import Verdicts, judge_apart
from workbench.runs.catalogue import Catalogue, Entry
from workbench.runs.run import runs_folder
from workbench.runs.table_cache import RecordCache, TableCache, TelemetryCache
from workbench.views import Source
from workbench.views.source import Kind, Progress, SourceCache, runs_to_show

MAX_MODELS, MANY = 2, 20  # models in memory; runs whose reading takes long enough to be announced


def root() -> Path:
    """The folder of runs: `--runs DIR` after `--`, else the environment's, else ./runs."""
    return runs_folder(_runs_option(tuple(sys.argv[1:])))


@functools.cache  # a page asks a dozen times
def _runs_option(arguments: tuple[str, ...]) -> str | None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--runs")
    runs: str | None = parser.parse_known_args(arguments)[0].runs
    return runs


def cached_source() -> Source:
    """The source of this server's folder: a new one for each run of a page, over one shared cache."""
    return Source(root(), cache=_cache())


@st.cache_resource(show_spinner=False)
def _cache() -> ServerCache:
    return ServerCache(RecordCache(root()), TelemetryCache(root()))


class ServerCache(SourceCache):
    """Cache of every answer, shared by all visitors."""

    def __init__(self, records: RecordCache, telemetry: TelemetryCache) -> None:
        super().__init__(records, telemetry)
        self.catalogues: dict[Path, Catalogue] = {}

    def catalogue(self, folder: Path) -> Catalogue:
        """The runs of a folder, read once each time a page (or a live part of it) runs; only changes are read."""
        context = get_script_run_ctx(suppress_warning=True)
        run = None if context is None else context.cursors  # a new object for each run of the script
        seen = st.session_state.get("catalogue") if context else None
        if seen is None or seen[0] is not run or seen[1] != folder:
            self.catalogues[folder] = runs_to_show(folder, self.catalogues.get(folder))
            if context:
                st.session_state["catalogue"] = run, folder
        return self.catalogues[folder]

    def get(self, kind: Kind, key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        return KEPT[kind](repr(key), compute)

    def reading(self, tables: TableCache, entries: Sequence[Entry]) -> AbstractContextManager[Any]:
        many = tables.unread(entries)
        return st.spinner(f"Reading the {tables.kind} of {many} runs") if many > MANY else contextlib.nullcontext()

    def judge(self, folder: Path, entries: Sequence[Entry], progress: Progress | None) -> Verdicts:
        return judge_apart(folder, entries, progress)


def free_model(model: Any) -> None:
    """Free a model once its last user is done, without delaying those who use others."""

    def free() -> None:
        if hasattr(model, "lock"):
            with model.lock:
                model.reset_hooks()
                model.to("cpu")
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()  # back to the device, not only to the allocator

    threading.Thread(target=free, daemon=True, name="release a model").start()


Compute = Callable[[], Any]


@st.cache_resource(max_entries=128, show_spinner=False)
def _result(key: str, _compute: Compute) -> Any:
    return _compute()


@st.cache_resource(max_entries=MAX_MODELS, on_release=free_model, show_spinner=False)
def _model(key: str, _compute: Compute) -> Any:
    return _compute()


@st.cache_resource(max_entries=4, show_spinner=False)
def _base(key: str, _compute: Compute) -> Any:
    return _compute()


@st.cache_data(max_entries=512, max_size="600MB", show_spinner=False)
def _answer(key: str, _compute: Compute) -> Any:
    return _compute()


@st.cache_data(max_entries=256, show_spinner=False)
def _tokens(key: str, _compute: Compute) -> Any:
    return _compute()


KEPT: dict[Kind, Callable[[str, Compute], Any]] = {
    "result": _result, "model": _model, "base": _base, "answer": _answer, "tokens": _tokens,
}  # fmt: skip
