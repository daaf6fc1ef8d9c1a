"""What tests of the dashboard's pages share: links that say more than the defaults, and what a page shows."""

import base64
import json
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np

APP = Path(__file__).parent.parent / "app"
FOLDERS = ("populated", "empty", "missing", "one", "damaged", "half_written", "foreign")
DEEP = {
    "start": {"show": "here", "a": "text-resformer-s1"},
    "training": {"show": "gradients", "models": "svformer,resformer", "a": "text-resformer-s1"},
    "depth": {"metric": "importance_entropy", "models": "svformer,resformer", "seed": "1", "a": "text-resformer-s1"},
    "attention": {"layer": "0", "head": "1", "a": "text-resformer-s1", "step": "8", "prompt": "return values"},
    "heads": {"metric": "sink_mass", "end": "lowest", "a": "text-resformer-s1", "layer": "1", "head": "0"},
    "prompt": {"a": "text-resformer-s1", "step": "8", "prompt": "return values", "position": "1", "show": "layers", "quantity": "rank"},
    "intervene": {"a": "text-resformer-s1", "step": "8", "prompt": "return values", "show": "sweep", "sweep": "remove:part=mlp"},
}  # fmt: skip
"""A link to each page that says more than the defaults."""
FIGURES = {"start": 0, "training": 2, "depth": 2, "attention": 0, "heads": 2, "prompt": 1, "intervene": 1}
"""Figures of those links on a folder that has everything; the attention page draws itself, and the text of these runs is not there."""
COMPARE = {"compare": "1", "a": "text-resformer-s0", "b": "text-transformer-s1", "step": "20", "step_b": "0"}


def charts(at):
    """The figures on a page, from top to bottom."""
    return [figure(e.proto) for e in at.get("bidi_component") if is_of(e.proto, "figure")]


def pictures(at):
    """What the attention element of a page gets, none where it has none."""
    return [zlib.decompress(e.proto.bytes) for e in at.get("bidi_component") if is_of(e.proto, "attention")]


def weights_sent(data):
    """Weights of the enlarged head of the one model that the attention element gets."""
    end = 4 + int.from_bytes(data[:4], "little")
    (panel,) = json.loads(data[4:end])["panels"]
    begin, count = panel["weights"]
    return np.frombuffer(data[end + begin : end + begin + 2 * count], np.uint16) * (panel["top"] / 65535)


def is_of(proto, name):
    return proto.component_name.endswith(f"workbench_{name}")


def figure(proto):
    """A figure as the browser gets it: its id, which ends with its key, all that is drawn as text, and what it says in words."""
    return SimpleNamespace(id=proto.id, spec=proto.bytes.decode(), alt=json.loads(proto.bytes)["alt"])


def chart(at, name):
    """The figure of a view, as the browser gets it."""
    (found,) = [json.loads(c.spec) for c in charts(at) if f"figure_{name}" in c.id]
    return found


def numbers(values):
    """Numbers of a figure's trace, however they travel."""
    if isinstance(values, dict):
        found = np.frombuffer(base64.b64decode(values["bdata"]), dtype=values["dtype"])
        return found.reshape([int(n) for n in values["shape"].split(",")]) if "shape" in values else found
    return np.asarray(values, dtype=float)


def address(at, key):
    """A key of the address, as one text."""
    value = at.query_params[key]
    return value if isinstance(value, str) else value[0]


def elements(at, runs):
    """What stands on a page from top to bottom, a line each: its kind, label, key, choices and value; frames of others left out."""
    found = []
    for one in at.main:
        facts = [getattr(one, name, None) for name in ("label", "key", "options", "value", "disabled", "help")]
        if not isinstance(facts[3], bool | int | float | str | list | tuple):
            facts = facts[:2]  # boxes, tables and what elements of ours hold
        if any(fact is not None for fact in facts):
            line = " | ".join([one.type, *("" if fact is None else str(fact) for fact in facts)])
            found.append(line.replace("\\", "").replace(str(runs), "RUNS"))
    return found


def said(at):
    kinds = (
        "title",
        "header",
        "subheader",
        "markdown",
        "info",
        "warning",
        "success",
        "error",
        "caption",
        "text",
        "code",
    )
    return " ".join(str(e.value) for kind in kinds for e in at.get(kind))


def ignored(at):
    return [i.value for i in at.info if "ignored" in i.value]
