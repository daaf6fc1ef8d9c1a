"""The three experiments of the demo's story on the Start page, each with its figures, its steps and its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import streamlit as st

from workbench import plots
from workbench.errors import WorkbenchError
from workbench.statistics.formation import formation_steps, sink_steps
from workbench.views import Link, start

from .. import widgets
from ..cached_source import cached_source
from ..figures import show

if TYPE_CHECKING:
    import pandas as pd

    from workbench.claims.judging import Judged
    from workbench.runs.catalogue import Entry


def sinks(link: Link) -> None:
    """Where attention comes to rest: its course, and the step at which it passes one half."""
    drawing = show(start.demo.forming, link)
    st.markdown(
        "Every sequence begins with the same *start token*; after that, each symbol hints at the next, and some, the *triggers*, call "
        "for a copy of the symbol before them. A head that copies has nothing to do anywhere else, but its weights must add up to 1. "
        "So it learns to **rest**: to look at the start token, whose value it learns to make small. That is an *attention sink*. "
        "The question is **when** it forms, and whether values shared between layers, or a gate that can close a head, change that."
    )
    if drawing is None:
        return
    st.markdown("The step at which the strongest head gives the start token half of its attention:")
    _steps(sink_steps(start.demo.sink_records(cached_source())), "sunk")
    st.caption(
        "What this does not show: how often real text calls for a head that rests. There is one head in each layer and hardly an MLP, "
        "which would take over. A model that is late within these steps may form its sink in longer training: delay is not prevention."
    )
    _boxes("sinks", start.demo.SINK_CLAIM)


def race(link: Link) -> None:
    """When each model learns to copy."""
    drawing = show(start.demo.race, link)
    st.markdown(
        _shipped(start.demo.race_models(cached_source()), "--full")
        + "Each sequence is 16 to 32 random symbols, then the same again to its end. What comes first cannot be guessed. The repetition "
        "can, by looking back at what followed last time, and at some point in training each model finds out how: its loss "
        "falls off a cliff. The question is **when**. All models of one seed start from the same weights, see the same "
        "sequences, and differ only in their shortcut. (The distance of the copy changes from sequence to sequence: a head has to "
        "recognise symbols, counting back does not help.)"
    )
    if drawing is None:
        return
    st.markdown("The step at which each seed's loss falls below half of its start:")
    _steps(formation_steps(drawing.table), "formed")
    _boxes("race", start.demo.RACE_CLAIM)


def _steps(steps: pd.DataFrame, key: str) -> None:
    st.dataframe(plots.formation_table(steps), hide_index=True, key=key, alt="The step for each model and seed")


def _boxes(experiment: str, claim: str) -> None:
    """What a claim says of the runs so far."""
    status = start.demo.status(cached_source().folder)
    if status and status.running:
        st.caption("So far, from the models that are trained:")
    for judged in verdicts(experiment, [claim]):
        box = {"supported": st.success, "refuted": st.error}.get(judged.verdict.status, st.info)
        box(verdict(judged))


def _shipped(entries: Sequence[Entry], option: str) -> str:
    """A sentence on runs that ship with the project; empty where the models were trained here."""
    if not any(e.shipped for e in entries):
        return ""
    seeds = len({e.seed for e in entries})
    return f"These numbers are of a shipped study ({seeds} seeds); `workbench demo {option}` trains such models here. "


def deep_values(link: Link) -> None:
    """How much of deep values is their token, and what it costs to replace them."""
    st.markdown(
        _shipped(start.demo.text_models(cached_source()), "--all")
        + "Trained on real text. **Token identity** is the share of a value's variation that the token alone explains, whatever "
        "stands around it. At 1 the value is a mere lookup of its token; lower, and it carries context too. Solid lines are the "
        "trained models, dashed ones the same models before training: only the difference was learned. First-layer values, and "
        "all of SVFormer's, are lookups by construction. Queries and keys are the control: they are a matter of the token as much."
    )
    if show(start.demo.identity, link) is not None:
        st.markdown(
            "Is the rest, the context, needed? The check: replace every value after the first layer by the average value of its "
            "token, or by nothing at all, and see how much worse the model predicts. A short full bar beside a tall pale one means "
            "that what these values do, the token alone could have done."
        )
        show(start.demo.replaced, link)


def verdicts(experiment: str, claims: Sequence[str]) -> Sequence[Judged]:
    """What the claims say of the demo's runs; why, where their files cannot be read."""
    try:
        return start.demo.verdicts(cached_source(), experiment, claims)
    except WorkbenchError as error:
        st.warning(widgets.escaped(error))
        return ()


def verdict(judged: Judged) -> str:
    """A claim and its verdict, safe inside a page."""
    claim, verdict = judged.claim, judged.verdict
    return f"{widgets.escaped(claim.text)} **{widgets.escaped(verdict.words.capitalize())}.** {widgets.escaped(verdict.sentence)}"
