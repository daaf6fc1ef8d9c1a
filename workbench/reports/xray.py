"""One look at one model: four questions, each answered by a sentence with its number, baseline and error, and a picture.

    workbench xray runs/text-transformer-s0        # writes text-transformer-s0.html and, where a browser is found, .png

Does attention concentrate, and where? Are sinks drained? Which share of the deep values is only the token? Would a value
residual help here, and what speaks for and against? Works on runs, on checkpoints and on observed modules.
"""

from __future__ import annotations

import shlex
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import plotly.graph_objects as go

from workbench import plots
from workbench.console import Progress, notebook_html
from workbench.errors import BadData, NotMeasured, NotSent, OnlyHere, WorkbenchError, warn_caller
from workbench.file_io import digest
from workbench.hook_names import ACTIVATIONS
from workbench.plots.experiment_figures import after_the_first
from workbench.plots.html_page import Page, heading, numbers_html, paragraph
from workbench.plots.image_export import screenshot
from workbench.reports.xray_sentences import ALMOST, SENTENCES, TOKEN, TokenName, pm, residual_text, sinks_text
from workbench.runs.records import facts
from workbench.runs.run import Run, run_or_model
from workbench.statistics.sink_thresholds import FOUND_LENGTH, SINK_MASS

if TYPE_CHECKING:
    from torch import Tensor

METRICS = (
    "loss", "concentration_parts", "sink_mass", "sink_rate", "found_sinks", "value_drain", "hidden_peak", "token_identity_share",
    "deep_value_ablation",
)  # fmt: skip
TOGETHER, BY_LAYER = "deep_value_ablation", "value_ablation"
"""The ablation in four passes, and the one that runs the model three times for each layer: what it says stands first."""
SITES = {"token_identity_share": ("own_v", "v")}
DOCUMENTS = 32
BATCH, LOGITS = 8, 1 << 24
"""Documents at a time, and logits at most, which of a large vocabulary are the largest tensor of all."""
SHORTEST = {"sink_rate": 64, "found_sinks": FOUND_LENGTH}  # tokens of a document that a measure needs
NEEDED = ("concentration_parts", "sink_mass", "value_drain", "token_identity_share", TOGETHER)
WIDTH, HEIGHT = 1400, 1400


@dataclass(frozen=True)
class Answer:
    """A question, the sentence that answers it, its picture and the records behind both."""

    question: str
    sentence: str
    figure: go.Figure
    records: pd.DataFrame


@dataclass(frozen=True)
class XRay:
    """Four answers about one model."""

    subject: str
    answers: tuple[Answer, ...]
    records: pd.DataFrame
    command: str
    coverage: str = ""
    """What an observed module shows of itself, in a line."""

    def __str__(self) -> str:
        parts = [f"{a.question}\n{a.sentence}" for a in self.answers]
        return "\n\n".join([*parts, self.coverage] if self.coverage else parts)

    def _repr_html_(self) -> str:
        answers = {a.question: a.sentence for a in self.answers}
        return notebook_html(f"X-ray of {self.subject}", answers, f"<p>{escape(self._measured_on())}</p>")

    def save(self, out: str | Path, *, png: bool = True) -> list[Path]:
        """Write the offline page and its picture; returns both paths.

        Raises `WorkbenchError` where the picture is wanted and no browser is found; the page is written before that.
        """
        page = Path(out).with_suffix(".html")
        self._page().write(page, self.command)
        return [page, screenshot(page, page.with_suffix(".png"), width=WIDTH, height=HEIGHT)] if png else [page]

    def html(self) -> str:
        """The page: works offline, uploads nothing."""
        return self._page().html(self.command)

    def _page(self) -> Page:
        page = Page(f"X-ray of {self.subject}", wide=True)
        page.add(heading(page.title, 1), paragraph(self._measured_on(), "small"))
        page.add(*([paragraph(self.coverage, "small")] if self.coverage else []), '<div class="four">')
        for a in self.answers:
            figure = page.figure(plots.narrow(a.figure))
            page.add(f"<section>{figure}{paragraph(a.sentence)}{numbers_html(a.records)}</section>")
        page.add("</div>")
        return page

    def _measured_on(self) -> str:
        """Data, documents and loss, in words."""
        loss = self.records[(self.records["metric"] == "loss") & self.records["control"].isna()]
        loss = loss[loss["step"].isna() | (loss["step"] == loss["step"].max())] if len(loss) else loss
        first, n = self.records.iloc[0], int(self.records["n"].max())
        known = facts(first["provenance"])
        dtype = f" in {known['dtype']}" if known.get("dtype") else ""
        packed = known.get("documents", n) != n  # several in a row
        documents = f"{known['documents']} documents in {n} rows, of at most" if packed else f"{n} documents of"
        over = "rows" if packed else "documents"
        of = f"{first['data']}, {documents} {first['T']} tokens{dtype}; ± is one standard error over {over}."
        if loss.empty:
            return of
        here = loss.iloc[0]
        return f"{of} Loss here {pm(here['value'], here['se'], 3)} nats per token."


