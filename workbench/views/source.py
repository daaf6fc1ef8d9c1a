"""Where a view's numbers come from: the catalogue, stored records, and questions to models. The dashboard caches all three."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import pandas as pd

from workbench import prompts
from workbench.checkpoints.identify import WITHOUT
from workbench.claims.all_verdicts import Verdicts, judge_all
from workbench.data.tasks import SYMBOLS as ALPHABET
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.files import read_bytes
from workbench.models.registry import label
from workbench.places import SHIPPED
from workbench.plots import DETAIL
from workbench.runs.catalogue import Catalogue, Entry, catalogue
from workbench.runs.run import Run, runs_folder
from workbench.runs.table_cache import RecordCache, TableCache, TelemetryCache
from workbench.storage.locations import shipped
from workbench.views.link import Link

if TYPE_CHECKING:  # with it comes torch, which only pages that run a model import
    from workbench.models.hooked import HookedModel

P = ParamSpec("P")
R = TypeVar("R")
B = TypeVar("B")
PREFERRED = ("resformer", "transformer")
"""Model A and model B where the link does not say."""
PROMPTS = ".prompts"
LETTERS = {"repeated": 2, "backcopy": 1}
"""Kinds of data whose tokens are letters and digits, and how often a prompt is read in a row."""
TEXT = "def mean(values):\n    return sum(values) / len(values)\n"
SYMBOLS = "Kq7fW2mZxR0bTn5LsYd8HcVjA3pGeUi9"
IDS = " ".join(map(str, 2 * [*range(1, 13)]))
"""Prompts where the link has none: text, as many letters as the demo's models learned to copy, ids without a tokenizer."""
TOKENIZER = "tokenizer.json"
EVIDENCE, MODELS = SHIPPED / "evidence", SHIPPED / "models"
"""Finished studies without weights, and trained models to look into: shown while the folder of runs is empty."""


