"""Prompt: one text, two models side by side: where they look, what they carry, what they say next."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from app import state, url
from workbench import plots
from workbench.errors import WorkbenchError

TEXT = "def mean(values):\n    return sum(values) / len(values)\n"
LETTERS = "Kq7fW2mZxR0bTn5LsYd8HcVjA3pGeUi9"  # as many as the demo's models learned to copy


def draw() -> None:
    st.title("Prompt")
    entries, _ = state.listing()
    ready = [e for e in entries if e.steps]
    if not ready:
        st.info("No checkpoint here yet: `make demo` trains models, and the first checkpoints appear within seconds.")
        return
    runs = [e for e in state.choose_set(ready) if e.steps]
    names = [e.name for e in runs]
    left, right = st.columns(2)
    prefer = [next((n for n in names if f"-{a}-" in n), names[0]) for a in ("transformer", "resformer")]
    with left:
        a = url.choose("Left model", "left", names, prefer[0])
    with right:
        b = url.choose("Right model", "right", names, prefer[1])
    pair = [next(e for e in runs if e.name == n) for n in (a, b)]
    common = sorted(set(pair[0].steps) & set(pair[1].steps))
    if not common:
        st.info("These two have no training step in common yet; choose others or wait for their next checkpoint.")
        return
    repeated = pair[0].kind == "repeated"
    said = "Symbols; the model sees them twice in a row" if repeated else "Text"
    about = f"At most {state.MOST_TOKENS} tokens. Ctrl+Enter runs it."
    about += " The demo's models learned to copy 32 symbols; at other lengths they may fail." if repeated else ""
    text = state.prompt(said, LETTERS if repeated else TEXT, about)
    first, second, third = st.columns([2, 1, 1])
    with first:
        step = url.choose("Training step", "step", common, common[-1], slider=True)
    with second:
        layer = url.choose("Layer", "layer", list(range(pair[0].n_layers)), pair[0].n_layers - 1)
    with third:
        head = url.choose("Head", "head", list(range(pair[0].n_heads)), 0)
    try:
        with st.spinner("Running both models …"):
            looks = [state.look(e, step, text) for e in pair]
    except WorkbenchError as error:
        st.warning(url.plain(error), icon=":material/edit:")
        return
    _figures(pair, looks, step, layer, head)


def _figures(pair: list[state.Entry], looks: list[state.Look], step: int, layer: int, head: int) -> None:
    titles = [e.name + (" (architecture assumed)" if k.assumed else "") for e, k in zip(pair, looks, strict=True)]
    st.header("Where it looks")
    st.markdown(
        "Each row is a token that attends, each column an earlier token it attends to; each row sums to 1. "
        "A bright first column is an attention *sink*, a bright diagonal a head that looks at itself or just before."
    )
    maps = [(t, k.patterns[layer, head], k.tokens) for t, k in zip(titles, looks, strict=True)]
    under = f"layer {layer}, head {head}, training step {step}; one text, no averaging"
    state.show(lambda: plots.attention_pair(maps, "Attention", under), state.pattern_table(maps), "attention")
    st.header("What it carries")
    st.markdown(
        "How long each token's value is in this layer. **Own** is what the layer computes itself; **effective** is what "
        "attention really sums, after the shortcut has added the first layer's part. In an ordinary Transformer "
        "the two are the same."
    )
    parts = [(t, k.values[k.values["layer"] == layer], k.tokens) for t, k in zip(titles, looks, strict=True)]
    values = pd.concat([part[1] for part in parts])
    state.show(lambda: plots.along_tokens(parts, f"Length of the values, layer {layer}"), values, "values")
    st.header("What comes next")
    found = [(t, e.series, k.next_tokens, k.next_chances) for t, e, k in zip(titles, pair, looks, strict=True)]
    tokens = pd.concat([pd.DataFrame({"model": t, "token": n, "probability": p}) for t, _, n, p in found])
    state.show(lambda: plots.next_tokens(found), tokens, "next")
    with st.expander("Every token, and how well each model saw it coming"):
        told = {"position": range(len(looks[0].tokens)), "token": looks[0].tokens}
        told |= {t: [None, *k.chances] for t, k in zip(titles, looks, strict=True)}
        st.dataframe(
            pd.DataFrame(told), hide_index=True, width="stretch", alt="Probability of each token given those before it"
        )


if __name__ == "__main__":
    draw()
