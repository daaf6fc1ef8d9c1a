"""The demo's story on the Start page: the race to copying with live curves, what deep values carry, what this size cannot tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import streamlit as st

from app import widgets
from app.cached_source import cached_source
from app.figures import show
from app.screens.copying_heads import copying_heads
from workbench import plots
from workbench.errors import WorkbenchError
from workbench.models.registry import ARCHITECTURES
from workbench.statistics.formation import formation_steps
from workbench.views import Link, start

if TYPE_CHECKING:
    from workbench.claims.analysis import Judged

WORDS = """
A transformer reads a text as *tokens*, pieces of words. In each layer, *attention* lets every token gather from the tokens
before it: the attention *weight* says how much it takes from each, the *value* is what it takes. Deep layers normally see
only values that have been mixed many times. A **value residual** is a shortcut: it hands the first layer's values, made from
the bare tokens, to the deep layers as well. The models here are small, trained on your machine, and differ in little else:
"""
LIVE = 2  # seconds between looks at a demo that runs


def story(link: Link) -> None:
    """What the demo asked, what came out, and what this size cannot tell."""
    source = cached_source()
    st.subheader("What does a shortcut for values change?")
    st.markdown(WORDS)
    here = {e.architecture for e in (*start.demo.runs(source, "race"), *start.demo.runs(source, "text"))}
    st.markdown("\n".join(f"- **{a.label}**: {a.plain}." for name, a in ARCHITECTURES.items() if name in here))
    status = start.demo.status(source.folder)
    live = bool(status and status.running)
    st.fragment(_live, run_every=LIVE if live else None)(link, live, bool(start.demo.racers(source)))
    st.fragment(copying_heads)(link)
    st.subheader("What this size cannot tell")
    st.markdown("\n".join(f"- {_verdict(judged)}" for judged in _verdicts("text", start.demo.LIMITS)))


def _live(link: Link, was_live: bool, had_heads: bool) -> None:
    """The two experiments; drawn anew every two seconds while the demo runs."""
    source = cached_source()
    status = start.demo.status(source.folder)
    if was_live:
        st.session_state["drawn"] = []
        if not (status and status.running) or (not had_heads and start.demo.racers(source)):
            st.rerun()
    if status:
        _progress(status)
    _race(link)
    st.header("2. What do deep values carry?")
    st.markdown(
        "Trained on real text. **Token identity** is the share of a value's variation that the token alone explains, whatever "
        "stands around it. At 1 the value is a mere lookup of its token; lower, and it carries context too. Solid lines are the "
        "trained models, dashed ones the same models before training: only the difference was learned. First-layer values, and "
        "all of SVFormer's, are lookups by construction."
    )
    if show(start.demo.identity, link) is not None:
        st.markdown(
            "Is the rest, the context, needed? The check: replace every value after the first layer by the average value of its "
            "token, or by nothing at all, and see how much worse the model predicts. A short full bar beside a tall pale one means "
            "that what these values do, the token alone could have done."
        )
        show(start.demo.replaced, link)


def _progress(status: start.demo.Status) -> None:
    if not status.finished:
        left = f", about {status.left_s:.0f} s left" if status.left_s is not None and status.running else ""
        share = min(1.0, status.ready / max(status.planned, 1))
        st.progress(share, f"{status.ready} of {status.planned} models ready{left}")
        if not status.running:
            st.warning("The demo stopped before its end. `make demo` goes on where it was.")
    for name, error in status.failed.items():
        st.warning(f"{widgets.escaped(name)} failed: {widgets.escaped(error)}")


def _race(link: Link) -> None:
    st.header("1. The race to copying")
    st.markdown(
        "Each sequence is 32 random symbols, then the same 32 once more. The first half cannot be guessed. The second half "
        "can, by looking back at what followed last time, and at some point in training each model finds out how: its loss "
        "falls off a cliff. The question is **when**. All models of one seed start from the same weights, see the same "
        "sequences, and differ only in their shortcut. (The copy always begins at the same distance, so a head that looks "
        "back by counting does as well here as one that recognises symbols.)"
    )
    drawing = show(start.demo.race, link)
    if drawing is None:
        return
    st.markdown("The step at which each seed's loss falls below half of its start:")
    steps = plots.formation_table(formation_steps(drawing.table))
    st.dataframe(steps, hide_index=True, key="formed", alt="The step each model learned to copy at, per seed")
    status = start.demo.status(cached_source().folder)
    if status and status.running:
        st.caption("So far, from the models that are trained:")
    for judged in _verdicts("race", [start.demo.RACE_CLAIM]):
        box = {"supported": st.success, "refuted": st.error}.get(judged.verdict.status, st.info)
        box(_verdict(judged))


def _verdicts(experiment: str, claims: Sequence[str]) -> Sequence[Judged]:
    """What the claims say of the demo's runs; why, where their files cannot be read."""
    try:
        return start.demo.verdicts(cached_source(), experiment, claims)
    except WorkbenchError as error:
        st.warning(widgets.escaped(error))
        return ()


def _verdict(judged: Judged) -> str:
    claim, verdict = judged.claim, judged.verdict
    return f"{widgets.escaped(claim.text)} **{widgets.escaped(verdict.words.capitalize())}.** {widgets.escaped(verdict.sentence)}"
