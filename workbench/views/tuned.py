"""Tuned lens on the prompt page. The view fits its maps on the run's validation documents and stores them in the cache."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

from workbench import plots, prompts
from workbench.errors import WorkbenchError
from workbench.places import lenses_folder
from workbench.runs.run import Run
from workbench.views import follow  # noqa: F401  (its views come first on the page)
from workbench.views.base import Drawing, view
from workbench.views.link import Link
from workbench.views.source import RunAtStep, Source

DOCUMENTS, MAX_T = 128, 256  # of the fit; a quarter is held out
LOOKS = {
    "tuned": ("tuned lens", "solid"),
    "logit": ("logit lens", "dash"),
    "frequency": ("token frequencies (baseline)", "dot"),
}
KINDS = {"logit": "logit lens", "tuned": "tuned lens"}


def lens_file(source: Source, subject: RunAtStep) -> str:
    """Return the file of a subject's tuned lens, fitted on its run's validation documents unless it is in the cache."""
    entry = subject.entry
    if entry.imported:
        raise WorkbenchError(
            f"the training text of {entry.name} (imported) is unknown: fit a tuned lens in Python, prompts.fit_tuned_lens(model, tokens)"
        )

    def fit() -> str:
        run = Run.open(Path(entry.path))
        ids = run.data.sample(DOCUMENTS, min(MAX_T, run.train.T, entry.n_ctx)).ids
        model, folder = source.model(subject), lenses_folder()
        return str(prompts.fit_tuned_lens(model, ids, store=folder, progress=source.progress).file(folder))

    return str(source.keep(("tuned lens", entry.path, entry.stamp, subject.step), fit))


@view("prompt")
def lens_loss(source: Source, link: Link) -> Drawing:
    """Loss of the tuned lens, the logit lens and token frequencies on held-out documents, by layer."""
    if link.choice("lens", KINDS) != "tuned":
        raise WorkbenchError("select the tuned lens (lens=tuned): it is fitted once")
    figure, tables, sentences = go.Figure(), list[pd.DataFrame](), list[str]()
    for subject in source.subjects(link):
        lens = source.keep(
            ("tuned lens, read", lens_file(source, subject)),
            partial(prompts.load_tuned_lens, lens_file(source, subject)),
        )
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
            f"{subject.title}: fitted on {lens.fitted_on['positions']:,} positions of {lens.fitted_on['documents']} documents, measured on "
            f"{lens.fitted_on['held_out']} others. The tuned lens loses {gain.max():.3g} nats less than the logit lens at layer "
            f"{int(gain.idxmax())}, the largest difference; in the last row both are the output."
        )
    figure.update_xaxes(title_text="stream into layer (last: the output)", dtick=1)
    figure.update_yaxes(title_text="loss (nats)")
    under = "next-token loss on held-out documents; bars: ± standard error over documents; lower: the answer is readable earlier"
    plots.dressed(figure, "Tuned lens and logit lens by layer", under, 340)
    return Drawing(figure, pd.concat(tables, ignore_index=True), " ".join(sentences))