@dataclass(frozen=True)
class Subject:
    """A run at a step."""

    entry: Entry
    step: int
    tag: str = ""  # A or B, where two are compared
    alike: bool = False  # whether the other one is of the same architecture

    @property
    def title(self) -> str:
        """As figures name it: `A: ResFormer · s0, step 300`."""
        return f"{self.tag}: {self.name}" if self.tag else self.name

    @property
    def name(self) -> str:
        """`ResFormer · s0, step 300`."""
        return f"{label(self.entry.series)}{DETAIL}s{self.entry.seed}, step {self.step}"

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
    """Called with (done, total) by views whose work has parts; may raise to stop them."""
    record_cache: RecordCache = field(default_factory=RecordCache, repr=False)
    telemetry_cache: TelemetryCache = field(default_factory=TelemetryCache, repr=False)
    bases: dict[Any, Any] = field(default_factory=dict, repr=False)
    """The last two bases of `derive`."""

    @property
    def caches(self) -> dict[str, Any]:
        """The tables that were read, as `claims.stored` takes them."""
        return {"record_cache": self.record_cache, "telemetry_cache": self.telemetry_cache}

    def catalogue(self) -> Catalogue:
        """The runs of the folder; where there is none yet, those that ship with the project."""
        return runs_to_show(self.folder)

    def shipped(self) -> Catalogue:
        """The runs that ship with the project."""
        return shipped_runs(EVIDENCE, MODELS)

    def own(self) -> bool:
        """Whether there are runs in the folder itself."""
        found = self.catalogue()
        return bool(found.entries) and found.folder == str(self.folder.resolve())

    def group(self, link: Link) -> list[Entry]:
        """Runs of the chosen experiment: the link's, else that of model A, else the largest."""
        found = self.catalogue()
        groups = found.groups
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

    def found(self, link: Link) -> list[Entry]:
        """Runs of the experiment that the link's search words find, their series told apart by what it says (`by`)."""
        runs, by = self.group(link), link.many("by")
        if by is not None:
            for name in by:
                if name not in (known := facets(runs)):
                    raise UnknownName("option to tell models apart by", name, known)
            runs = [dataclasses.replace(e, series=series_by(e, by)) for e in runs]
        found = [_with_word(runs, word) for word in (link.text("find") or "").lower().split()]
        return [e for e in runs if all(e.path in paths for paths in found)]

    def chosen(self, link: Link) -> list[Entry]:
        """Runs of the chosen series of the experiment: the link's `models`, else all that are found."""
        runs, names = self.found(link), link.many("models")
        if not runs:
            raise WorkbenchError(f"no run of this experiment has all of the words {str(link.text('find'))!r}")
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
        alike = a.architecture == b.architecture
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

    def records(self, entries: Iterable[Entry], metrics: Sequence[str] | None = None) -> pd.DataFrame:
        """Stored records of runs, `architecture` being the series; runs whose files are damaged are in `problems`.

        Shared, so never written to; of telemetry as well.
        """
        return self._rows(self.record_cache, list(entries), metrics)

    def telemetry(self, entries: Iterable[Entry], metrics: Sequence[str] | None = None) -> pd.DataFrame:
        """What training wrote down, `architecture` being the series; runs whose files are damaged are in `problems`."""
        return self._rows(self.telemetry_cache, list(entries), metrics)

    def quantities(self, entries: Iterable[Entry]) -> set[str]:
        """Names of everything that these runs wrote down in training."""
        return self.telemetry_cache.metrics(entries)

    def _rows(self, cache: TableCache, entries: Sequence[Entry], metrics: Sequence[str] | None) -> pd.DataFrame:
        frame, problems = cache.rows(entries, metrics)
        self.problems.update(problems)
        return frame

    def keep(self, key: tuple[Any, ...], work: Callable[[], Any]) -> Any:
        """The result of some work; the dashboard keeps it under a key of plain values."""
        return work()

    def judge(self, entries: Sequence[Entry]) -> Verdicts:
        """The verdict of every claim, from what runs of the folder hold."""
        return judge_all(entries, self.progress, **self.caches)

    def query(
        self, function: Callable[Concatenate[HookedModel, prompts.Prompt, P], R], subject: Subject, text: str | None, /,
        *args: P.args, **kwargs: P.kwargs,
    ) -> R:  # fmt: skip
        """The answer of a function of `workbench.prompts` about a subject's model and a prompt.

        `text`: the prompt (None for a repeated-token model: its own fixed sequence). Arguments are plain values, beside a
        `progress`. Raises `WorkbenchError` where the checkpoint cannot be opened or the prompt read, and whatever the
        function refuses.
        """
        return answer(function, self.model(subject), subject.entry.kind, text, *args, **kwargs)

    def derive(
        self, function: Callable[Concatenate[B, P], R], base: Callable[[HookedModel, prompts.Prompt], B],
        subject: Subject, text: str | None, /, *args: P.args, **kwargs: P.kwargs,
    ) -> R:  # fmt: skip
        """The answer of a function about what `base` reads of a model and a prompt; the model runs once for many answers."""
        key = base, subject.entry.path, subject.step, text
        if key not in self.bases:  # of A and B; one figure asks for several pieces
            self.bases = dict(list(self.bases.items())[-1:]) | {key: self.query(base, subject, text)}
        return function(self.bases[key], *args, **kwargs)

    def model(self, subject: Subject) -> HookedModel:
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
        if text is None:  # an empty one is refused where it is read, as any that cannot be read
            text = example(self.subjects(link)[0].entry)
        return text


def source_of(link: Link, folder: Path) -> Source:
    """The numbers of a folder of runs; of what ships, where that is what the link's model A names and the folder has none of that name."""
    source, name = Source(folder), link.text("a")
    if name is None or name in {e.name for e in source.catalogue().entries}:
        return source
    place = Path(shipped(name))
    return source if place == Path(name) else Source(place.parent)


def facets(runs: Sequence[Entry]) -> list[str]:
    """What runs of one experiment may be told apart by beside their architecture: options in which any differ, and the seed."""
    alike: dict[str, list[Entry]] = {}
    for entry in runs:
        alike.setdefault(entry.architecture, []).append(entry)
    names = {
        k
        for kin in alike.values()
        for e in kin
        for k in e.options
        if any(o.options.get(k) != e.options[k] for o in kin)
    }
    return [*sorted(names), *(["seed"] if len({e.seed for e in runs}) > 1 else [])]


def series_by(entry: Entry, by: Sequence[str]) -> str:
    """A run's series where these options (and `seed`) tell runs apart."""
    options = "".join(f" {k}={entry.options[k]}" for k in sorted(by) if k in entry.options)
    return entry.architecture + options + (f"{DETAIL}s{entry.seed}" if "seed" in by else "")


