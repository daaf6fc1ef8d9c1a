"""A view elsewhere: its address for others, and the command that draws it without the dashboard."""

from __future__ import annotations

import shlex
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import streamlit as st

from workbench.environment import BUILDERS, variable
from workbench.views import Link

from .cached_source import cached_source


def address(link: Link) -> str:
    """The address of a view on this server."""
    here = urlsplit(st.context.url or "")  # of the first page it has no path, not even a slash
    return urlunsplit((here.scheme, here.netloc, f"{here.path.rpartition('/')[0]}/{link}", "", ""))


def command(link: Link, options: str) -> str:
    """What draws a link from a terminal; it names the folder of runs where that is not `./runs`."""
    folder = cached_source().folder
    runs = "" if folder == Path("runs").resolve() else f" --runs {shlex.quote(str(folder))}"
    first = f"{BUILDERS}={shlex.quote(builders)} " if (builders := variable(BUILDERS)) else ""
    return f'{first}workbench view "{link}" {options}{runs}'
