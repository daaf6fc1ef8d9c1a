"""Numbers for the views: the catalogue of runs, stored records, and answers of models, over a cache."""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

import pandas as pd

from workbench import prompts
from workbench.checkpoints.paths import WITHOUT
from workbench.claims.stored_verdicts import Verdicts, judge_all
from workbench.data.synthetic import SYMBOLS as ALPHABET
from workbench.errors import BadData, UnknownName, WorkbenchError, refuse_unknown
from workbench.file_io import read_bytes, read_json
from workbench.models.architecture_names_and_colours import architecture_label
from workbench.places import SHIPPED
from workbench.plots import DETAIL
from workbench.runs.catalogue import Catalogue, Entry, catalogue
from workbench.runs.run import Run, runs_folder
from workbench.runs.table_cache import RecordCache, TableCache, TelemetryCache
from workbench.storage.path_or_url import shipped
from workbench.views.page_links import Link

if TYPE_CHECKING:  # with it comes torch, which only pages that run a model import
    from workbench.models.hooked import HookedModel

P = ParamSpec("P")
R = TypeVar("R")
B = TypeVar("B")
Progress = Callable[..., None]
"""Called with (done, total), and what is done where parts are shown before the end; may raise to stop the work."""
PREFERRED = ("resformer", "transformer")
"""Default architectures of model A and model B."""
OF_PROMPTS = ("attention", "prompt", "intervene")
"""Pages that show models on a prompt."""
OF_ALL_RUNS = ("training", "heads")
"""Pages that show all models of the experiment unless two are compared."""
PROMPTS = ".prompts"
LETTERS = {"repeated": 2, "backcopy": 1}
"""Kinds of data whose tokens are letters and digits, and how often the model reads a prompt in a row."""
TEXT = "def mean(values):\n    return sum(values) / len(values)\n"
SYMBOLS = "Kq7fW2mZxR0bTn5LsYd8HcVjA3pGeUi9"
IDS = " ".join(map(str, 2 * [*range(1, 13)]))
"""Default prompts: text, as many letters as the demo's models learned to copy, ids for a model without a tokenizer."""
TOKENIZER, TOKENIZER_SETTINGS = "tokenizer.json", "tokenizer_config.json"
EVIDENCE, MODELS = SHIPPED / "evidence", SHIPPED / "models"
"""Shipped studies without weights, and shipped models."""


@dataclass(frozen=True)
class RunAtStep:
    """A run at a step."""

    entry: Entry
    step: int
    tag: str = ""  # A or B if two are compared
    alike: bool = False  # whether the other has the same architecture

    @property
    def title(self) -> str:
        """`A: ResFormer · s0, step 300`."""
        return f"{self.tag}: {self.name}" if self.tag else self.name

    @property
    def name(self) -> str:
        """`ResFormer · s0, step 300`."""
        return f"{run_name(self.entry)}{self.entry.at_step(self.step)}"

    @property
    def series(self) -> str:
        """The `architecture` of its rows in figures; begins with the registry name, which gives the colour."""
        tag = f"{self.tag}{'′' if self.alike and self.tag == 'B' else ''}: " if self.tag else ""
        own = self.entry.name if self.entry.imported else f"s{self.entry.seed}"
        return f"{self.entry.series.partition(DETAIL)[0]}{DETAIL}{tag}{own}{self.entry.at_step(self.step)}"


def run_name(entry: Entry) -> str:
    """`ResFormer · s0`; an imported run's own name."""
    return entry.name if entry.imported else f"{architecture_label(entry.series)}{DETAIL}s{entry.seed}"


Kind = Literal["result", "answer", "base", "model", "tokens"]
Place = tuple[str, int, int]
"""A checkpoint: its run's path, its step, and the stamp of its files."""