def _with_word(runs: Sequence[Entry], word: str) -> set[str]:
    """Paths of the runs of which the word is a whole part, as `s3` is of `text-resformer-s3`; if of none, of those that contain it."""
    said = {e.path: _searched(e) for e in runs}
    whole = {path for path, text in said.items() if word in PARTS.split(text)}
    return whole or {path for path, text in said.items() if word in text}


PARTS = re.compile(r"[^\w.=+]+|_")


def _searched(entry: Entry) -> str:
    """What search words are looked for in."""
    options = " ".join(f"{k}={v}" for k, v in entry.options.items())
    return f"{entry.name} {label(entry.architecture)} {entry.series} s{entry.seed} {options}".lower()


def runs_to_show(folder: Path, known: Catalogue | None = None) -> Catalogue:
    """The runs of a folder; where it has none, those that ship with the project. What is `known` is not read again."""
    own = catalogue(folder, known)
    shipped = own if own.entries or own.problems else shipped_runs(EVIDENCE, MODELS)
    return shipped if shipped.entries else own


@cache
def shipped_runs(*folders: Path) -> Catalogue:
    """The runs that ship with the project, evidence and models; they stay as they are."""
    evidence, models = map(catalogue, folders)
    return dataclasses.replace(
        evidence, entries=evidence.entries + models.entries, problems=evidence.problems | models.problems
    )


def example(entry: Entry) -> str:
    """What is read where a link has no prompt: what the run's model was trained on, or can read."""
    if entry.kind == "backcopy":
        return _of_the_task(entry.path)
    if entry.kind in LETTERS:
        return _letters(entry.path)
    if (Path(entry.path) / TOKENIZER).exists():
        return TEXT
    return " ".join(IDS.split()[: entry.n_ctx])


@cache
def _letters(path: str) -> str:
    """Letters that stand for ids of a run's vocabulary."""
    known = ALPHABET[: int(Run.open(path).info["data"]["vocabulary"])]
    return "".join(letter for letter in SYMBOLS if letter in known)


@cache
def _of_the_task(path: str) -> str:
    """A held-out sequence of the task that a run was trained on, in letters."""
    run = Run.open(path)
    (ids,) = run.data.sample(1, run.train.T).ids.tolist()
    return "".join(ALPHABET[i] for i in ids if i < len(ALPHABET))  # what can be typed, of a larger vocabulary


def read_alike(a: Entry, b: Entry) -> bool:
    """Whether an id is the same token to two runs: they have the same tokenizer, or none and the same kind of data."""
    mine, others = (read_bytes(path) if (path := Path(e.path) / TOKENIZER).exists() else None for e in (a, b))
    return mine == others and (mine is not None or a.kind == b.kind)


def _no_checkpoint(runs: Sequence[Entry]) -> str:
    if all(e.shipped for e in runs):
        return f"the runs shown here are shipped {WITHOUT}; Training, Depth and the verdicts on Start show what was measured"
    if all(e.kind == "recorded" for e in runs):
        return "a recording holds no checkpoints: the Training page shows it; what `workbench import` takes in is here on every page"
    return "no checkpoint here yet; the first ones appear within seconds of a training's start"


def open_model(path: str, step: int) -> HookedModel:
    """The model of a run at a step; raises `WorkbenchError` whatever is wrong with its files."""
    try:
        return Run.open(path).load(step)
    except WorkbenchError:
        raise
    except Exception as error:
        message = f"{Path(path).name} cannot be opened at step {step}: {type(error).__name__}"
        raise WorkbenchError(message) from error


def answer(
    function: Callable[Concatenate[HookedModel, prompts.Prompt, P], R], model: HookedModel, kind: str, text: str | None,
    /, *args: P.args, **kwargs: P.kwargs,
) -> R:  # fmt: skip
    """A function of `workbench.prompts` called with a model and the tokens of a text, holding the model's lock."""
    prompt = prompts.tokenise(model, text, letters=LETTERS.get(kind, 0))
    with model.lock:
        return function(model, prompt, *args, **kwargs)


def tokens_of(model: HookedModel, kind: str, text: str | None) -> list[str]:
    """The tokens of a prompt as people read them."""
    return prompts.tokenise(model, text, letters=LETTERS.get(kind, 0)).tokens
