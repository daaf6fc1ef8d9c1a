"""Parts of the Training page: the choices of each, and its figures."""

from __future__ import annotations

import streamlit as st

from app import widgets
from app.cached_source import cached_source
from app.figures import show
from workbench import plots
from workbench.models.registry import label
from workbench.views import Link, training


def _axes(link: Link) -> Link:
    first, second, third, fourth = st.columns(4, vertical_alignment="bottom")
    axes = {"step": "training steps"}
    if all(e.tokens for e in training.runs(cached_source(), link)):
        axes["tokens"] = "tokens read"
    with first:
        x = widgets.choose("Along", "x", list(axes), "step", show=axes.__getitem__)
    with second:
        log = widgets.toggle("Logarithmic axis", "log", help="The first steps as wide as the last ones")
    link = link.but(x=x, log=int(log))
    if link.text("show") == "loss":
        if len(training.domains(cached_source(), link)) > 1:
            texts = {training.TOTAL: "mean over domains", training.EACH: "each domain by itself"}
            with third:
                link = link.but(domain=widgets.choose("Validation text", "domain", list(texts), show=texts.__getitem__))
        with fourth:
            words = {n: f"{n} written steps" if n > 1 else "nothing" for n in (1, 5, training.SMOOTH, 50, 200)}
            width = widgets.choose(
                "Smooth training loss over", "smooth", list(words), training.SMOOTH, show=words.__getitem__
            )
            link = link.but(smooth=width)
    return link


def _loss(link: Link, quantities: set[str]) -> None:
    if "validation_loss" in quantities:
        st.markdown(
            "**Validation loss**: the surprise per token, in nats, on text the model was not trained on. **Lower is better.**"
        )
        show(training.loss, link)
        if not link.on("compare"):
            st.markdown("**Relative loss**: the same, minus the model without a shortcut that saw the same batches.")
            show(training.relative, link)
    if "copy_loss" in quantities:
        st.markdown("**Copying**: some tokens here can only be guessed by looking back at what came before; the loss there.")  # fmt: skip
        show(training.copy_loss, link)
    if "train_loss" in quantities:
        st.markdown("**Training loss**: the surprise per token, in nats, on the batches that were being learned from.")
        show(training.train_loss, link)


def _step(link: Link) -> Link:
    """A slider over the steps at which gradients were written down; it follows the step of model A until it is moved."""
    steps = training.logged(cached_source(), link)
    led = max((s for s in steps if s <= (link.whole("step") or steps[-1])), default=steps[0])
    at = widgets.choose("Written down at step", "at", steps, led, slider=True)
    return link if at == led else link.but(at=at)


def _gradients(link: Link, quantities: set[str]) -> None:
    st.markdown(
        "How strongly the loss pulls on each weight matrix: of attention what asks (`W_Q`), what is matched (`W_K`), what is "
        "passed on (`W_V`) and how it is put together (`W_O`), then those of the MLP. Dark: hardly any pull, so hardly any learning. "
        "A strong pull on the first layer's `W_V` is expected where later layers use its values too."
    )
    show(training.gradients, link)
    show(training.gradients_over_time, link)


def _series(link: Link) -> Link:
    if link.on("compare"):
        return link
    names = training.learning(cached_source(), link)
    of = widgets.choose("Model", "of", names, show=label) if len(names) > 1 else names[0]
    return link.but(of=of)


def _coefficients(link: Link, quantities: set[str]) -> None:
    st.markdown("Numbers the shortcut itself learns: with what weight each earlier output enters what the next block reads.")  # fmt: skip
    show(training.coefficients, link)


def _quantity(link: Link) -> Link:
    source, (first, second) = cached_source(), st.columns(2)
    found = training.inside(training.quantities(source, link))
    with first:
        quantity = widgets.choose("Quantity", "quantity", found, "update_ratio", show=lambda m: m.replace("_", " "))
    with second:
        where = widgets.choose("Where", "where", training.places(source, link, quantity), show=plots.site)
    return _axes(link.but(quantity=quantity, where=where))


def _inside(link: Link, quantities: set[str]) -> None:
    st.markdown("What a recorder took from the batches trained on; the mean over heads where there are several.")
    show(training.recorded, link)


def _pace(link: Link, quantities: set[str]) -> None:
    views = {"learning_rate": training.learning_rate, "tokens_per_second": training.pace,
             "seconds_per_step": training.seconds, "recorder_share": training.recording_share}  # fmt: skip
    for name, function in views.items():
        if name in quantities:
            show(function, link)


PARTS = {
    "loss": ("Loss", _axes, _loss), "gradients": ("Gradients", _step, _gradients),
    "coefficients": ("Learned coefficients", _series, _coefficients),
    "inside": ("Inside the model", _quantity, _inside), "pace": ("Rate and pace", _axes, _pace),
}  # fmt: skip
"""Of each part: its name, what adds its choices to the link, and what draws it from the link and the quantities there are."""
