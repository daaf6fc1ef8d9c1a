"""Training: losses, gradients, coefficients and throughput as training logged them; live while runs are written."""

from __future__ import annotations

import streamlit as st

from workbench import plots
from workbench.models.architecture_names_and_colours import architecture_label
from workbench.places import module
from workbench.views import Link, training

__package__ = module("app.screens")  # Streamlit runs this file as a script

from .. import url_widgets as widgets
from ..cached_source import cached_source
from ..figure_menu import show
from ..model_selection import choose_models
from ..page_layout import FIGURE_PX, PANELS_PX, controls, figures_side_by_side, page, toolbar, wait_for_own_runs

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
PACE = (
    (training.learning_rate_schedule, "learning_rate", ""), (training.pace, "tokens_per_second", ""),
    (training.seconds, "seconds_per_step", ""), (training.recording_share, "recorder_share", ""),
)  # fmt: skip
PARTS = {
    "loss": "Loss", "gradients": "Gradients", "coefficients": "Coefficients", "inside": "Recorded quantities",
    "pace": "Learning rate and throughput",
}  # fmt: skip
COEFFICIENTS = "Learned coefficients of the shortcut: the weight of each earlier output in the next block's input."
INSIDE = "Measured on the training batches; the mean over heads where there are several."
BUDGET = "Validation loss minus the Transformer's; grey: published runs."
PUBLISHED = "Right: the weights that a public training learned, of other tensors."
LIVE = 3  # seconds between looks at runs that are being written


def training_page(link: Link) -> None:
    source, compared = cached_source(), link.on("compare")
    with controls():
        first = st.container(width="content")  # the parts keep their place
        link = link if compared else choose_models(link)
        quantities = training.logged_quantities(source, link)
        parts, shown = training.present(quantities), ""
        more = st.container(width="content")
        if parts:
            with first:
                shown = widgets.segments("Part", "show", parts, show=PARTS.__getitem__)
    if parts:
        link = link.but(show=shown)
        with toolbar("options"):
            link = _choices(link, quantities)
        if shown in ("loss", "inside", "pace"):
            with more, st.popover("More", icon=":material/tune:"):
                link = choose_axes(link)
    runs = training.runs(source, link)
    live = any(e.being_written for e in runs)

    @st.fragment(run_every=LIVE if live else None)
    def figures() -> None:
        """Draw the figures of a part, again every few seconds while runs are written."""
        if live:
            writing = [e for e in training.runs(cached_source(), link) if e.being_written]
            st.session_state["drawn"] = []
            if not writing:
                st.rerun()
            names = ", ".join(widgets.escaped(e.name) for e in writing[:4]) + " and others" * (len(writing) > 4)
            st.caption(f":material/fiber_manual_record: Being written: {names}. Updated every {LIVE} seconds.")
        quantities = training.logged_quantities(cached_source(), link)
        if shown == "gradients":
            show(training.gradients, link, about=GRADIENTS)
            show(training.gradients_over_time, link, about=GRADIENTS)
        elif shown == "coefficients":
            show(training.learned_coefficients, link, about=COEFFICIENTS)
            if not compared:
                show(training.beside_published_coefficients, link, about=PUBLISHED)
            widgets.page_link("depth", "Depth weights of one checkpoint", ":material/layers:", weights="1")
        elif shown == "inside":
            show(training.recorded, link, about=INSIDE)
        else:
            with figures_side_by_side(PANELS_PX if compared else FIGURE_PX):
                for view, quantity, about in LOSSES if shown == "loss" else PACE:
                    only_one = compared or {e.series for e in runs} == {training.VANILLA}
                    if quantity in quantities and not (only_one and view is training.relative):
                        show(view, link, about=about)
            if shown == "loss" and "validation_loss" in quantities and not compared:
                words = "Over tokens per parameter, beside published runs"
                panel = st.expander(words, icon=":material/query_stats:", on_change="rerun", key="open_budget")
                if panel.open:
                    with panel:
                        show(training.by_budget, link, about=BUDGET)

    @st.fragment(run_every=LIVE if live else None)
    def wait_for_numbers() -> None:
        if training.logged_quantities(cached_source(), link):
            st.rerun()

    if parts:
        figures()
    elif all(e.imported for e in runs):
        st.info("Imported checkpoints have no training log. The other pages show these models.")
    else:
        st.info("Nothing is logged yet. The first numbers appear a few seconds after training starts.")
        wait_for_numbers()


def _choices(link: Link, quantities: set[str]) -> Link:
    """The controls of the shown part."""
    source, shown = cached_source(), link.text("show")
    if shown == "loss" and len(training.domains(source, link)) > 1:
        texts = {training.TOTAL: "mean over domains", training.EACH: "each domain"}
        domain = widgets.choose("Validation text", "domain", list(texts), show=texts.__getitem__, width=170)
        link = link.but(domain=domain)
    elif shown == "gradients":  # the step follows that of model A until it is moved
        steps = training.logged(source, link)
        default = max((s for s in steps if s <= (link.whole("step") or steps[-1])), default=steps[0])
        at = widgets.choose("Logged step", "at", steps, default, slider=True, width=300)
        return link if at == default else link.but(at=at)
    elif shown == "coefficients":
        if link.on("compare") or not (names := training.learning(source, link)):
            return link
        return link.but(of=widgets.choose("Model", "of", names, show=architecture_label, width=190, only_if_many=True))
    elif shown == "inside":
        names = training.inside(quantities)
        quantity = widgets.choose("Quantity", "quantity", names, "update_ratio", show=widgets.spaced, width=180)
        where = widgets.choose("Site", "where", training.places(source, link, quantity), show=plots.site, width=140)
        link = link.but(quantity=quantity, where=where)
    return link


def choose_axes(link: Link) -> Link:
    """The axes, smoothing and error bars of curves over training."""
    axes = {"step": "training steps"}
    if all(e.tokens for e in training.runs(cached_source(), link)):
        axes["tokens"] = "tokens"
    x = widgets.choose("Horizontal axis", "x", list(axes), "step", show=axes.__getitem__, only_if_many=True)
    log = widgets.toggle("Logarithmic axis", "log")
    if link.text("show") == "loss":
        words = {1: "none"} | {n: f"{n} logged steps" for n in (5, training.SMOOTH, 50, 200)}
        smooth = widgets.choose("Smoothing", "smooth", list(words), training.SMOOTH, show=words.__getitem__)
        link = link.but(smooth=smooth)
    return link.but(x=x, log=int(log), spread=widgets.choose_spread())


if __name__ == "__main__":
    page("training", ABOUT, training_page)
    wait_for_own_runs(LIVE)
