"""Widgets that mirror the URL.

A widget takes its value from the URL at each run of the script, and writes the URL when a visitor changes it, so back, forward and
deep links work. An option of the link that does not exist is ignored, with a message on the page.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import streamlit as st

from workbench.plots import SPREADS, style
from workbench.views.page_links import PAGES, SELECTION, Link, split_list
from workbench.views.pins import escaped as escaped

KEYS = {*SELECTION, *(key for page in PAGES.values() for key in page.keys)}
SHARED = ("layer", "head", "target", "against", "metric", "variant", "position", "other")
"""Keys with one meaning on several pages, besides those of every page."""
OF_ONE_PAGE = {k for k in KEYS if sum(k in page.keys for page in PAGES.values()) > 1} - {*SHARED}
"""Keys whose meaning depends on the page."""
SAME_PAGE = "go"
"""Key of links to the page itself, for which Streamlit leaves the address as it is; `main.py` writes the address and removes the key."""
MAX_TEXT, MAX_TOLD = 2000, 60  # characters of a short text, of an ignored option
FEW = 8  # choices in a message


def typeset(text: object) -> str:
    """A sentence escaped for Markdown, with at most three significant digits and true minus signs."""
    return escaped(style.with_signs(str(text)))


def spaced(name: str) -> str:
    """A registered name as text."""
    return name.replace("_", " ")


def current_link(page: str) -> Link:
    """Return the address of this page as a link, without keys of other pages."""
    known = (*SELECTION, *PAGES[page].keys)
    return Link(page, {key: st.query_params[key] for key in known if key in st.query_params})


def warn_ignored(label: str, asked: object, choices: Sequence[Any] = ()) -> None:
    """Note an option of the link that does not exist, and the choices; the page shows the message under its header."""
    value, numbers = escaped(str(asked)[:MAX_TOLD]), [c for c in choices if isinstance(c, int)]
    between = "; " if any("," in str(c) for c in choices) else ", "
    there = between.join(escaped(c) for c in choices[:FEW]) + (
        f" … {escaped(choices[-1])}" if len(choices) > FEW else ""
    )
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)) == list(choices):
        there = f"{numbers[0]} to {numbers[-1]}"
    rest = f" Available: {there}." if there else ""
    message = f"The link asks for “{label.lower()}” {value}, which does not exist; it was ignored.{rest}"
    st.session_state.setdefault("told", {})[message] = None


Clears = Sequence[str] | Callable[[Any], Sequence[str]]
"""Keys that leave the URL with an old option, or a function of the new option that returns them."""


def _mirror(key: str, write: Callable[[Any], str], clears: Clears = (), keeps: Sequence[str] = ()) -> None:
    value = st.session_state[f"w_{key}"]
    gone = clears(value) if callable(clears) else clears
    absent = [k for k in keeps if k not in st.query_params and f"w_{k}" in st.session_state]
    shown = {k: st.session_state[f"w_{k}"] for k in absent}
    update_url(**dict.fromkeys(gone), **shown, **{key: None if value is None else write(value)})


def unused(label: str, value: str, width: Any = "stretch") -> None:
    """A control in its usual place without a choice; `value` says what is shown."""
    st.session_state[f"off_{label}"] = value
    st.text_input(label, key=f"off_{label}", disabled=True, width=width)


def choose(
    label: str, key: str, options: Sequence[Any], default: Any = None, *, show: Callable[[Any], str] = str,
    slider: bool = False, only_if_many: bool = False, clears: Clears = (), elsewhere: Sequence[str] = (), keeps: Sequence[str] = (),
    **kwargs: Any,
) -> Any:  # fmt: skip
    """A select box (or slider) over options, mirrored in the URL under `key`; returns None without options.

    Args:
        only_if_many: Draw nothing for a single option.
        elsewhere: Values of the key on other pages; the default replaces them without a warning.
        keeps: Keys whose shown choice, also a default, enters the URL with another option.
    """
    if not options:
        return None
    default = default if default in options else options[0]
    asked, texts = st.query_params.get(key), {str(option): option for option in options}
    if asked is not None and asked not in texts and asked not in elsewhere:
        warn_ignored(label, asked, options if show is str else [show(o) for o in options])
    if only_if_many and len(options) < 2:
        return options[0]
    st.session_state[f"w_{key}"] = texts.get(asked or "", default)
    if slider and len(options) < 2:
        unused(label, show(options[0]), kwargs.get("width", "stretch"))
        return options[0]
    widget: Any = st.select_slider if slider else st.selectbox
    return widget(
        label, options, key=f"w_{key}", format_func=distinct_labels(options, show), on_change=_mirror,
        args=(key, str, clears, keeps), **kwargs,
    )  # fmt: skip


def choose_spread() -> str:
    """The error bars of curves over seeds."""
    return str(choose("Error bars", "spread", list(SPREADS), show=SPREADS.__getitem__))


def distinct_labels(options: Sequence[Any], show: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return labels of options; equal labels get the option itself, as a browser answers with the label."""
    words = {option: show(option) for option in options}
    times = Counter(words.values())
    return {o: f"{text} ({o})" if times[text] > 1 else text for o, text in words.items()}.__getitem__