def measurable(T: int) -> list[str]:
    """Return the measures of an X-ray that documents of T tokens allow."""
    return [name for name in METRICS if SHORTEST.get(name, 0) <= T]


def xray(
    thing: Any,
    data: Any = None,
    *,
    n: int = DOCUMENTS,
    T: int | None = None,
    layers: bool = False,
    device: str | None = None,
    progress: Progress | None = None,
    announce: Callable[[str], None] | None = None,
) -> XRay:
    """Answer the four questions for a run, a checkpoint's path, a model, or an observed module.

    Args:
        thing: a run or a model; a run is compared with its own step 0 if it has one.
        data: ids [n, T], a file or folder of text, a `.bin` file of ids; default the run's own validation documents. A model with a
            tokenizer but without documents reads prose of Python's standard library. Ids are halved: one half for the table of token means.
        n: documents, T: tokens per document. progress: called with the current metric. announce: called with the cost before the start.
        layers: values are also replaced layer by layer, by a table of more tokens: two passes for each layer and some more.

    Runs the model at most seven times on the documents, unless `layers` asks for more. Measures that a model does not expose
    get an answer with the reason. Raises `BadData` where the model has neither tokenizer nor data.
    """
    from workbench.measurement.measuring import measure  # torch, which a page of stored records does not need

    subject = run_or_model(thing, device)
    given = f" --text {shlex.quote(str(data))}" if isinstance(data, str | Path) else ""
    given += (f" --documents {n}" if n != DOCUMENTS else "") + (f" --length {T}" if T else "") + " --layers" * layers
    source, length, data = data, _length(subject, T, data), xray_data(subject, data, n, T)
    names = [BY_LAYER if layers and m == TOGETHER else m for m in measurable(length)]
    if _no_loss(subject, data):
        names = [m for m in names if m not in ("loss", TOGETHER, BY_LAYER)]
    if any(name.endswith(".hook_null") for name in getattr(subject, "hook_dict", ())):
        names.append("null_mass")
    if announce:
        announce(_cost(subject, data, n, length, layers))

    plan = {"last": names}
    if _has_init(subject):
        plan["first"] = [m for m in names if m not in (TOGETHER, BY_LAYER)]
    config = subject.model if isinstance(subject, Run) else subject.config
    batch = min(BATCH, max(1, LOGITS // (length * config.d_vocab)))
    once = partial(measure, subject, data=data, n=n, T=T, batch=batch, sites=SITES)
    frame = _measured(once, plan, progress)
    if sinks_elsewhere(frame):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotMeasured)
            frame = pd.concat([frame, once(metrics="value_drain", positions="found")], ignore_index=True)
    name = subject.name if isinstance(subject, Run) else str(frame["run"].iloc[0])
    fitted, path = getattr(subject, "fitted_paths", None), None
    if fitted is not None and all(one.exact for one in fitted if one.into == "value"):
        from workbench.observing.recognition.value_paths import paths_in_words

        path = paths_in_words(fitted)
    result = answers(frame, _reasons(subject, data), path, token_name(subject))
    coverage = "" if isinstance(subject, Run) or subject.foreign is None else str(subject.coverage)
    in_files = isinstance(thing, str | Path | Run) and (source is None or isinstance(source, str | Path))
    where = shlex.quote(str(thing.path if isinstance(thing, Run) else thing))
    command = f"workbench xray {where}{given}" if in_files else ""  # none that gives other numbers
    return XRay(name, tuple(result), frame, command, coverage)


def sinks_elsewhere(frame: pd.DataFrame) -> bool:
    """Return whether a head rests on few positions of which the first holds less than 80 %."""
    last = frame[(frame["step"].isna() | (frame["step"] == frame["step"].max())) & frame["variant"].isna()]
    last = last[last["control"].isna()].set_index(["layer", "head"])
    mass, sought = (last.loc[last["metric"] == m, "value"].astype(float) for m in ("sink_mass", "found_sinks"))
    return bool(((sought > SINK_MASS) & (mass.reindex(sought.index) < ALMOST * sought)).any())


def token_name(subject: Any) -> TokenName:
    """Return a function that quotes a token id's text, or gives the id without a tokenizer."""
    tokenizer = subject.tokenizer
    return TOKEN if tokenizer is None else lambda token: repr(tokenizer.decode([token])) + f" (id {token})"


def _measured(
    measure: Callable[..., pd.DataFrame], plan: Mapping[str, list[str]], progress: Progress | None
) -> pd.DataFrame:
    """Return the records of every step's metrics, the last step last; a read-only runs folder only causes a warning."""
    frames, unsent = list[pd.DataFrame](), list[OnlyHere]()
    for i, (step, metrics) in enumerate(plan.items()):

        def part(done: int, total: int, what: str, before: int = i) -> None:
            if progress:
                progress(before + done, len(plan), what)

        try:
            with warnings.catch_warnings():  # the page says what a model does not show
                warnings.simplefilter("ignore", NotMeasured)
                frames.append(measure(metrics=metrics, steps=step, progress=part))
        except OnlyHere as error:
            frames.append(error.made)
            unsent.append(error)
    if unsent:
        warn_caller(str(unsent[0]), NotSent)
    return pd.concat(frames[::-1], ignore_index=True)


QUESTIONS = {
    "concentration": "Concentration of attention",
    "sinks": "Attention sinks",
    "token_share": "Token information in values",
    "residual": "Loss change under value replacement",
}
"""Titles of the four questions."""
READS = {"concentration": ("received",), "sinks": ("sink",), "token_share": ("own_v", "v"), "residual": ("own_v",)}
"""What a question asks of a layer."""


def answers(
    frame: pd.DataFrame, reasons: Mapping[str, str] | None = None, path: str | None = None, token: TokenName = TOKEN
) -> list[Answer]:
    """Answer the four questions from records of one model, at its last step and, where there, at step 0.

    Args:
        frame: Records of the model.
        reasons: Why a question has no records, by question.
        path: Value paths that were found in the model's numbers, in words; None where they are unknown.
        token: Name of a token id.
    """
    written = SENTENCES | {"sinks": partial(sinks_text, token=token), "residual": partial(residual_text, path=path)}
    result = []
    for name, question in QUESTIONS.items():
        rows = rows_of(name, frame)
        why = "" if _shown(name, rows) else (reasons or {}).get(name, "")
        result.append(Answer(question, written[name](frame) + why, drawn(name, rows), rows))
    return result


def _no_loss(subject: Any, data: Any) -> str:
    """Why an observed module has no loss on these documents; empty where it has one."""
    if (structure := getattr(subject, "structure", None)) is None:
        return ""
    if structure.logits is None:
        return "the module gives no logits, so there is no loss"
    if data is None or (last := int(data.ids.max())) < structure.predicted:
        return ""
    return f"ids go up to {last}, and the module gives {structure.predicted} logits"


def _reasons(subject: Any, data: Any) -> dict[str, str]:
    """Return why a model cannot answer a question, by question, from the observation of its last layer."""
    if isinstance(subject, Run):
        return {}
    last = subject.config.n_layers - 1
    notes = {q: [subject.absent.get(ACTIVATIONS[a].hook.format(layer=last)) for a in of] for q, of in READS.items()}
    if why := _no_loss(subject, data):
        notes["residual"] = [why]
    return {question: f" Why: {found[0]}." for question, found in notes.items() if all(found)}


def rows_of(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The records behind a question's picture: at the last step, the shares also at step 0."""
    last = frame[frame["step"].isna() | (frame["step"] == frame["step"].max())]
    if name == "concentration":
        return last[last["metric"] == "concentration_parts"]
    if name == "sinks":
        drain = (last["metric"] == "value_drain") & (last["site"] == _values(last)) & last["variant"].isna()
        return pd.concat([last[(last["metric"] == "sink_mass") & last["variant"].isna()], last[drain]])
    if name == "token_share":
        return frame[(frame["metric"] == "token_identity_share") & (frame["site"] == _values(frame))]
    by_layer = last["metric"] == BY_LAYER
    return after_the_first(last[by_layer if by_layer.any() else last["metric"] == TOGETHER])


def _shown(name: str, rows: pd.DataFrame) -> bool:
    """Return whether a question has measured rows for its figure."""
    if name == "sinks":
        rows = rows[rows["metric"] == "sink_mass"]
    elif name == "residual":
        rows = rows[rows["variant"].isin(("token_mean", "zero"))]
    return bool((rows["value"].notna() & rows["control"].isna()).any())


def drawn(name: str, rows: pd.DataFrame) -> go.Figure:
    """A question's picture, of one model's rows or of a difference of two."""
    if not _shown(name, rows):
        return plots.dressed(go.Figure(), f"{QUESTIONS[name]}: nothing to draw", "not measurable here", 60)
    if name == "sinks":
        figure = plots.sinks_figure(rows[rows["metric"] == "sink_mass"], rows[rows["metric"] == "value_drain"])
    elif name == "token_share":
        figure = plots.plot(rows, form="profile", title=f"Token identity share of {plots.site(rows['site'].iloc[0])}")
    else:
        figure = plots.concentration_figure(rows) if name == "concentration" else plots.ablation(rows)
    title = figure.layout.title
    if title.text != QUESTIONS[name] and name == "token_share":  # it names the values
        title.subtitle.text = f"{title.text}; {title.subtitle.text}"
    title.text = QUESTIONS[name]
    return figure


OF_VALUES = ("value_drain", "token_identity_share")


def _own(frame: pd.DataFrame) -> pd.Series:
    return frame["metric"].isin(OF_VALUES) & frame["site"].isin(["own_v"])


def _values(frame: pd.DataFrame) -> str:
    """Own values where the model has them in deep layers, else the effective ones."""
    return "own_v" if (_own(frame) & (frame["layer"] > 0).fillna(False)).any() else "v"


def comparable(frames: Sequence[pd.DataFrame]) -> list[pd.DataFrame]:
    """Records of models to be compared: of effective values alone where one of them has no own ones in deep layers."""
    own = all(_values(frame) == "own_v" for frame in frames)
    return [frame if own else frame[~_own(frame)] for frame in frames]


def _has_init(subject: Any) -> bool:
    return isinstance(subject, Run) and len(subject.steps) > 1 and subject.steps[0] == 0


def _cost(subject: Any, data: Any, n: int, T: int, layers: bool) -> str:
    """Estimate the cost: passes, and for a loaded model their time, from one pass over one document."""
    import torch

    from workbench.interventions.ablation import TABLE_TOKENS

    n = n if data is None else len(data.ids)
    depth = (subject.model if isinstance(subject, Run) else subject.config).n_layers
    passes = (3 * depth + 6 if layers else 6) + _has_init(subject)
    more = f" and over {TABLE_TOKENS:,} tokens of training text" if layers else ""
    cost = f"{passes} passes at most over {n} documents of {T} tokens{more}"
    if isinstance(subject, Run):
        return f"{cost}, fewer where records are kept"
    begin = time.perf_counter()
    with torch.no_grad():
        subject(data.ids[:1], return_type=None)
    seconds = (time.perf_counter() - begin) * (passes * n + (TABLE_TOKENS // T if layers else 0))
    return f"{cost}, through {sum(p.numel() for p in subject.parameters()):,} parameters: about {seconds:.0f} s here"


def _length(subject: Any, T: int | None, data: Any) -> int:
    if hasattr(data, "shape"):
        return int(data.shape[-1])
    return T or (subject.train.T if isinstance(subject, Run) else min(128, subject.config.n_ctx))


@dataclass(frozen=True)
class _OtherHalf:
    """Ids [n, T] that fill the table of token means."""

    ids: Tensor

    @property
    def hash(self) -> str:
        return digest(self.ids.numpy().tobytes(), list(self.ids.shape))

    def batch(self, step: int, size: int, T: int, seed: int) -> Tensor:
        return self.ids


def xray_data(subject: Any, data: Any, n: int, T: int | None) -> Any:
    """Return the data to measure on, with training documents for the table of token means."""
    import torch

    from workbench.data.corpus import embedded, from_files
    from workbench.data.data_sources import Sample, TextData, TokenData, open_tokens

    if data is None and isinstance(subject, Run):
        return None
    if isinstance(data, torch.Tensor | list | tuple):
        ids = torch.as_tensor(data)
        if ids.ndim != 2 or len(ids) < 4:
            raise BadData(f"ids of shape {tuple(ids.shape)}: an X-ray needs [n, T] with 4 sequences or more")
        measured, others = ids[: len(ids) // 2].long().cpu(), ids[len(ids) // 2 :].long().cpu()
        return Sample(measured, list(range(len(measured))), "given ids", "ids", _OtherHalf(others))
    tokenizer = subject.tokenizer
    each: Literal["each"] | None = None if subject.start_token is None else "each"
    if isinstance(data, str | Path) and Path(data).suffix == ".bin":
        config = subject.model if isinstance(subject, Run) else subject.config
        source: TextData | TokenData = open_tokens([data], config.d_vocab)
    elif tokenizer is None:
        ways = "give token ids [n, T] as data=, or a .bin file of ids (--text)"
        raise BadData(f"this model came without a tokenizer and without data: {ways}")
    elif data is None:
        source = TextData(embedded(), tokenizer, each)
    elif Path(data).exists():
        source = TextData(from_files([data]), tokenizer, each)
    else:
        raise WorkbenchError(f"{data}: no such file; give a file or a folder of text, or ids")
    return replace(source.sample(n, _length(subject, T, data)), source=source)
