"""Where a view's numbers come from: the catalogue, stored records, and looks at models. The dashboard caches all three."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pandas as pd

from workbench.catalogue import Catalogue, Entry, catalogue
from workbench.errors import ArchitectureAssumed, BadData, UnknownName, WorkbenchError
from workbench.names import LABELS
from workbench.plots import DETAIL
from workbench.results import load_records, records
from workbench.runs import Run, runs_folder
from workbench.views.link import Link

PREFERRED = ("resformer", "transformer")
"""Model A and model B where the link does not say."""
PROMPTS = ".prompts"
LETTERS = ("repeated", "backcopy")
"""Kinds of data whose tokens are letters and digits; a prompt is read twice."""
TEXT = "def mean(values):\n    return sum(values) / len(values)\n"
SYMBOLS = "Kq7fW2mZxR0bTn5LsYd8HcVjA3pGeUi9"
IDS = " ".join(map(str, 2 * [*range(1, 13)]))
"""Prompts where the link has none: text, as many letters as the demo's models learned to copy, ids without a tokenizer."""
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Subject:
    """A run at a step."""

    entry: Entry
    step: int
    tag: str = ""  # A or B, where two are compared
    alike: bool = False  # whether the other one is of the same series

    @property
    def title(self) -> str:
        """As figures name it: `A: ResFormer · s0, step 300`."""
        return f"{self.tag}: {self.name}" if self.tag else self.name

    @property
    def name(self) -> str:
        """`ResFormer · s0, step 300`."""
        series = LABELS.get(self.entry.series, self.entry.series)
        return f"{series}{DETAIL}s{self.entry.seed}, step {self.step}"

    @property
    def series(self) -> str:
        """The `architecture` of its rows in figures: the registry name first, so that the colour is the architecture's."""
        tag = f"{self.tag}{'′' if self.alike and self.tag == 'B' else ''}: " if self.tag else ""
        return f"{self.entry.series}{DETAIL}{tag}s{self.entry.seed}, step {self.step}"


