"""Training: losses, gradients, coefficients and throughput as training logged them; live while runs are written."""

from __future__ import annotations

import streamlit as st

from workbench import plots
from workbench.models.registry import architecture_label
from workbench.places import module
from workbench.views import Link, training

__package__ = module("app.screens")  # Streamlit runs this file as a script

from .. import widgets
from ..cached_source import cached_source
from ..figures import show
from ..page_frame import FIGURE_PX, PANELS_PX, figures_side_by_side, page, toolbar
from ..selection import choose_models

ABOUT = (
    "What `workbench train`, or a `Recorder` in a loop of your own, logged during training. Lines are means over seeds, bands their "
    "range. Bands do not decide whether models differ: the paired differences on the Start page do."
)
GRADIENTS = (
    "Gradient norm by weight matrix: queries (`W_Q`), keys (`W_K`), values (`W_V`), attention output (`W_O`), then the MLP. "
    "Dark: hardly any gradient. A large gradient of the first layer's `W_V` is expected where later layers use its values."
)
LOSSES = (
    (training.validation_loss, "validation_loss", "Loss per token on held-out text. **Lower is better.**"),
    (training.relative, "validation_loss", "Loss minus that of the Transformer of the same seed."),
    (training.copy_loss, "copy_loss", "Loss of the tokens that repeat earlier ones."),
    (training.train_loss, "train_loss", "Loss per token on the training batches."),
)
COEFFICIENTS = "Learned coefficients of the shortcut: the weight of each earlier output in the next block's input."
LIVE = 3  # seconds between looks at runs that are being written


def _body(link: Link) -> None:
    source = cached_source()
    with toolbar("controls"):
        if not link.on("compare"):
            link = choose_models(link)
        parts = training.present(training.logged_quantities(source, link))
        if parts:
            shown = widgets.segments("Part", "show", parts, show=lambda name: PARTS[name][0])
            link = PARTS[shown][1](link.but(show=shown))
    runs = training.runs(source, link)
    live = any(e.being_written for e in runs)
    if parts:
        st.fragment(_figures, run_every=LIVE if live else None)(link, shown, live)
    elif all(e.imported for e in runs):
        st.info("Imported checkpoints have no training log. The other pages show these models.")
    else:
        st.info("Nothing is logged yet. The first numbers appear a few seconds after training starts.")
        st.fragment(_wait_for_numbers, run_every=LIVE if live else None)(link)


def _wait_for_numbers(link: Link) -> None:
    if training.logged_quantities(cached_source(), link):
        st.rerun()


def _wait_for_runs() -> None:
    if cached_source().own():
        st.rerun()


def _figures(link: Link, shown: str, was_live: bool) -> None:
    """The figures of a part, redrawn every few seconds while runs are written."""
    source = cached_source()
    if was_live:
        writing = [e for e in training.runs(source, link) if e.being_written]
        st.session_state["drawn"] = []
        if not writing:
            st.rerun()
        names = ", ".join(widgets.escaped(e.name) for e in writing[:4]) + (" and others" if len(writing) > 4 else "")
        st.caption(f":material/fiber_manual_record: Being written: {names}. Updated every {LIVE} seconds.")
    PARTS[shown][2](link, training.logged_quantities(source, link))


def _axes(link: Link) -> Link:
    axes = {"step": "training steps"}
    if all(e.tokens for e in training.runs(cached_source(), link)):
        axes["tokens"] = "tokens"
    with st.popover("More", icon=":material/tune:"):
        x = widgets.choose("Horizontal axis", "x", list(axes), "step", show=axes.__getitem__, only_if_many=True)
        log = widgets.toggle("Logarithmic axis", "log")
        if link.text("show") == "loss":
            words = {1: "none"} | {n: f"{n} logged steps" for n in (5, training.SMOOTH, 50, 200)}
            link = link.but(
                smooth=widgets.choose("Smoothing", "smooth", list(words), training.SMOOTH, show=words.__getitem__)
            )
    return link.but(x=x, log=int(log))


def _loss_choices(link: Link) -> Link:
    if len(training.domains(cached_source(), link)) > 1:
        texts = {training.TOTAL: "mean over domains", training.EACH: "each domain"}
        domain = widgets.choose("Validation text", "domain", list(texts), show=texts.__getitem__, width=170)
        link = link.but(domain=domain)
    return _axes(link)


def _loss(link: Link, quantities: set[str]) -> None:
    compared = link.on("compare")
    with figures_side_by_side(PANELS_PX if compared else FIGURE_PX):
        for view, quantity, about in LOSSES:
            if quantity in quantities and not (compared and view is training.relative):
                show(view, link, about=about)


def _gradient_choices(link: Link) -> Link:
    """The step of the gradients; it follows the step of model A until it is moved."""
    steps = training.logged(cached_source(), link)
    default = max((s for s in steps if s <= (link.whole("step") or steps[-1])), default=steps[0])
    at = widgets.choose("Logged step", "at", steps, default, slider=True, width=300)
    return link if at == default else link.but(at=at)


def _gradients(link: Link, quantities: set[str]) -> None:
    show(training.gradients, link, about=GRADIENTS)
    show(training.gradients_over_time, link, about=GRADIENTS)


def _coefficient_choices(link: Link) -> Link:
    names = [] if link.on("compare") else training.learning(cached_source(), link)
    if not names:
        return link
    return link.but(of=widgets.choose("Model", "of", names, show=architecture_label, width=190, only_if_many=True))


def _coefficients(link: Link, quantities: set[str]) -> None:
    show(training.learned_coefficients, link, about=COEFFICIENTS)


def _recorded_choices(link: Link) -> Link:
    source = cached_source()
    names = training.inside(training.logged_quantities(source, link))
    quantity = widgets.choose("Quantity", "quantity", names, "update_ratio", show=widgets.spaced, width=180)
    where = widgets.choose("Site", "where", training.places(source, link, quantity), show=plots.site, width=140)
    return _axes(link.but(quantity=quantity, where=where))


def _recorded(link: Link, quantities: set[str]) -> None:
    show(
        training.recorded, link, about="Measured on the training batches; the mean over heads where there are several."
    )


def _throughput(link: Link, quantities: set[str]) -> None:
    views = {
        "learning_rate": training.learning_rate_schedule, "tokens_per_second": training.pace,
        "seconds_per_step": training.seconds, "recorder_share": training.recording_share,
    }  # fmt: skip
    with figures_side_by_side(PANELS_PX if link.on("compare") else FIGURE_PX):
        for name, view in views.items():
            if name in quantities:
                show(view, link)


PARTS = {
    "loss": ("Loss", _loss_choices, _loss), "gradients": ("Gradients", _gradient_choices, _gradients),
    "coefficients": ("Coefficients", _coefficient_choices, _coefficients),
    "inside": ("Recorded quantities", _recorded_choices, _recorded),
    "pace": ("Learning rate and throughput", _axes, _throughput),
}  # fmt: skip
"""Of each part: its name, a function that adds its choices to the link, and one that draws it."""


if __name__ == "__main__":
    page("training", ABOUT, _body)
    if not cached_source().own():
        st.fragment(_wait_for_runs, run_every=LIVE)()
