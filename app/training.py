"""Parts of the Training page: the choices of each, and its figures."""

from __future__ import annotations

import streamlit as st

from app import url
from app.shell import show
from app.source import source
from workbench import plots
from workbench.names import LABELS
from workbench.views import Link, training

NAMES = {
    "loss": "Loss", "gradients": "Gradients", "coefficients": "Learned coefficients", "inside": "Inside the model",
    "pace": "Rate and pace",
}  # fmt: skip


def _axes(link: Link) -> Link:
    """Steps or tokens, and whether they are on a logarithmic axis."""
    first, second, third, fourth = st.columns(4, vertical_alignment="bottom")
    known = all(e.tokens for e in training.runs(source(), link))
    with first:
        axes = ["step", "tokens"] if known else ["step"]
        x = url.choose("Along", "x", axes, "step", show={"step": "training steps", "tokens": "tokens read"}.__getitem__)
    with second:
        log = url.switch("Logarithmic axis", "log", help="The first steps as wide as the last ones")
    link = link.but(x=x, log=int(log))
    if link.text("show") == "loss":
        if len(training.domains(source(), link)) > 1:
            words = {training.TOTAL: "mean over domains", training.EACH: "each domain by itself"}
            with third:
                link = link.but(domain=url.choose("Validation text", "domain", list(words), show=words.__getitem__))
        with fourth:
            widths = [1, 5, training.SMOOTH, 50, 200]
            link = link.but(
                smooth=url.choose("Smooth training loss over", "smooth", widths, training.SMOOTH, show=_steps)
            )
    return link


def _steps(width: int) -> str:
    return "nothing" if width == 1 else f"{width} written steps"


def _loss(link: Link, found: set[str]) -> None:
    if "validation_loss" in found:
        st.markdown(
            "**Validation loss**: the surprise per token, in nats, on text the model was not trained on. **Lower is better.**"
        )
        show(training.loss, link)
        if not link.on("compare"):
            st.markdown("**Relative loss**: the same, minus the model without a shortcut that saw the same batches.")
            show(training.relative, link)
    if "copy_loss" in found:
        st.markdown(
            "**Copying**: some tokens here can only be guessed by looking back at what came before; the loss there."
        )
        show(training.copy_loss, link)
    if "train_loss" in found:
        st.markdown("**Training loss**: the surprise per token, in nats, on the batches that were being learned from.")
        show(training.train_loss, link)


def _step(link: Link) -> Link:
    """A slider over the steps at which gradients were written down; it follows the step of model A until it is moved."""
    steps = training.logged(source(), link)
    led = max((s for s in steps if s <= (link.whole("step") or steps[-1])), default=steps[0])
    at = url.choose("Written down at step", "at", steps, led, slider=True)
    return link if at == led else link.but(at=at)


def _gradients(link: Link, found: set[str]) -> None:
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
    names = training.learning(source(), link)
    of = url.choose("Model", "of", names, show=lambda n: LABELS.get(n, n)) if len(names) > 1 else names[0]
    return link.but(of=of)


def _coefficients(link: Link, found: set[str]) -> None:
    st.markdown(
        "Numbers the shortcut itself learns: with what weight each earlier output enters what the next block reads."
    )
    show(training.coefficients, link)


def _quantity(link: Link) -> Link:
    ask, (first, second) = source(), st.columns(2)
    found = training.inside(training.quantities(ask, link))
    with first:
        quantity = url.choose("Quantity", "quantity", found, "update_ratio", show=lambda m: m.replace("_", " "))
    with second:
        where = url.choose("Where", "where", training.places(ask, link, quantity), show=plots.site)
    return _axes(link.but(quantity=quantity, where=where))


def _inside(link: Link, found: set[str]) -> None:
    st.markdown("What a recorder took from the batches trained on; the mean over heads where there are several.")
    show(training.recorded, link)


def _pace(link: Link, found: set[str]) -> None:
    views = {"learning_rate": training.learning_rate, "tokens_per_second": training.pace,
             "seconds_per_step": training.seconds, "recorder_share": training.recording_share}  # fmt: skip
    for name, function in views.items():
        if name in found:
            show(function, link)


PARTS = {
    "loss": (_axes, _loss), "gradients": (_step, _gradients), "coefficients": (_series, _coefficients),
    "inside": (_quantity, _inside), "pace": (_axes, _pace),
}  # fmt: skip
"""Of each part: what adds its choices to the link, and what draws it from the link and the quantities there are."""