@dataclass
class Source:
    """Numbers for the views, straight from the files; `problems` collects what could not be read, by run."""

    folder: Path = field(default_factory=runs_folder)
    problems: dict[str, str] = field(default_factory=dict)
    progress: Callable[[int, int], None] | None = None
    """Told (done, total) by views whose work has parts; may raise to stop them."""
    held: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What the last two looks kept, for `from_kept`."""

    def catalogue(self) -> Catalogue:
        """The runs of the folder."""
        return catalogue(self.folder)

    # ---- the selection ----

    def group(self, link: Link) -> list[Entry]:
        """Runs of the chosen experiment: the link's, else that of model A, else the largest."""
        found = self.catalogue()
        groups: dict[str, list[Entry]] = {}
        for entry in found.entries:
            groups.setdefault(entry.group, []).append(entry)
        asked = link.text("set")
        if asked is None and link.text("a") is not None:
            asked = found.entry(str(link.text("a"))).group
        if asked is None:
            asked = max(groups, key=lambda g: (any(e.steps for e in groups[g]), len(groups[g]), g), default=None)
        if asked is None:
            raise BadData(
                f"no runs in {self.folder}: `workbench demo` trains some, `workbench import` takes in your own"
            )
        if asked not in groups:
            raise UnknownName("experiment", asked, groups)
        return groups[asked]

    def chosen(self, link: Link) -> list[Entry]:
        """Runs of the chosen series of the experiment: the link's `models`, else all of it."""
        runs, names = self.group(link), link.many("models")
        if names is None:
            return runs
        for name in names:
            if name not in {e.series for e in runs}:
                raise UnknownName("model", name, {e.series for e in runs})
        return [e for e in runs if e.series in names]

    def subjects(self, link: Link) -> list[Subject]:
        """Model A, and B where the link compares; raises `WorkbenchError` where there is no checkpoint to look at."""
        a = self._run(link, "a", PREFERRED[0])
        step = self._step(a, link.whole("step"))
        if not link.on("compare"):
            return [Subject(a, step)]
        b = self._run(link, "b", PREFERRED[1])
        wanted = link.whole("step_b")
        if wanted is None:  # B goes along with A where it can
            wanted = step if step in b.steps else None
        alike = a.series == b.series
        return [Subject(a, step, "A", alike), Subject(b, self._step(b, wanted), "B", alike)]

    def _run(self, link: Link, key: str, architecture: str) -> Entry:
        asked = link.text(key)
        if asked is not None:
            return self.catalogue().entry(asked)
        ready = [e for e in self.group(link) if e.steps]
        if not ready:
            raise BadData(_no_checkpoint(self.group(link)))
        return next((e for e in ready if e.architecture == architecture), ready[0])

    def _step(self, entry: Entry, asked: int | None) -> int:
        if not entry.steps:
            raise BadData(f"{entry.name} has no whole checkpoint yet")
        if asked is None:
            return entry.steps[-1]
        if asked not in entry.steps:
            raise WorkbenchError(f"{entry.name} has no checkpoint at step {asked}; choose from {list(entry.steps)}")
        return asked

    # ---- records ----

    def records(self, entries: Iterable[Entry], metrics: Sequence[str] | None = None) -> pd.DataFrame:
        """Stored records of runs, `architecture` being the series; runs whose files are damaged are in `problems`."""
        return self._tables(entries, "records", metrics)

    def telemetry(self, entries: Iterable[Entry], metrics: Sequence[str] | None = None) -> pd.DataFrame:
        """What training wrote down, `architecture` being the series; runs whose files are damaged are in `problems`."""
        return self._tables(entries, "telemetry", metrics)

    def written(self, entries: Iterable[Entry]) -> set[str]:
        """Names of everything that these runs wrote down in training."""
        return set(self.telemetry(entries)["metric"].dropna())

    def _tables(self, entries: Iterable[Entry], kind: str, metrics: Sequence[str] | None) -> pd.DataFrame:
        parts = []
        for entry in entries:
            found = self.table(entry, kind, None if metrics is None else tuple(metrics))
            if isinstance(found, str):
                self.problems[entry.name] = found
            elif len(found):
                parts.append(found)
        return pd.concat(parts, ignore_index=True) if parts else records([])

    def table(self, entry: Entry, kind: str, metrics: tuple[str, ...] | None) -> pd.DataFrame | str:
        """One run's telemetry or records, or what is wrong with them."""
        return read_table(entry.path, entry.series, kind, metrics)

    def of_subject(self, subject: Subject, metrics: Sequence[str] | None = None) -> pd.DataFrame:
        """Records of a run at one step, and at step 0 where it has that; named as the subject."""
        frame = self.records([subject.entry], metrics)
        return frame[frame["step"].isin([0, subject.step])].assign(architecture=subject.series)

    def keep(self, key: tuple[Any, ...], work: Callable[[], Any]) -> Any:
        """The result of some work; the dashboard keeps it under a key of plain values."""
        return work()

    # ---- looks at models ----

    def look(self, what: str, subject: Subject, text: str | None, /, **options: Any) -> Any:
        """The answer of `workbench.looks.<module>.<function>`, `what` being `module.function`, about a model and a prompt.

        `text`: the prompt (None for a repeated-token model: its own fixed sequence). `options` are plain values for the
        function; `other` is a second prompt. Raises `WorkbenchError` where the checkpoint cannot be opened or the prompt
        read, and whatever the function refuses. `means` names a site whose table of token means the function gets.
        """
        return call_look(what, self.model(subject), subject.entry.kind, text, **options)

    def from_kept(self, what: str, kept: str, subject: Subject, text: str | None, **options: Any) -> Any:
        """The answer of the look `what` on what the look `kept` keeps of a model and a prompt; no model is run for it.

        Pairs of whole numbers among the options are slices.
        """
        key = kept, subject.entry.path, subject.step, text
        if key not in self.held:  # of A and B; one figure asks for several pieces
            self.held = dict(list(self.held.items())[-1:]) | {key: self.look(kept, subject, text)}
        return call_kept(what, self.held[key], **options)

    def model(self, subject: Subject) -> Any:
        """The model of a subject."""
        return open_model(subject.entry.path, subject.step)

    def tokens(self, subject: Subject, text: str | None) -> list[str]:
        """The tokens of a prompt, as people read them."""
        return tokens_of(self.model(subject), subject.entry.kind, text)

    def prompt(self, link: Link) -> str:
        """The prompt of a link: its text, the stored one it names by its hash, or one that fits model A's data."""
        if (name := link.text("stored")) is not None:
            path = self.folder / PROMPTS / f"{name}.txt"
            if not re.fullmatch(r"[0-9a-f]{16}", name) or not path.is_file():
                raise BadData("the prompt that the link names is not stored in this folder of runs")
            return path.read_text(encoding="utf-8", errors="replace")
        text = link.text("prompt")
        if text is None:  # an empty one is refused by whoever reads it, as any that cannot be read
            text = example(self.subjects(link)[0].entry)
        return text