def segments(
    label: str, key: str, options: Sequence[str], default: str | None = None, *, show: Callable[[str], str] = str
) -> str:
    """A segmented control over a few options, mirrored in the URL under `key`."""
    default = default if default in options else options[0]
    asked = st.query_params.get(key)
    if asked is not None and asked not in options:
        warn_ignored(label, asked, [show(o) for o in options])
    st.session_state[f"w_{key}"] = asked if asked in options else default
    chosen = st.segmented_control(
        label, options, key=f"w_{key}", format_func=show, on_change=_mirror, args=(key, str), required=True,
        label_visibility="collapsed",
    )  # fmt: skip
    return str(chosen or default)


def choose_many(
    label: str, key: str, options: Sequence[str], default: Sequence[str] | None = None, *,
    show: Callable[[str], str] = str, clears: Sequence[str] = (), **box: Any,
) -> list[str]:  # fmt: skip
    """Pills over options, or a select box with the settings `box`, mirrored in the URL as `a,b`; by default all are selected."""
    asked = st.query_params.get(key)
    wanted = [o for o in options if asked is not None and o in split_list(asked)]
    if asked and (gone := [name for name in split_list(asked) if name not in options]):
        warn_ignored(label, ", ".join(gone), [show(o) for o in options])
    st.session_state[f"w_{key}"] = wanted if wanted or asked == "" else list(options if default is None else default)
    given: Any = {"key": f"w_{key}", "format_func": show, "on_change": _mirror, "args": (key, ",".join, clears)}
    draw: Any = st.multiselect if box else st.pills
    return list(draw(label, options, **given, **(box or {"selection_mode": "multi"})) or ())


def range_slider(label: str, key: str, count: int) -> tuple[int, int]:
    """A slider with two ends over 0..count - 1, mirrored in the URL as `first-last`; by default the full range."""
    asked = st.query_params.get(key)
    named = re.fullmatch(r"(\d{1,9})-(\d{1,9})", asked or "")
    first, last = (int(named[1]), int(named[2])) if named else (0, count - 1)
    if asked is not None and (named is None or not first <= last < count):
        warn_ignored(label, asked, range(count))
        first, last = 0, count - 1
    if count < 2:
        return 0, count - 1
    st.session_state[f"w_{key}"] = (first, last)
    write = "{0[0]}-{0[1]}".format
    found: Any = st.slider(label, 0, count - 1, key=f"w_{key}", on_change=_mirror, args=(key, write))
    return found[0], found[1]


def update_url(**changes: Any) -> None:
    """Change several keys of the URL in one step of the history; None removes one."""
    kept = {**st.query_params.to_dict(), **{k: None if v is None else str(v) for k, v in changes.items()}}
    st.query_params.from_dict({k: v for k, v in kept.items() if v is not None})


def toggle(label: str, key: str, **kwargs: Any) -> bool:
    """A toggle, mirrored in the URL as 0 or 1; off by default."""
    st.session_state[f"w_{key}"] = st.query_params.get(key) == "1"
    return st.toggle(label, key=f"w_{key}", on_change=_mirror, args=(key, lambda on: str(int(on))), **kwargs)


def text_line(
    label: str, key: str, default: str = "", *, rows: int = 1, clears: Sequence[str] = (), **kwargs: Any
) -> str:
    """A short text, mirrored in the URL, without the key if it is empty; with several `rows` it keeps line ends."""
    st.session_state[f"w_{key}"] = st.query_params.get(key, default)[:MAX_TEXT]

    def keep() -> None:
        update_url(**dict.fromkeys(clears), **{key: st.session_state[f"w_{key}"] or None})

    common = {"key": f"w_{key}", "on_change": keep, "max_chars": MAX_TEXT, **kwargs}
    return st.text_input(label, **common) if rows == 1 else st.text_area(label, height=28 * rows + 20, **common)


def warn_of_unknown_keys() -> None:
    if set(st.query_params) - set(KEYS):
        st.info("The link has unknown options; they were ignored.", icon=":material/link_off:")


def page_link(page: str, label: str, icon: str, *, target: st.Page | None = None, **changes: str | None) -> None:
    """A link to a page that keeps the selection, with some options changed, or left out if None."""
    kept = {k: v for k, v in st.query_params.items() if k in KEYS - OF_ONE_PAGE and k not in changes}
    carried = kept | {key: value for key, value in changes.items() if value is not None}
    carried |= {SAME_PAGE: "1"} if page == st.session_state.get("page") else {}
    st.page_link(target or f"screens/{page}.py", label=label, icon=icon, query_params=carried)


def navigation(link: Link | None) -> None:
    """Fill the list of pages in the sidebar; its links keep the address, and the experiment of a model or the model of a head.

    An experiment that a page of all runs opens on by default is left out: a page of a model opens on a text model.
    """
    if "navigation" not in st.session_state:  # a page alone, without `main.py`
        return
    place, targets = st.session_state["navigation"]
    kept = ("set", "a") if "head" in st.query_params or "layer" in st.query_params else ("set",)
    chosen = link is not None and ("a" in link.options or "set" in st.query_params)
    carried = {key: value for key in kept if link is not None and chosen and (value := link.text(key)) is not None}
    with place:
        for name, target in targets.items():
            title, icon = (PAGES[name].title, PAGES[name].icon) if name in PAGES else ("Kept", "push_pin")
            page_link(name, title, f":material/{icon}:", target=target, **carried)
