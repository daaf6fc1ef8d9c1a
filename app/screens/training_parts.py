"""Parts of the Training page: the choices of each, and its figures."""

from __future__ import annotations

import streamlit as st

from workbench import plots
from workbench.models.registry import label
from workbench.views import Link, training

from .. import widgets
from ..cached_source import cached_source
from ..figures import show
from ..page_frame import FIGURE_PX, PANELS_PX, figures_side_by_side

PULL = (
    "How strongly the loss pulls on each weight matrix: of attention what asks (`W_Q`), what is matched (`W_K`), what is "
    "passed on (`W_V`) and how it is put together (`W_O`), then those of the MLP. Dark: hardly any pull, so hardly any learning. "
    "A strong pull on the first layer's `W_V` is expected where later layers use its values too."
)
LOSSES = (
    (training.loss, "validation_loss", "The surprise per token on text the model was not trained on. **Lower is better.**"),
    (training.relative, "validation_loss", "The loss minus that of the model without a shortcut that saw the same batches."),
    (training.copy_loss, "copy_loss", "The loss where a token can only be guessed by looking back at what came before."),
    (training.train_loss, "train_loss", "The surprise per token on the batches that were being learned from."),
)  # fmt: skip
LEARNED = "Numbers the shortcut itself learns: with what weight each earlier output enters what the next block reads."


def _axes(link: Link) -> Link:
    """What is drawn along, and behind a button what is rarely chosen."""
    axes = {"step": "training steps"}
    if all(e.tokens for e in training.runs(cached_source(), link)):
        axes["tokens"] = "tokens read"
    with st.popover("More", icon=":material/tune:"):
        x = widgets.choose("Along", "x", list(axes), "step", show=axes.__getitem__, only_if_many=True)
        log = widgets.toggle("Logarithmic axis", "log", help="The first steps as wide as the last ones")
        if link.text("show") == "loss":
            words = {1: "nothing"} | {n: f"{n} written steps" for n in (5, training.SMOOTH, 50, 200)}
            smooth = widgets.choose("Smoothing", "smooth", list(words), training.SMOOTH, show=words.__getitem__)
            link = link.but(smooth=smooth)
    return link.but(x=x, log=int(log))


def _texts(link: Link) -> Link:
    """Of which text losses are drawn, and along what."""
    if len(training.domains(cached_source(), link)) > 1:
        texts = {training.TOTAL: "mean over domains", training.EACH: "each domain by itself"}
        link = link.but(
            domain=widgets.choose("Validation text", "domain", list(texts), show=texts.__getitem__, width=170)
        )
    return _axes(link)


def _loss(link: Link, quantities: set[str]) -> None:
    compared = link.on("compare")
    with figures_side_by_side(PANELS_PX if compared else FIGURE_PX):
        for view, quantity, about in LOSSES:
            if quantity in quantities and not (compared and view is training.relative):
                show(view, link, about=about)


def _step(link: Link) -> Link:
    """A slider over the steps at which gradients were written down; it follows the step of model A until it is moved."""
    steps = training.logged(cached_source(), link)
    led = max((s for s in steps if s <= (link.whole("step") or steps[-1])), default=steps[0])
    at = widgets.choose("Written down at step", "at", steps, led, slider=True, width=300)
    return link if at == led else link.but(at=at)


def _gradients(link: Link, quantities: set[str]) -> None:
    show(training.gradients, link, about=PULL)
    show(training.gradients_over_time, link, about=PULL)


def _series(link: Link) -> Link:
    names = [] if link.on("compare") else training.learning(cached_source(), link)
    return (
        link.but(of=widgets.choose("Model", "of", names, show=label, width=190, only_if_many=True)) if names else link
    )


def _coefficients(link: Link, quantities: set[str]) -> None:
    show(training.coefficients, link, about=LEARNED)


def _quantity(link: Link) -> Link:
    source = cached_source()
    found = training.inside(training.quantities(source, link))
    quantity = widgets.choose(
        "Quantity", "quantity", found, "update_ratio", show=lambda m: m.replace("_", " "), width=180
    )
    where = widgets.choose("Where", "where", training.places(source, link, quantity), show=plots.site, width=140)
    return _axes(link.but(quantity=quantity, where=where))


def _inside(link: Link, quantities: set[str]) -> None:
    show(
        training.recorded, link, about="Taken from the batches trained on; the mean over heads where there are several."
    )


def _pace(link: Link, quantities: set[str]) -> None:
    views = {
        "learning_rate": training.learning_rate,
        "tokens_per_second": training.pace,
        "seconds_per_step": training.seconds,
        "recorder_share": training.recording_share,
    }
    with figures_side_by_side(PANELS_PX if link.on("compare") else FIGURE_PX):
        for function in (views[name] for name in views if name in quantities):
            show(function, link)


PARTS = {
    "loss": ("Loss", _texts, _loss), "gradients": ("Gradients", _step, _gradients),
    "coefficients": ("Coefficients", _series, _coefficients),
    "inside": ("Inside the model", _quantity, _inside), "pace": ("Rate and pace", _axes, _pace),
}  # fmt: skip
"""Of each part: its name, what adds its choices to the link, and what draws it from the link and the quantities there are."""
