"""X-ray: one model at a glance, four questions answered from what was measured on it."""

from __future__ import annotations

import functools

import streamlit as st

from app import state, url
from workbench import plots, xrays

LINE = 58  # characters in half a page


def draw() -> None:
    st.title("X-ray of one model")
    entries, _ = state.listing()
    if not entries:
        st.info("No runs here yet: `make demo` trains and measures some.")
        return
    st.markdown(
        "Four questions about one model. Each answer carries its number, what the number would be without any learning or "
        "structure, and its standard error over documents."
    )
    with_text = [e for e in entries if not e.name.startswith("race")] or entries
    names = [e.name for e in with_text]
    name = url.choose("Run", "run", names, names[0])
    entry = next(e for e in with_text if e.name == name)
    frame = state.table([entry], "records", xrays.METRICS)
    missing = sorted(set(xrays.NEEDED) - set(frame["metric"]))
    if missing:
        st.info(f"Not measured on this run yet: {', '.join(m.replace('_', ' ') for m in missing)}. From a terminal:")
        st.code(f"workbench xray {name}", language="bash")
        return
    answers = xrays.answers(frame)
    for pair in (answers[:2], answers[2:]):
        for column, answer in zip(st.columns(2, border=True), pair, strict=True):
            with column:
                st.subheader(answer.question)
                st.write(url.plain(answer.sentence))
                drawn = functools.partial(plots.narrow, answer.figure, LINE)
                state.show(drawn, answer.records, answer.question.split()[0].lower())
    st.caption("The same as one offline page and a picture:")
    st.code(f"workbench xray {name}", language="bash")


if __name__ == "__main__":
    draw()