def example(entry: Entry) -> str:
    """What is read where a link has no prompt: what the run's model was trained on, or can read."""
    if entry.kind in LETTERS:
        return SYMBOLS
    if (Path(entry.path) / TOKENIZER).exists():
        return TEXT
    return " ".join(IDS.split()[: entry.n_ctx])


def read_alike(a: Entry, b: Entry) -> bool:
    """Whether an id is the same token to two runs: they have the same tokenizer, or none and the same kind of data."""
    mine, others = (path.read_bytes() if (path := Path(e.path) / TOKENIZER).exists() else None for e in (a, b))
    return mine == others and (mine is not None or a.kind == b.kind)


def _no_checkpoint(runs: Sequence[Entry]) -> str:
    if all(e.kind == "recorded" for e in runs):
        return "a recording holds no checkpoints: the Training page shows it; what `workbench import` takes in is here on every page"
    return "no checkpoint here yet; the first ones appear within seconds of a training's start"


def read_table(path: str, series: str, kind: str, metrics: tuple[str, ...] | None) -> pd.DataFrame | str:
    """A run's telemetry or records of some metrics (None: all), or what is wrong with them."""
    names = ", ".join("'" + name.replace("'", "''") + "'" for name in metrics or ())
    where = "" if metrics is None else f"metric in ({names})" if metrics else "false"
    try:
        run = Run.open(path)
        frame = run.telemetry(where) if kind == "telemetry" else load_records([run.path], where)
    except (WorkbenchError, OSError, ValueError, KeyError, TypeError) as error:
        return f"{kind}: {error}"
    return frame.assign(architecture=series, run=run.name)


def open_model(path: str, step: int) -> Any:
    """The model of a run at a step; raises `WorkbenchError` whatever is wrong with its files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ArchitectureAssumed)  # figures say so
        try:
            return Run.open(path).load(step)
        except WorkbenchError:
            raise
        except Exception as error:
            told = f"{Path(path).name} cannot be opened at step {step}: {type(error).__name__}"
            raise WorkbenchError(told) from error


def call_look(what: str, model: Any, kind: str, text: str | None, /, **options: Any) -> Any:
    """Call a function of `workbench.looks` on a model and the ids of a text, holding the model's lock."""
    from workbench.looks.prompt import tokenise

    module, _, name = what.partition(".")
    function = getattr(importlib.import_module(f"workbench.looks.{module}"), name)
    letters = kind in LETTERS
    for second in ("other", "corrupted"):
        if isinstance(options.get(second), str):
            options[second] = tokenise(model, options[second], letters=letters).ids
    if isinstance(options.get("means"), str):
        options["means"] = _means(model, options["means"])
    if letters and "letters" in inspect.signature(function).parameters:
        options["letters"] = True
    with model.lock:
        return function(model, tokenise(model, text, letters=letters).ids, **options)


_MEANS: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
MEANS_TOKENS = 32_768


def _means(model: Any, site: str) -> Any:
    """The table of means per token id of a site, from training documents of the model's run; kept as long as the model."""
    from workbench.interventions.values import token_means

    kept = _MEANS.setdefault(model, {})
    if site not in kept:
        run = Run.open(Path(model.source["path"]).parent)
        ids = run.data.batch(0, max(1, MEANS_TOKENS // run.train.T), run.train.T, 0)
        device = model.embed.weight.device
        kept[site] = token_means(model, site, [part.to(device) for part in ids.split(8)])
    return kept[site]


def call_kept(what: str, kept: Any, **options: Any) -> Any:
    """Call a function of `workbench.looks` on what another one kept; pairs of whole numbers are slices."""
    module, _, name = what.partition(".")
    function = getattr(importlib.import_module(f"workbench.looks.{module}"), name)
    return function(kept, **{k: slice(*v) if isinstance(v, tuple) else v for k, v in options.items()})


def tokens_of(model: Any, kind: str, text: str | None) -> list[str]:
    """The tokens of a prompt as people read them."""
    from workbench.looks.prompt import tokenise

    return list(tokenise(model, text, letters=kind in LETTERS).tokens)
