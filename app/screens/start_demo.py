"""The demo's story on the Start page: where attention rests, the race to copying, what deep values carry, what this size cannot tell."""

from __future__ import annotations

import streamlit as st

from workbench.models.registry import ARCHITECTURES
from workbench.views import Link, Source, start

from .. import widgets
from ..cached_source import cached_source
from .demo_experiments import deep_values, race, sinks, verdict, verdicts
from .demo_heads import copying_heads, resting_heads

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
    own = [e for name in start.demo.EXPERIMENTS for e in start.demo.runs(source, name)]
    here = {e.architecture for e in (*own, *start.demo.text_models(source))}
    with st.expander("What does a shortcut for values change? The question, and the models here"):
        st.markdown(WORDS)
        st.markdown("\n".join(f"- **{a.label}**: {a.plain}." for name, a in ARCHITECTURES.items() if name in here))
    status = start.demo.status(source.folder)
    live = bool(status and status.running)
    every = LIVE if live else None
    st.fragment(_progressing, run_every=every)(live, _ready(source))
    st.header("1. Where does attention concentrate?", anchor=False)
    st.fragment(sinks, run_every=every)(link)
    st.fragment(resting_heads)(link)
    st.header("2. The race to copying", anchor=False)
    st.fragment(race, run_every=every)(link)
    st.fragment(copying_heads)(link)
    st.header("3. What do deep values carry?", anchor=False)
    st.fragment(deep_values, run_every=every)(link)
    st.subheader("What this size cannot tell", anchor=False)
    st.markdown("\n".join(f"- {verdict(judged)}" for judged in verdicts("text", start.demo.LIMITS)))


def _ready(source: Source) -> tuple[bool, bool]:
    """Which experiments have models whose heads can be looked at."""
    return bool(start.demo.resters(source)), bool(start.demo.racers(source))


def _progressing(was_live: bool, had: tuple[bool, bool]) -> None:
    """How far the demo is; the page is drawn anew once there are heads to look at, and at the end."""
    source = cached_source()
    status = start.demo.status(source.folder)
    if was_live:
        st.session_state["drawn"] = []  # the live figures below draw anew
        if not (status and status.running) or _ready(source) != had:
            st.rerun()
    if status:
        _progress(status)


def _progress(status: start.demo.Status) -> None:
    if not status.finished:
        left = f", about {status.left_s:.0f} s left" if status.left_s is not None and status.running else ""
        share = min(1.0, status.ready / max(status.planned, 1))
        st.progress(share, f"{status.ready} of {status.planned} models ready{left}")
        if not status.running:
            st.warning("The demo stopped before its end. `make demo` goes on where it was.")
    for name, error in status.failed.items():
        st.warning(f"{widgets.escaped(name)} failed: {widgets.escaped(error)}")
