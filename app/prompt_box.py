"""The prompt of the pages that read one text, mirrored in the URL; long texts are stored in the runs folder."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from pathlib import Path

import streamlit as st

from workbench.data.examples import Example, examples
from workbench.errors import BadData, WorkbenchError
from workbench.files import digest, write_text
from workbench.runs.run import Run
from workbench.views import Link
from workbench.views.source import IDS, LETTERS, PROMPTS, example

from . import widgets
from .cached_source import cached_source

MAX_PROMPT, MAX_IN_LINK = 100_000, 200  # characters
TEXT_PX = 84
READ = (
    ("Text", "Long texts are stored."),
    ("Symbols, as the task writes them; the first starts it", "Triggers are the last symbols of the alphabet."),
    ("Symbols; the model reads them twice in a row", "The demo's models learned to copy 32 symbols."),
)
"""Label and hint of the box, by how often letters are read in a row."""
OF_A_PROMPT = ("position", "target", "against", "lock", "queries", "keys")
"""Keys that mean places or tokens of one prompt; another prompt takes them out of the URL."""


def prompt_box(link: Link) -> Link:
    """The prompt, mirrored in the address; a long one is stored in the runs folder and linked by its hash."""
    source = cached_source()
    if "torch" not in sys.modules:
        with st.spinner("Loading the numerical libraries, once for each start of the server"):
            importlib.import_module("workbench.prompts.tokens")
    entry = source.subjects(link)[0].entry
    default = example(entry)
    label, hint = READ[LETTERS.get(entry.kind, 0)]
    label = "Token ids; this model came without a tokenizer" if default == IDS else label
    about = f"Ctrl+Enter runs it. {hint}"
    _text_area(label, default, about, source.folder / PROMPTS)
    if label == "Text":
        _examples()
    link = link.but(prompt=st.query_params.get("prompt"), stored=st.query_params.get("stored"))
    try:
        source.prompt(link)
    except BadData:  # the page says so above the box, which then shows what is used instead
        link = link.but(stored=None)
    _caution(link)
    return link


def _caution(link: Link) -> None:
    """Say where a prompt is longer than what the model was trained on."""
    source = cached_source()
    subject = source.subjects(link)[0]
    if subject.entry.imported:
        return
    with contextlib.suppress(WorkbenchError):  # a prompt that cannot be read is told where it is read
        long, trained = len(source.tokens(subject, source.prompt(link))), Run.open(subject.entry.path).train.T
        if long > trained:
            st.warning(
                f"{long} tokens: this model was trained on {trained} at a time, so what it does beyond them says little.",
                icon=":material/straighten:",
            )


def _examples() -> None:
    """Texts to begin with, one phenomenon each, and what to look at in the one that is shown."""
    texts = {example.phenomenon: example for example in examples()}
    shown = next((e for e in texts.values() if e.text == st.query_params.get("prompt")), None)
    with st.container(horizontal=True, gap="xsmall", vertical_alignment="center"):
        st.menu_button("Examples", list(texts), key="w_example", on_click=_take_example, args=(texts,), type="tertiary",
                       icon=":material/lightbulb:")  # fmt: skip
        if shown:
            st.caption(f"**{shown.phenomenon}**: {shown.look}", width="stretch")


def _take_example(texts: dict[str, Example]) -> None:
    chosen = texts.get(st.session_state["w_example"])
    if chosen:
        take(chosen)


def take(chosen: Example) -> None:
    """Make an example the prompt of all pages, and its second text the one to patch into."""
    gone = dict.fromkeys(("stored", *OF_A_PROMPT))
    widgets.update_url(**gone | {"prompt": chosen.text, "other": chosen.other})


def _text_area(label: str, default: str, about: str, folder: Path) -> None:
    """A text area mirrored in the URL: short texts as they are, long ones stored in the runs folder and linked by hash."""
    stored, text = st.query_params.get("stored"), st.query_params.get("prompt", default)
    if stored is not None:
        path = folder / f"{stored}.txt"
        if re.fullmatch(r"[0-9a-f]{16}", stored) and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
        else:
            widgets.warn_ignored("stored prompt", stored)
    st.session_state["w_prompt"] = text[:MAX_PROMPT]
    st.text_area(
        label, key="w_prompt", on_change=_keep_prompt, args=(folder,), help=about, max_chars=MAX_PROMPT, height=TEXT_PX
    )


def _keep_prompt(folder: Path) -> None:
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
        st.toast("The runs folder cannot be written, so this prompt is not in the link.")
