"""Start: what the demo asked, what came out, and what this size cannot tell."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from app import state, url
from workbench import findings, plots

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


def draw() -> None:
    st.title("What does a shortcut for values change?")
    entries, _ = state.listing()
    if not entries:
        st.info("No trained models here yet. In the project's folder, run this; the page fills as results arrive:")
        st.code("make demo", language="bash")
        st.caption(f"Looked in {url.plain(state.root())}; another folder: `workbench app --runs DIR`.")
        st.button("Look again", icon=":material/refresh:")
        return
    st.markdown(WORDS)
    here = {e.architecture for e in entries}
    st.markdown("\n".join(f"- **{state.name_of(name)}**: {about}." for name, about in MODELS.items() if name in here))
    status = state.demo_status()
    live = bool(status and status["running"])
    has_maps = _attention_runs() != []
    st.fragment(_live, run_every=2 if live else None)(live, has_maps)
    _attention()
    _limits()
    st.subheader("Where to go next")
    for page, title, icon in (
        ("xray", "X-ray: four questions about one model, answered", ":material/radiology:"),
        ("training", "Training: which model predicts better, seed by seed", ":material/trending_down:"),
        ("depth", "Depth: any measure, layer by layer, before and after training", ":material/layers:"),
        ("prompt", "Prompt: type a text and compare two models on it", ":material/chat:"),
    ):
        url.link(f"views/{page}.py", title, icon)


def _live(was_live: bool, had_maps: bool) -> None:
    """The two experiments; drawn anew every two seconds while the demo runs."""
    status = state.demo_status()
    if status and not status["finished"]:
        left = f", about {status['left_s']:.0f} s left" if status["left_s"] is not None and status["running"] else ""
        st.progress(
            min(1.0, status["ready"] / max(status["planned"], 1)),
            f"{status['ready']} of {status['planned']} models ready{left}",
        )
        if not status["running"]:
            st.warning("The demo stopped before its end. `make demo` goes on where it was.")
    for name, error in (status or {"failed": {}})["failed"].items():
        st.warning(f"{url.plain(name)} failed: {url.plain(error)}")
    if was_live and (not (status and status["running"]) or (not had_maps and _attention_runs())):
        st.rerun()
    runs = state.demo_runs("race")
    st.header("1. The race to copying")
    st.markdown(
        "Each sequence is 32 random symbols, then the same 32 once more. The first half cannot be guessed. The second half "
        "can, by looking back at what followed last time, and at some point in training each model finds out how: its loss "
        "falls off a cliff. The question is **when**. All models of one seed start from the same weights, see the same "
        "sequences, and differ only in their shortcut. (The copy always begins at the same distance, so a head that looks "
        "back by counting does as well here as one that recognises symbols.)"
    )
    frame = state.table(runs, "telemetry", ["copy_loss"])
    if frame.empty:
        st.info("No model has begun yet; the first curve appears within a minute of `make demo`.")
    else:
        state.show(lambda: plots.race(frame), frame, "race")
        formed = findings.formation_steps(frame)
        steps = findings.formation_table(formed)
        st.markdown("The step at which each seed's loss falls below half of its start:")
        st.dataframe(steps, hide_index=True, key="formed", alt="The step each model learned to copy at, per seed")
        said, meaning = findings.race_verdict(formed), findings.race_meaning(formed)
        unfinished = " So far, while models are still training." if status and status["running"] else ""
        if said.endswith("disjoint."):
            st.success(f"**{said}**{unfinished} {meaning}")
        else:
            st.info(f"**{said}**{unfinished}")
    st.header("2. What do deep values carry?")
    st.markdown(
        "Trained on real text. **Token identity** is the share of a value's variation that the token alone explains, whatever "
        "stands around it. At 1 the value is a mere lookup of its token; lower, and it carries context too. Solid lines are the "
        "trained models, dashed ones the same models before training: only the difference was learned. First-layer values, and "
        "all of SVFormer's, are lookups by construction."
    )
    runs = state.demo_runs("text")
    measured = state.table(runs, "records", ["token_identity_share", "value_ablation"])
    shares = measured[
        (measured["metric"] == "token_identity_share")
        & measured["site"].isin(["own_v", "v"])
        & measured["control"].isna()
    ]
    if shares.empty:
        st.info("Measured once the first text model is trained.")
        return
    state.show(lambda: plots.plot(shares), shares, "identity")
    st.markdown(
        "Is the rest, the context, needed? The check: replace every value after the first layer by the average value of its "
        "token, or by nothing at all, and see how much worse the model predicts. A short full bar beside a tall pale one means "
        "that what these values do, the token alone could have done."
    )
    state.show(lambda: plots.ablation(measured), measured[measured["metric"] == "value_ablation"], "ablation")


def _attention_runs() -> list[state.Entry]:
    return [e for e in state.demo_runs("race") if len(e.steps) > 1]


@st.fragment
def _attention() -> None:
    """The copying head in two architectures, step by step."""
    ready = _attention_runs()
    if not ready:
        return
    st.subheader("Watch the copying head appear")
    st.markdown(
        "Each row is a token that attends, each column an earlier one it attends to. Drag the step: the bright diagonal that "
        "appears in the lower half is a head that looks back to the symbol that followed last time."
    )
    names = [e.name for e in ready]
    left, right = st.columns(2)
    prefer = [next((n for n in names if f"-{a}-" in n), names[0]) for a in ("svformer", "transformer")]
    with left:
        a = url.choose("Left model", "race_left", names, prefer[0])
    with right:
        b = url.choose("Right model", "race_right", names, prefer[1])
    pair = [next(e for e in ready if e.name == n) for n in (a, b)]
    common = sorted(set(pair[0].steps) & set(pair[1].steps))
    step = url.choose("Training step", "race_step", common, common[2 * len(common) // 3], slider=True)
    maps = state.head_maps(pair, step)
    if maps is not None:
        numbers = pd.DataFrame({"model": [m[0] for m in maps]})
        under = f"the head that copies best after training, on one fixed sequence; training step {step}"
        state.show(
            lambda: plots.attention_pair(maps, "Attention of the copying head", under),
            numbers,
            "race_maps",
            numbers=None,
        )


def _limits() -> None:
    runs = state.demo_runs("text")
    frame = state.table(runs, "records", ["loss", "sink_mass", "sink_rate"], quiet=True)
    st.subheader("What this size cannot tell")
    lines = findings.unresolved(frame)
    st.markdown("\n".join(f"- {line}" for line in lines))


if __name__ == "__main__":
    draw()
