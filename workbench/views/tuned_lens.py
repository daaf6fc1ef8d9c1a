"""Tuned lens on the prompt page. The view fits its maps on documents of the run, or on another text, and stores them in the cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from workbench import plots, prompts
from workbench.data.corpus import embedded
from workbench.errors import WorkbenchError
from workbench.places import lenses_folder
from workbench.views import path_of_token  # noqa: F401  (its views come first on the page)
from workbench.views.heads import validation_ids
from workbench.views.page_links import Link
from workbench.views.registered_views import Drawing, view
from workbench.views.source import LETTERS, RunAtStep, Source

DOCUMENTS, MAX_T = 128, 256  # of the fit; a quarter is held out
LOOKS = {
    "tuned": ("tuned lens", "solid"),
    "logit": ("logit lens", "dash"),
    "frequency": ("token frequencies (baseline)", "dot"),
}
KINDS = {"logit": "logit lens", "tuned": "tuned lens"}
TEXTS = {"own": "its validation documents", "shipped": "the shipped text", "prompt": "the prompt"}
LEAST_T, LEAST_DOCUMENTS = 16, 8  # of a prompt that is cut into documents


def lens_file(source: Source, link: Link, subject: RunAtStep) -> tuple[str, str]:
    """Return the file of a subject's tuned lens, fitted unless it is in the cache, and the text of the fit in words.

    The text is the link's `fit`. Without it, it is the run's validation documents, or the shipped text if these are unknown.
    """
    entry, asked = subject.entry, link.choice("fit", TEXTS) if link.text("fit") else None
    of = source.prompt(link) if asked == "prompt" else None

    def fit() -> tuple[str, str]:
        ids, text = documents_of(source, subject, asked, of)
        model, folder = source.model(subject), lenses_folder()
        return str(prompts.fit_tuned_lens(model, ids, store=folder, progress=source.progress).file(folder)), TEXTS[text]

    made: tuple[str, str] = source.keep(("tuned lens", entry.path, entry.stamp, subject.step, asked, of), fit)
    return made


def documents_of(source: Source, subject: RunAtStep, asked: str | None, prompt: str | None) -> tuple[Any, str]:
    """Return ids [document, pos] and which of `TEXTS` they are; raises `WorkbenchError` if the model cannot read the text."""
    entry = subject.entry
    if asked in (None, "own"):
        try:
            return validation_ids(entry, DOCUMENTS), "own"
        except WorkbenchError:
            if asked is not None or entry.kind in LETTERS:
                raise
    tokenizer, T = source.model(subject).tokenizer, min(MAX_T, entry.n_ctx)
    if tokenizer is None:
        raise WorkbenchError(
            f"{entry.name} has no tokenizer, so it reads no text: fit a tuned lens in Python, prompts.fit_tuned_lens(model, ids)"
        )
    start = [] if (token := source.model(subject).start_token) is None else [token]
    if prompt is not None:
        ids = tokenizer.encode(prompt)
        T = min(T, len(ids) // LEAST_DOCUMENTS + len(start))
        if T < LEAST_T:
            least = LEAST_T * LEAST_DOCUMENTS
            raise WorkbenchError(
                f"the prompt has {len(ids)} tokens: a fit needs {least} or more; select the shipped text (fit=shipped)"
            )
        step = T - len(start)
        return [[*start, *ids[i : i + step]] for i in range(0, len(ids) - step + 1, step)], "prompt"
    rows = list[list[int]]()
    for document in embedded().split("validation"):
        # a token has far fewer than 16 characters
        if len(ids := start + tokenizer.encode(document.text[: 16 * T])) >= T:
            rows.append(ids[:T])
        if len(rows) == DOCUMENTS:
            break
    if len(rows) < LEAST_DOCUMENTS:
        raise WorkbenchError(
            f"the shipped text has {len(rows)} documents of {T} tokens for {entry.name}: a fit needs {LEAST_DOCUMENTS}"
        )
    return rows, "shipped"


@view("prompt")
def lens_loss(source: Source, link: Link) -> Drawing:
    """Loss of the tuned lens, the logit lens and token frequencies on held-out documents, by layer."""
    if link.choice("lens", KINDS) != "tuned":
        raise WorkbenchError("select the tuned lens (lens=tuned): it is fitted once")
    figure, tables, sentences = go.Figure(), list[pd.DataFrame](), list[str]()
    for subject in source.subjects(link):
        path, text = lens_file(source, link, subject)
        lens = source.keep(("tuned lens, read", path), partial(prompts.load_tuned_lens, path))
        frame = lens.held_out
        for name, (words, dash) in LOOKS.items():
            rows = frame[frame["lens"] == name]
            colour = plots.GREY if name == "frequency" else plots.colour(subject.series)
            figure.add_scatter(
                x=rows["layer"], y=rows["loss"], error_y={"array": rows["se"], "thickness": 1}, mode="lines+markers", marker_size=6,
                line={"color": colour, "dash": dash}, name=f"{subject.title}: {words}" if link.on("compare") else words,
                hovertemplate="into layer %{x}: %{y:.3g} nats<extra></extra>",
            )  # fmt: skip
        tables.append(frame.assign(model=subject.title))
        gain = frame.pivot_table("loss", "layer", "lens")
        gain = (gain["logit"] - gain["tuned"]).iloc[:-1]
        sentences.append(
            f"{subject.title}: fitted on {lens.fitted_on['positions']:,} positions of {lens.fitted_on['documents']} documents of {text}, "
            f"measured on {lens.fitted_on['held_out']} more. The tuned lens loses {gain.max():.3g} nats less than the logit lens at layer "
            f"{int(gain.idxmax())}, the largest difference; in the last row both are the output."
        )
    figure.update_xaxes(title_text="stream into layer (last: the output)", dtick=1)
    figure.update_yaxes(title_text="loss (nats)")
    under = "next-token loss on held-out documents; bars: ± standard error over documents; lower: the answer is readable earlier"
    plots.dressed(figure, "Tuned lens and logit lens by layer", under, 340)
    return Drawing(figure, pd.concat(tables, ignore_index=True), " ".join(sentences))
