"""The dashboard's source of numbers: `workbench.views.Source` with everything cached, keyed by plain values.

Models: at most two, each used under its lock and released for good. Answers about models are kept on the server, so nothing is
computed twice; whatever takes long is a job with progress that can be cancelled (`app.jobs`).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from workbench.catalogue import Catalogue, Entry, catalogue
from workbench.runs import runs_folder
from workbench.views import Source, Subject
from workbench.views.growing import Growing
from workbench.views.held import Held
from workbench.views.source import call_kept, call_look, open_model, tokens_of

MOST_MODELS, MANY = 2, 20  # models held; runs whose reading takes long enough to be announced
HEAVY = ("attention.keep",)  # answers that are shared as they are, not copied


def root() -> Path:
    """The folder of runs: `--runs DIR` after `--`, else the environment's, else ./runs."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--runs")
    return runs_folder(parser.parse_known_args(sys.argv[1:])[0].runs)


def source() -> Source:
    """The source of this server's folder; a new one each time a page runs, over shared caches."""
    return Cached(root())


class Cached(Source):
    """A source whose every answer is kept."""

    def catalogue(self) -> Catalogue:
        """The runs of the folder, looked at once each time a page (or a part that is live) runs; only changes are read."""
        context, kept = get_script_run_ctx(suppress_warning=True), _catalogues()
        run = None if context is None else context.cursors  # another one for each run
        seen = st.session_state.get("catalogue") if context else None
        if seen is not None and seen[0] is run and seen[1] == self.folder:
            return kept[self.folder]
        kept[self.folder] = catalogue(self.folder, kept.get(self.folder))
        if context:
            st.session_state["catalogue"] = run, self.folder
        return kept[self.folder]

    def telemetry(self, entries: Iterable[Entry], metrics: Sequence[str] | None = None) -> pd.DataFrame:
        """What training wrote down; only parts that are new are read. Shared, so never written to."""
        runs = tuple(entries)
        with self._reading(runs):
            frame, problems = _written(runs, None if metrics is None else tuple(metrics), _told(runs))
        self.problems.update(problems)
        return frame

    def written(self, entries: Iterable[Entry]) -> set[str]:
        """Names of everything that these runs wrote down in training."""
        runs = tuple(entries)
        with self._reading(runs):
            return _growing().names(runs)

    def _reading(self, runs: Sequence[Entry]) -> AbstractContextManager[Any]:
        many = _growing().unread(runs)
        return st.spinner(f"Reading what {many} runs wrote down, once") if many > MANY else contextlib.nullcontext()

    def records(self, entries: Iterable[Entry], metrics: Sequence[str] | None = None) -> pd.DataFrame:
        """Stored records of runs; each run is read once as long as it does not change. Shared, so never written to."""
        runs, held = list(entries), _held()
        many = held.unread(runs)
        with st.spinner(f"Reading the records of {many} runs, once") if many > MANY else contextlib.nullcontext():
            frame, problems = held.rows(runs, metrics)
        self.problems.update(problems)
        return frame

    def keep(self, key: tuple[Any, ...], work: Callable[[], Any]) -> Any:
        """The result of some work, done once for each key; shared, so never written to."""
        return _once(key, work)

    def model(self, subject: Subject) -> Any:
        """The model of a subject."""
        return _model(subject.entry.path, subject.step, weights_stamp(subject))

    def look(self, what: str, subject: Subject, text: str | None, /, **options: Any) -> Any:
        """The answer of a look; `progress`, if given, is called while it is computed and is no part of the key."""
        progress = options.pop("progress", None)
        function = _kept if what in HEAVY else _look
        place = subject.entry.path, subject.step, weights_stamp(subject), subject.entry.kind
        return function(what, *place, text, tuple(sorted(options.items())), progress)

    def from_kept(self, what: str, kept: str, subject: Subject, text: str | None, **options: Any) -> Any:
        """The answer of a look on what another one kept."""
        place = subject.entry.path, subject.step, weights_stamp(subject), subject.entry.kind
        return _from_kept(what, kept, *place, text, tuple(sorted(options.items())))

    def tokens(self, subject: Subject, text: str | None) -> list[str]:
        """The tokens of a prompt, as people read them."""
        return _tokens(subject.entry.path, subject.step, weights_stamp(subject), subject.entry.kind, text)


@st.cache_resource(show_spinner=False)
def _catalogues() -> dict[Path, Catalogue]:
    return {}


def _told(runs: tuple[Entry, ...]) -> int:
    """Which runs these are, and as of when: one number, for a key of hundreds of texts takes long to compare."""
    return hash(tuple((e.path, e.series, e.stamp) for e in runs))


@st.cache_resource(show_spinner=False)
def _held() -> Held:
    return Held()


@st.cache_resource(show_spinner=False)
def _growing() -> Growing:
    return Growing()


@st.cache_resource(max_entries=128, show_spinner=False)
def _once(key: tuple[Any, ...], _work: Callable[[], Any]) -> Any:
    return _work()


@st.cache_resource(max_entries=12, show_spinner=False)
def _written(
    _runs: tuple[Entry, ...], metrics: tuple[str, ...] | None, told: int
) -> tuple[pd.DataFrame, dict[str, str]]:
    return _growing().rows(_runs, metrics)


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
    """Let a model go as soon as nobody uses it, without keeping those waiting who use others."""
    threading.Thread(target=_let_go, args=(model,), daemon=True, name="release a model").start()


def _let_go(model: Any) -> None:
    if hasattr(model, "lock"):
        with model.lock:
            model.reset_hooks()
            model.to("cpu")
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()  # what the model held goes back to the device, not only to the allocator


@st.cache_resource(max_entries=MOST_MODELS, on_release=_release, show_spinner=False)
def _model(path: str, step: int, stamp: int) -> Any:
    return open_model(path, step)


@st.cache_data(max_entries=256, max_size="400MB", show_spinner=False)
def _look(
    what: str, path: str, step: int, stamp: int, kind: str, text: str | None, options: tuple[Any, ...], _progress: Any
) -> Any:
    told = {} if _progress is None else {"progress": _progress}
    return call_look(what, _model(path, step, stamp), kind, text, **dict(options), **told)


@st.cache_resource(max_entries=4, show_spinner=False)
def _kept(
    what: str, path: str, step: int, stamp: int, kind: str, text: str | None, options: tuple[Any, ...], _progress: Any
) -> Any:
    return call_look(what, _model(path, step, stamp), kind, text, **dict(options))


@st.cache_data(max_entries=256, max_size="200MB", show_spinner=False)
def _from_kept(
    what: str, kept: str, path: str, step: int, stamp: int, kind: str, text: str | None, options: tuple[Any, ...]
) -> Any:
    return call_kept(what, _kept(kept, path, step, stamp, kind, text, (), None), **dict(options))


@st.cache_data(max_entries=256, show_spinner=False)
def _tokens(path: str, step: int, stamp: int, kind: str, text: str | None) -> list[str]:
    return tokens_of(_model(path, step, stamp), kind, text)
