"""The dashboard's source of numbers: `workbench.views.Source` with everything cached, keyed by plain values.

Models: at most two, each used under its lock and released for good. Answers about models are kept on the server, so nothing is
computed twice; whatever takes long is a job with progress that can be cancelled (`app.background`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate

import pandas as pd
import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from workbench import prompts
from workbench.claims.all_verdicts import Verdicts
from workbench.claims.apart import judge_apart
from workbench.runs.catalogue import Catalogue, Entry
from workbench.runs.run import runs_folder
from workbench.runs.table_cache import RecordCache, TableCache, TelemetryCache
from workbench.views import Source, Subject
from workbench.views.source import B, P, R, answer, open_model, runs_to_show, tokens_of

if TYPE_CHECKING:  # with it comes torch
    from workbench.models.hooked import HookedModel

MAX_MODELS, MANY = 2, 20  # models in memory; runs whose reading takes long enough to be announced


def root() -> Path:
    """The folder of runs: `--runs DIR` after `--`, else the environment's, else ./runs."""
    return runs_folder(_asked(*sys.argv[1:]))


@functools.cache
def _asked(*arguments: str) -> str | None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--runs")
    found: str | None = parser.parse_known_args(arguments)[0].runs
    return found


def cached_source() -> Source:
    """The source of this server's folder; a new one each time a page runs, over shared caches."""
    records, telemetry = _tables()
    return CachedSource(root(), record_cache=records, telemetry_cache=telemetry)


class CachedSource(Source):
    """A source whose every answer is kept."""

    def catalogue(self) -> Catalogue:
        """The runs of the folder, looked at once each time a page (or a part that is live) runs; only changes are read."""
        context, kept = get_script_run_ctx(suppress_warning=True), _catalogues()
        run = None if context is None else context.cursors  # a new object for each run of the script
        seen = st.session_state.get("catalogue") if context else None
        if seen is not None and seen[0] is run and seen[1] == self.folder:
            return kept[self.folder]
        kept[self.folder] = runs_to_show(self.folder, kept.get(self.folder))
        if context:
            st.session_state["catalogue"] = run, self.folder
        return kept[self.folder]

    def _rows(self, cache: TableCache, entries: Sequence[Entry], metrics: Sequence[str] | None) -> pd.DataFrame:
        with _reading(cache, entries):
            return super()._rows(cache, entries, metrics)

    def quantities(self, entries: Iterable[Entry]) -> set[str]:
        runs = list(entries)
        with _reading(self.telemetry_cache, runs):
            return super().quantities(runs)

    def keep(self, key: tuple[Any, ...], work: Callable[[], Any]) -> Any:
        """The result of some work, done once for each key; shared, so never written to."""
        return _once(hash(key), work)  # keys name every run: Streamlit takes a hundred times as long to read them

    def judge(self, entries: Sequence[Entry]) -> Verdicts:
        return judge_apart(Path(self.catalogue().folder), entries, self.progress)

    def model(self, subject: Subject) -> HookedModel:
        return _model(*_place(subject))

    def query(
        self, function: Callable[Concatenate[HookedModel, prompts.Prompt, P], R], subject: Subject, text: str | None, /,
        *args: P.args, **kwargs: P.kwargs,
    ) -> R:  # fmt: skip
        """The answer of a function of `workbench.prompts`, computed once for its arguments; callables are no part of these."""
        options: Mapping[str, Any] = kwargs
        calls = tuple((key, value) for key, value in options.items() if callable(value))
        plain = tuple(sorted((key, value) for key, value in options.items() if not callable(value)))
        return _answer(_name(function), _place(subject), subject.entry.kind, text, args, plain, function, calls)

    def derive(
        self, function: Callable[Concatenate[B, P], R], base: Callable[[HookedModel, prompts.Prompt], B],
        subject: Subject, text: str | None, /, *args: P.args, **kwargs: P.kwargs,
    ) -> R:  # fmt: skip
        """The answer of a function about what `base` reads of a model and a prompt, which is shared."""
        names, kind = (_name(function), _name(base)), subject.entry.kind
        return _derived(names, _place(subject), kind, text, args, tuple(sorted(kwargs.items())), function, base)

    def tokens(self, subject: Subject, text: str | None) -> list[str]:
        return _tokens(_place(subject), subject.entry.kind, text)


Place = tuple[str, int, int]
"""Which model: the path of its run, its step, and the stamp of its files."""


def _place(subject: Subject) -> Place:
    return subject.entry.path, subject.step, weights_stamp(subject)


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _reading(cache: TableCache, runs: Sequence[Entry]) -> AbstractContextManager[Any]:
    many = cache.unread(runs)
    return st.spinner(f"Reading the {cache.kind} of {many} runs, once") if many > MANY else contextlib.nullcontext()


@st.cache_resource(show_spinner=False)
def _tables() -> tuple[RecordCache, TelemetryCache]:
    return RecordCache(root()), TelemetryCache(root())


@st.cache_resource(show_spinner=False)
def _catalogues() -> dict[Path, Catalogue]:
    return {}


@st.cache_resource(max_entries=128, show_spinner=False)
def _once(key: int, _work: Callable[[], Any]) -> Any:
    return _work()


def weights_stamp(subject: Subject) -> int:
    """What the files of a checkpoint and of its run are now, as one number: another one once any of them is replaced."""
    run = Path(subject.entry.path)
    files = [*(run / f"step_{subject.step:06d}").glob("*"), *run.glob("*.json")]
    return hash(tuple((p.name, *_told_of(p)) for p in sorted(files)))


def _told_of(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:  # taken away at this moment
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _release(model: Any) -> None:
    """Free a model as soon as its last user is done, without keeping waiting those who use others."""
    threading.Thread(target=_free, args=(model,), daemon=True, name="release a model").start()


def _free(model: Any) -> None:
    if hasattr(model, "lock"):
        with model.lock:
            model.reset_hooks()
            model.to("cpu")
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()  # what the model held goes back to the device, not only to the allocator


@st.cache_resource(max_entries=MAX_MODELS, on_release=_release, show_spinner=False)
def _model(path: str, step: int, stamp: int) -> HookedModel:
    return open_model(path, step)


Options = tuple[tuple[str, Any], ...]


@st.cache_data(max_entries=256, max_size="400MB", show_spinner=False)
def _answer(
    name: str, place: Place, kind: str, text: str | None, args: Any, options: Options, _function: Any, _calls: Options
) -> Any:
    return answer(_function, _model(*place), kind, text, *args, **dict(options), **dict(_calls))


@st.cache_resource(max_entries=4, show_spinner=False)
def _base(name: str, place: Place, kind: str, text: str | None, _function: Any) -> Any:
    return answer(_function, _model(*place), kind, text)


@st.cache_data(max_entries=256, max_size="200MB", show_spinner=False)
def _derived(
    names: tuple[str, str], place: Place, kind: str, text: str | None, args: Any, options: Options, _function: Any,
    _of: Any,
) -> Any:  # fmt: skip
    return _function(_base(names[1], place, kind, text, _of), *args, **dict(options))


@st.cache_data(max_entries=256, show_spinner=False)
def _tokens(place: Place, kind: str, text: str | None) -> list[str]:
    return tokens_of(_model(*place), kind, text)