class SourceCache:
    """Cache of a source. The base class keeps tables, and the last two bases of `Source.derive`."""

    def __init__(self, records: RecordCache | None = None, telemetry: TelemetryCache | None = None) -> None:
        self.records, self.telemetry = records or RecordCache(), telemetry or TelemetryCache()
        self.bases: dict[Any, Any] = {}

    def catalogue(self, folder: Path) -> Catalogue:
        """Return the runs to show for a folder."""
        return runs_to_show(folder)

    def get(self, kind: Kind, key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """Return the value under a key of plain values, computed if it is not there; shared, so never written to."""
        if kind != "base":
            return compute()
        if key not in self.bases:
            self.bases = dict(list(self.bases.items())[-1:]) | {key: compute()}  # one figure asks for A's and B's
        return self.bases[key]

    def reading(self, tables: TableCache, entries: Sequence[Entry]) -> AbstractContextManager[Any]:
        """Announce that the tables of many runs are being read."""
        return contextlib.nullcontext()

    def judge(self, folder: Path, entries: Sequence[Entry], progress: Progress | None) -> Verdicts:
        """Return the verdict of every claim on finished runs of a folder."""
        return judge_all(entries, progress, record_cache=self.records, telemetry_cache=self.telemetry)


@dataclass
class Source:
    """Numbers for the views: catalogue, stored records, and answers of models.

    Args:
        folder: Folder of runs.
        problems: Filled with why a run was left out, by run.
        progress: Reports work that has parts.
        cache: Where answers are kept.
    """

    folder: Path = field(default_factory=runs_folder)
    problems: dict[str, str] = field(default_factory=dict)
    progress: Progress | None = None
    cache: SourceCache = field(default_factory=SourceCache, repr=False)

    def catalogue(self) -> Catalogue:
        """Return the runs that pages can show; see `runs_to_show`."""
        return self.cache.catalogue(self.folder)

    def listed(self) -> tuple[Entry, ...]:
        """Return the runs of the folder without shipped ones; the shipped runs if it has none."""
        entries = self.catalogue().entries
        return tuple(e for e in entries if not e.shipped) or entries

    def shipped(self) -> Catalogue:
        """Return the runs that ship with the project."""
        return shipped_runs(EVIDENCE, MODELS)

    def own(self) -> bool:
        """Return True if the folder itself has runs."""
        runs = self.catalogue()
        return bool(runs.entries) and runs.folder == str(self.folder.resolve())

    def group(self, link: Link) -> list[Entry]:
        """Return the runs of the link's experiment, else of model A's, else of the experiment that the page opens on.

        Pages of a model open on a text model with weights, ResFormer first; pages of all runs on the largest experiment of the folder.
        """
        runs = self.catalogue()
        groups, asked = runs.groups, link.text("set")
        if asked is None and link.text("a") is not None:
            asked = runs.entry(str(link.text("a"))).group
        if asked is None:

            def rank(name: str) -> tuple[object, ...]:
                runs, text = groups[name], groups[name][0].kind == "text"
                ready = {e.architecture for e in runs if e.steps}
                model = () if link.page in OF_ALL_RUNS else (text and bool(ready), text and PREFERRED[0] in ready)
                return *model, not runs[0].shipped, bool(ready), text, len(runs), name

            asked = max(groups, key=rank, default=None)
        if asked is None:
            raise BadData(
                f"no runs in {self.folder}: `workbench demo` trains some, `workbench import` imports your own"
            )
        refuse_unknown("experiment", asked, groups)
        return groups[asked]

    def found(self, link: Link) -> list[Entry]:
        """Return the runs of the experiment that match the link's search words, with series split by its `by`."""
        runs, by = self.group(link), link.many("by")
        if by is not None:
            for name in by:
                if name not in (known := facets(runs)):
                    raise UnknownName("option to tell models apart by", name, known)
            runs = [replace(e, series=series_by(e, by)) for e in runs]
        texts = {}
        for e in runs:
            options = " ".join(f"{k}={v}" for k, v in e.options.items())
            texts[e.path] = f"{e.name} {architecture_label(e.architecture)} {e.series} s{e.seed} {options}".lower()
        kept = set(texts)
        for word in (link.text("find") or "").lower().split():  # as `s3` in `text-resformer-s3`; else inside one
            with_word = {path for path, text in texts.items() if word in WORD_ENDS.split(text)}
            kept &= with_word or {path for path, text in texts.items() if word in text}
        return [e for e in runs if e.path in kept]

    def chosen(self, link: Link) -> list[Entry]:
        """Return the matching runs of the series in the link's `models`, of all series without it."""
        runs, names = self.found(link), link.many("models")
        if not runs:
            raise WorkbenchError(f"no run of this experiment matches {str(link.text('find'))!r}")
        if names is None:
            return runs
        for name in names:
            if name not in {e.series for e in runs}:
                raise UnknownName("model", name, {e.series for e in runs})
        return [e for e in runs if e.series in names]

    def subjects(self, link: Link) -> list[RunAtStep]:
        """Return model A, and B if the link compares; raises `WorkbenchError` without a checkpoint."""
        a = self._run(link, "a", PREFERRED[0])
        step = self._step(a, link.whole("step"))
        if not link.on("compare"):
            return [RunAtStep(a, step)]
        b = self._run(link, "b", PREFERRED[1])
        asked = link.whole("step_b")
        if asked is None:  # B follows A's step if it has that checkpoint
            asked = step if step in b.steps else None
        alike = a.architecture == b.architecture
        return [RunAtStep(a, step, "A", alike), RunAtStep(b, self._step(b, asked), "B", alike)]

    def pairs(self, link: Link) -> list[tuple[RunAtStep, RunAtStep]]:
        """Return A and B of a comparison, then their models under every further common seed (none if A and B differ in seed)."""
        a, b = self.subjects(link)
        keys = [(s.entry.group, s.entry.series) for s in (a, b)]
        if a.entry.seed != b.entry.seed:
            return [(a, b)]
        one, other = ({e.seed: e for e in self.catalogue().entries if (e.group, e.series) == key} for key in keys)
        shared = sorted(one.keys() & other.keys() - {a.entry.seed})
        return [(a, b), *((replace(a, entry=one[n]), replace(b, entry=other[n])) for n in shared)]

    def _run(self, link: Link, key: str, architecture: str) -> Entry:
        asked = link.text(key)
        if asked is not None:
            return self.catalogue().entry(asked)
        group = self.group(link)
        ready = [e for e in group if e.steps]
        if not ready and all(e.shipped for e in group):
            raise BadData(f"these runs are shipped {WITHOUT}; see Training, Depth and the verdicts on Start")
        if not ready and (kind := group[0].numbers_only):
            raise BadData(f"{kind} has no checkpoints; see Training, or import checkpoints with `workbench import`")
        if not ready:
            raise BadData("no checkpoint yet; the first appears within seconds of a training's start")
        return next((e for e in ready if e.architecture == architecture), ready[0])

    def _step(self, entry: Entry, asked: int | None) -> int:
        if not entry.steps:
            raise BadData(f"{entry.name} has no complete checkpoint yet")
        if asked is None:
            return entry.steps[-1]
        if asked not in entry.steps:
            raise WorkbenchError(f"{entry.name} has no checkpoint at step {asked}; choose from {list(entry.steps)}")
        return asked

    def records(self, entries: Iterable[Entry], metrics: Sequence[str] | None = None) -> pd.DataFrame:
        """Return stored records of runs, with the series as `architecture`. Shared between callers: never write to it.

        Runs with damaged files are left out and named in `problems`.
        """
        return self._rows(self.cache.records, list(entries), metrics)

    def telemetry(self, entries: Iterable[Entry], metrics: Sequence[str] | None = None) -> pd.DataFrame:
        """Return what training logged, in the same form as `records`."""
        return self._rows(self.cache.telemetry, list(entries), metrics)

    def _rows(self, tables: TableCache, entries: Sequence[Entry], metrics: Sequence[str] | None) -> pd.DataFrame:
        with self.cache.reading(tables, entries):
            frame, problems = tables.rows(entries, metrics)
        self.problems.update(problems)
        return frame

    def quantities(self, entries: Iterable[Entry]) -> set[str]:
        """Return the names of all quantities that training logged for these runs."""
        runs = list(entries)
        with self.cache.reading(self.cache.telemetry, runs):
            return self.cache.telemetry.metrics(runs)

    def keep(self, key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """Return a computed result, cached under a key of plain values."""
        return self.cache.get("result", key, compute)

    def judge(self, entries: Sequence[Entry]) -> Verdicts:
        """Return the verdict of every claim from the stored records of runs."""
        return self.cache.judge(Path(self.catalogue().folder), entries, self.progress)

    def model(self, subject: RunAtStep) -> HookedModel:
        """Return a subject's model."""

        def read() -> HookedModel:
            try:
                return Run.open(subject.entry.path).load(subject.step)
            except WorkbenchError:
                raise
            except Exception as error:
                message = f"{subject.entry.name} cannot be opened at step {subject.step}: {type(error).__name__}"
                raise WorkbenchError(message) from error

        return self.cache.get("model", checkpoint_key(subject), read)

    def query(
        self, function: Callable[Concatenate[HookedModel, prompts.Prompt, P], R], subject: RunAtStep, text: str | None, /,
        *args: P.args, **kwargs: P.kwargs,
    ) -> R:  # fmt: skip
        """Call a function of `workbench.prompts` with a subject's model and a prompt.

        Args:
            text: The prompt. None stands for the fixed sequence of a model of repeated tokens.
            args: Plain values; `progress` may be among `kwargs`.

        Raises:
            WorkbenchError: The checkpoint cannot be opened, the prompt cannot be read, or the function refuses.
        """
        options: Mapping[str, Any] = kwargs
        plain = {key: value for key, value in options.items() if not callable(value)}
        key = (_name(function), checkpoint_key(subject), text, args, plain)
        return self.cache.get("answer", key, lambda: self._ask(function, subject, text, *args, **kwargs))

    def derive(
        self, function: Callable[Concatenate[B, P], R], base: Callable[[HookedModel, prompts.Prompt], B],
        subject: RunAtStep, text: str | None, /, *args: P.args, **kwargs: P.kwargs,
    ) -> R:  # fmt: skip
        """Call a function with the activations that `base` reads; the model runs once for many answers."""
        read = (_name(base), checkpoint_key(subject), text)

        def compute() -> R:
            return function(self.cache.get("base", read, lambda: self._ask(base, subject, text)), *args, **kwargs)

        return self.cache.get("answer", (_name(function), read, args, kwargs), compute)

    def _ask(self, function: Callable[..., R], subject: RunAtStep, text: str | None, *args: Any, **kwargs: Any) -> R:
        model = self.model(subject)
        prompt = prompts.tokenise(model, text, letters=LETTERS.get(subject.entry.kind, 0))
        with model.lock:
            return function(model, prompt, *args, **kwargs)

    def tokens(self, subject: RunAtStep, text: str | None) -> list[str]:
        """Return the tokens of a prompt as text."""
        letters = LETTERS.get(subject.entry.kind, 0)
        return self.cache.get(
            "tokens", (checkpoint_key(subject), text),
            lambda: prompts.tokenise(self.model(subject), text, letters=letters).tokens,
        )  # fmt: skip

    def prompt(self, link: Link) -> str:
        """Return the link's prompt, the stored prompt that it names by its hash, or the default for model A's data."""
        if (name := link.text("stored")) is not None:
            path = self.folder / PROMPTS / f"{name}.txt"
            if not re.fullmatch(r"[0-9a-f]{16}", name) or not path.is_file():
                raise BadData("the prompt that the link names is not stored in this folder of runs")
            return path.read_text(encoding="utf-8", errors="replace")
        text = link.text("prompt")
        return example(self.subjects(link)[0].entry) if text is None else text


def source_of(link: Link, folder: Path) -> Source:
    """Return the source of a folder of runs, or of the shipped runs if only they have the link's model A."""
    source, name = Source(folder), link.text("a")
    if name is None or name in {e.name for e in source.catalogue().entries}:
        return source
    place = Path(shipped(name))
    return source if place == Path(name) else Source(place.parent)


def facets(runs: Sequence[Entry]) -> list[str]:
    """Return the options in which runs of one architecture differ, and `seed` if there are several."""
    by_architecture: dict[str, list[Entry]] = {}
    for entry in runs:
        by_architecture.setdefault(entry.architecture, []).append(entry)
    each = [[e.options for e in alike] for alike in by_architecture.values()]
    names = {k for alike in each for own in alike for k in own if any(other.get(k) != own[k] for other in alike)}
    return [*sorted(names), *(["seed"] if len({e.seed for e in runs}) > 1 else [])]


def series_by(entry: Entry, by: Sequence[str]) -> str:
    """Return a run's series, split by these options (and `seed`)."""
    options = "".join(f" {k}={entry.options[k]}" for k in sorted(by) if k in entry.options)
    return entry.architecture + options + (f"{DETAIL}s{entry.seed}" if "seed" in by else "")


WORD_ENDS = re.compile(r"[^\w.=+]+|_")


def runs_to_show(folder: Path, known: Catalogue | None = None) -> Catalogue:
    """Return the runs of a folder and, after them, the shipped studies; the shipped runs alone if it has none.

    Shipped models are left out if the folder has a text model, and shipped runs of an experiment that the folder has: their seeds
    would count twice. Unchanged runs are taken from `known`, which is returned itself if nothing changed.
    """
    shipped = shipped_runs(EVIDENCE, MODELS)
    before = known
    if known and known.folder != shipped.folder:
        before = replace(known, entries=tuple(e for e in known.entries if e.path not in shipped.by_path))
    own = catalogue(folder, before)
    if not own.entries:
        return shipped if shipped.entries and not own.problems else own
    names, with_text = {e.name for e in own.entries}, any(e.steps and e.kind == "text" for e in own.entries)
    of_others = not folder.resolve().is_relative_to(SHIPPED.resolve())  # a shipped folder shows no further studies
    more = (e for e in shipped.entries if e.name not in names and e.group not in own.groups and (of_others or e.steps))
    entries = own.entries + tuple(e for e in more if not (with_text and e.steps))
    if known and len(entries) == len(known.entries) and all(map(operator.is_, entries, known.entries)):
        known.turn, known.problems, known.others = own.turn, own.problems, own.others
        return known
    return replace(own, entries=entries)


@cache
def shipped_runs(*folders: Path) -> Catalogue:
    """Return the runs that ship with the project, studies and models."""
    evidence, models = map(catalogue, folders)
    return replace(evidence, entries=evidence.entries + models.entries, problems=evidence.problems | models.problems)


def example(entry: Entry) -> str:
    """Return the default prompt of a run: text, symbols of its task, or token ids."""
    if entry.kind in LETTERS:
        return _symbols(entry.path, entry.kind)
    if (Path(entry.path) / TOKENIZER).exists():
        return TEXT
    return " ".join(IDS.split()[: entry.n_ctx])


@cache
def _symbols(path: str, kind: str) -> str:
    """Symbols of a run's vocabulary; for the back-copy task a held-out sequence."""
    run = Run.open(path)
    if kind == "backcopy":
        (ids,) = run.data.sample(1, run.train.T).ids.tolist()
        return "".join(ALPHABET[i] for i in ids if i < len(ALPHABET))  # others cannot be typed
    known = ALPHABET[: int(run.info["data"]["vocabulary"])]
    return "".join(letter for letter in SYMBOLS if letter in known)


def import_model(path: str, folder: Path, progress: Progress) -> Run:
    """Import a checkpoint, a folder or a cached Hub name as a run of a folder; raises `WorkbenchError` if it cannot be read."""
    from workbench.runs.checkpoint_import import import_run

    return import_run(path, folder, progress=lambda done, total, _: progress(done, total))


def measure_metrics(
    paths: Sequence[Path], plan: Sequence[tuple[int, str]], text: str | None, documents: int, progress: Progress
) -> None:
    """Measure (step, metric) of runs and store the records, on a text or on the runs' own data.

    A run without one of the steps is measured at the others. `progress` may raise between two measures to stop.
    """
    from workbench.measurement.measuring import measure

    work = [(run, step, metric) for run in map(Run.open, paths) for step, metric in plan if step in run.steps]
    for i, (run, step, metric) in enumerate(work):
        progress(i, len(work))
        measure(run, metric, text, steps=[step], n=documents)
    progress(len(work), len(work))


def prompt_notes(entry: Entry, text: str) -> list[str]:
    """Describe how a prompt differs from the typed text and from the training sequences."""
    notes = []
    if entry.kind in LETTERS and any(c.isspace() for c in text.strip()):
        notes.append("This model has no space among its symbols: spaces and line ends are left out.")
    starts = entry.kind == "backcopy" and Run.open(entry.path).info["data"].get("bos") == "first"
    if starts and not text.lstrip().startswith(ALPHABET[0]):
        notes.append(
            f"Every training sequence begins with the start symbol {ALPHABET[0]}; this prompt does not, so sinks differ."
        )
    settings = Path(entry.path) / TOKENIZER_SETTINGS
    start = read_json(settings).get("bos_token") if entry.imported and settings.exists() else None
    if start and Run.open(entry.path).start_token is None:
        notes.append(
            f"The tokenizer of this model names a start token, {start['content'] if isinstance(start, dict) else start}, and texts are "
            "read without it. If training put it before every sequence, attention to the first token is different here; in Python: "
            "`model.to_tokens(text, prepend_bos=True)`."
        )
    return notes


def read_alike(a: Entry, b: Entry) -> bool:
    """Return True if ids mean the same tokens for two runs: equal tokenizers, or the same kind of data without one."""
    one, other = (read_bytes(path) if (path := Path(e.path) / TOKENIZER).exists() else None for e in (a, b))
    return one == other and (one is not None or a.kind == b.kind)


def checkpoint_key(subject: RunAtStep) -> Place:
    """Return which checkpoint a subject is; the stamp changes if any file of the checkpoint or its run is replaced."""
    run = Path(subject.entry.path)
    stamps = []
    for file in sorted([*(run / f"step_{subject.step:06d}").glob("*"), *run.glob("*.json")]):
        with contextlib.suppress(OSError):  # removed a moment ago
            state = file.stat()
            stamps.append((file.name, state.st_ino, state.st_size, state.st_mtime_ns))
    return subject.entry.path, subject.step, hash(tuple(stamps))


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
