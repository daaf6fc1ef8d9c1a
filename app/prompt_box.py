"""The prompt of the pages that read one text, mirrored in the URL; long texts are stored in the runs folder."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import streamlit as st

from workbench import prompts
from workbench.data.example_prompts import Example, examples
from workbench.errors import BadData, WorkbenchError
from workbench.file_io import digest, write_text
from workbench.plots.attention_maps import percentage
from workbench.runs.run import Run
from workbench.views import Link
from workbench.views.source import IDS, LETTERS, PROMPTS, example, prompt_notes

from . import url_widgets as widgets
from .cached_source import cached_source

MAX_PROMPT, MAX_IN_LINK = 100_000, 200  # characters
TEXT_PX = 84
LABELS = (
    ("Text", "Long texts are stored."),
    ("Symbols", "Triggers are the last symbols of the alphabet."),
    ("Symbols, read twice", "The demo's models learned to copy 32 symbols."),
)
"""Label and hint of the box, by how often letters are read in a row."""
OF_A_PROMPT = ("position", "target", "against", "lock", "queries", "keys")
"""Keys that mean places or tokens of one prompt; another prompt takes them out of the URL."""


def prompt_box(link: Link) -> Link:
    """Draw the prompt's box and return the link with the prompt."""
    source = cached_source()
    if "torch" not in sys.modules:
        with st.spinner("Loading PyTorch"):
            importlib.import_module("workbench.prompts.prompt")
    subject = source.subjects(link)[0]
    default = example(subject.entry)
    label, hint = LABELS[LETTERS.get(subject.entry.kind, 0)]
    label = "Token ids (no tokenizer)" if default == IDS else label
    _text_area(label, default, f"Ctrl+Enter runs it. {hint}", source.folder / PROMPTS)
    if label == "Text":
        texts = {example.phenomenon: example for example in examples()}
        shown = next((e for e in texts.values() if e.text == st.query_params.get("prompt")), None)

        def take() -> None:
            if example := texts.get(st.session_state["w_example"]):
                take_example(example)

        with st.container(horizontal=True, gap="xsmall", vertical_alignment="center"):
            st.menu_button(
                "Examples", list(texts), key="w_example", on_click=take, type="tertiary", icon=":material/lightbulb:"
            )
            if shown:
                st.caption(f"**{shown.phenomenon}**: {shown.look}", width="stretch")
    link = link.but(prompt=st.query_params.get("prompt"), stored=st.query_params.get("stored"))
    try:
        source.prompt(link)
    except BadData:  # `_text_area` has warned and shows what is used instead
        link = link.but(stored=None)
    for note in prompt_notes(subject.entry, source.prompt(link)):
        st.warning(note, icon=":material/straighten:")
    if not subject.entry.imported:
        with contextlib.suppress(WorkbenchError):  # a prompt that cannot be read is refused where it is read
            length, trained = len(source.tokens(subject, source.prompt(link))), Run.open(subject.entry.path).train.T
            if length > trained:
                words = f"{length} tokens, trained on {trained}: results beyond them are unreliable."
                st.warning(words, icon=":material/straighten:")
    return link


def choose_token(
    link: Link, text: str | None, label: str, key: str, *, position: int = -1, but: int | None = None,
    none: str | None = None, **kwargs: Any,
) -> Link:  # fmt: skip
    """A select box of the likeliest tokens after a position of a text, written under `key`; `none` is the label of no token."""
    source = cached_source()
    top = source.query(prompts.next_tokens, source.subjects(link)[0], text, position=position, top=50).top
    top = top[top["id"] != but]
    names: dict[Any, str] = {} if none is None else {none: "none"}
    of = "A: " * link.on("compare")
    names |= {
        int(i): f"{t}  ({of}{percentage(p)})"
        for i, t, p in zip(top["id"], top["token"], top["probability"], strict=True)
    }
    token = widgets.choose(label, key, list(names), show=names.__getitem__, **kwargs)
    return link.but(**{key: None if token == none else token})


def take_example(example: Example) -> None:
    """Make an example the prompt of all pages, and its second text the one to patch into."""
    gone = dict.fromkeys(("stored", *OF_A_PROMPT))
    widgets.update_url(**gone | {"prompt": example.text, "other": example.other})


def _text_area(label: str, default: str, about: str, folder: Path) -> None:
    """A text area mirrored in the URL: short texts directly, long ones by the hash of a file in the runs folder."""
    stored, text = st.query_params.get("stored"), st.query_params.get("prompt", default)
    if stored is not None:
        path = folder / f"{stored}.txt"
        if re.fullmatch(r"[0-9a-f]{16}", stored) and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
        else:
            widgets.warn_ignored("stored prompt", stored)

    def keep() -> None:
        text = st.session_state["w_prompt"]
        gone = dict.fromkeys(("prompt", "stored", *OF_A_PROMPT))
        if len(text) <= MAX_IN_LINK:
            widgets.update_url(**gone | {"prompt": text})
            return
        name = digest(text.encode("utf-8", "replace"))
        try:
            write_text(folder / f"{name}.txt", text)
            widgets.update_url(**gone | {"stored": name})
        except (WorkbenchError, UnicodeError):
            widgets.update_url(**gone)
            st.toast("The runs folder is read-only, so the link does not hold this prompt.")

    st.session_state["w_prompt"] = text[:MAX_PROMPT]
    st.text_area(label, key="w_prompt", on_change=keep, help=about, max_chars=MAX_PROMPT, height=TEXT_PX)
