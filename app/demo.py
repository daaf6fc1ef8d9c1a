"""The demo's story on the Start page: the race to copying with live curves, what deep values carry, what this size cannot tell."""

from __future__ import annotations

import streamlit as st

from app import url
from app.shell import show
from app.source import source
from workbench import findings
from workbench.names import LABELS
from workbench.views import Link, start

WORDS = """
A transformer reads a text as *tokens*, pieces of words. In each layer, *attention* lets every token gather from the tokens
before it: the attention *weight* says how much it takes from each, the *value* is what it takes. Deep layers normally see
only values that have been mixed many times. A **value residual** is a shortcut: it hands the first layer's values, made from
the bare tokens, to the deep layers as well. The models here are small, trained on your machine, and differ in little else:
"""
MODELS = {
    "transformer": "the ordinary model, no shortcut",
    "resformer": "each layer mixes its own values half and half with the first layer's",
    "resformer_constant": "the same, with the first layer's values counted twice",
    "resformer_learnable": "the same, and training finds how much of each",
    "resformer_learnable_plus": "the same, and the layers compete for one trained total",
    "resformer_sparse": "only the last layers mix in the first layer's values, and strongly",
    "resformer_dense": "each layer adds up the values of all layers before it, in trained amounts",
    "svformer": "each layer uses the first layer's values and has none of its own",
    "neutreno": "each layer's attention output is pulled towards the first layer's values",
    "denseformer": "each layer reads a learned average of all earlier layers, not values in particular",
    "gqa": "two heads share each set of keys and values, to save memory",
    "mqa": "all heads share one set of keys and values, to save memory",
    "cla": "every second layer uses the keys and values of the layer before it, to save memory",
    "share_q": "a control: every second layer uses the *queries* of the layer before it",
    "share_k": "a control: every second layer uses the *keys* of the layer before it",
    "share_v": "a control: every second layer uses the *values* of the layer before it",
    "cross_layer": "each layer also attends to the keys and values of the layer before it, at twice the work",
    "cross_layer_all": "each layer also attends to the keys and values of all layers before it",
    "same_key": "each layer averages the values of all layers so far",
    "identity_map": "a control: earlier layers' values are added at their own place, past the attention",
    "residual_q": "a control: the same shortcut on the *queries*, which ask",
    "residual_k": "a control: the same shortcut on the *keys*, which decide where attention goes",
    "residual_attention": "a control: the same shortcut on the attention *weights*",
    "residual_hidden": "a control: the bare tokens are added again to what each layer reads",
    "value_embedding": "the first and last layers add a learned value for each token",
    "bank_of_values": "the last layers look their values up in a table, one for each token",
    "gated_attention": "each layer decides from its input how much of its attention output to let through",
    "cut_skip": "a control: nothing passes by the first layer, so only the shortcut could carry the bare tokens",
    "resformer+neutreno": "the mixed values of ResFormer and the pull of NeuTRENO together",
    "resformer+denseformer": "the mixed values of ResFormer and the averages of DenseFormer together",
    "svformer+gqa": "the first layer's values everywhere, and four heads share each set of keys and values",
    "svformer+cla": "the first layer's values everywhere, and pairs of layers share their keys",
}
"""Architectures in plain words."""
LIVE = 2  # seconds between looks at a demo that runs


def story(link: Link) -> None:
    """What the demo asked, what came out, and what this size cannot tell."""
    ask = source()
    st.subheader("What does a shortcut for values change?")
    st.markdown(WORDS)
    here = {e.architecture for e in (*start.demo_runs(ask, "race"), *start.demo_runs(ask, "text"))}
    st.markdown("\n".join(f"- **{LABELS.get(n, n)}**: {about}." for n, about in MODELS.items() if n in here))
    status = start.demo(ask.folder)
    live = bool(status and status.running)
    st.fragment(_live, run_every=LIVE if live else None)(link, live, bool(start.racers(ask)))
    st.fragment(_heads)(link)
    st.subheader("What this size cannot tell")
    st.markdown("\n".join(f"- {url.plain(line)}" for line in start.limits(ask)))


def _live(link: Link, was_live: bool, had_heads: bool) -> None:
    """The two experiments; drawn anew every two seconds while the demo runs."""
    ask = source()
    status = start.demo(ask.folder)
    if was_live:
        st.session_state["drawn"] = []
        if not (status and status.running) or (not had_heads and start.racers(ask)):
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
    if show(start.identity, link) is not None:
        st.markdown(
            "Is the rest, the context, needed? The check: replace every value after the first layer by the average value of its "
            "token, or by nothing at all, and see how much worse the model predicts. A short full bar beside a tall pale one means "
            "that what these values do, the token alone could have done."
        )
        show(start.replaced, link)


def _progress(status: start.Demo) -> None:
    if not status.finished:
        left = f", about {status.left_s:.0f} s left" if status.left_s is not None and status.running else ""
        share = min(1.0, status.ready / max(status.planned, 1))
        st.progress(share, f"{status.ready} of {status.planned} models ready{left}")
        if not status.running:
            st.warning("The demo stopped before its end. `make demo` goes on where it was.")
    for name, error in status.failed.items():
        st.warning(f"{url.plain(name)} failed: {url.plain(error)}")


def _race(link: Link) -> None:
    st.header("1. The race to copying")
    st.markdown(
        "Each sequence is 32 random symbols, then the same 32 once more. The first half cannot be guessed. The second half "
        "can, by looking back at what followed last time, and at some point in training each model finds out how: its loss "
        "falls off a cliff. The question is **when**. All models of one seed start from the same weights, see the same "
        "sequences, and differ only in their shortcut. (The copy always begins at the same distance, so a head that looks "
        "back by counting does as well here as one that recognises symbols.)"
    )
    drawing = show(start.race, link)
    if drawing is None:
        return
    formed = findings.formation_steps(drawing.table)
    st.markdown("The step at which each seed's loss falls below half of its start:")
    steps = findings.formation_table(formed)
    st.dataframe(steps, hide_index=True, key="formed", alt="The step each model learned to copy at, per seed")
    said, meaning = findings.race_verdict(formed), findings.race_meaning(formed)
    status = start.demo(source().folder)
    so_far = " So far, while models are still training." if status and status.running else ""
    told = st.success if said.endswith("disjoint.") else st.info
    told(f"**{url.plain(said)}**{so_far} {meaning if told is st.success else ''}")


def _heads(link: Link) -> None:
    """The copying head in two architectures, step by step."""
    ask = source()
    names = [e.name for e in start.racers(ask)]
    if not names:
        return
    entries, _, _ = start.pair(ask, Link("start"))
    st.subheader("Watch the copying head appear")
    st.markdown(
        "Each row is a token that attends, each column an earlier one it attends to. Drag the step: the bright diagonal that "
        "appears in the lower half is a head that looks back to the symbol that followed last time."
    )
    left, right = st.columns(2)
    with left:
        link = link.but(left=url.choose("Left model", "left", names, entries[0].name))
    with right:
        link = link.but(right=url.choose("Right model", "right", names, entries[1].name))
    _, common, step = start.pair(ask, link.but(at=None))
    link = link.but(at=url.choose("Training step", "at", common, step, slider=True))
    show(start.copying_heads, link, long="Looking at two heads")
