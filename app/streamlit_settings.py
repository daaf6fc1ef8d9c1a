"""Streamlit settings from `settings.toml`, independent of the working directory."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from streamlit import config

SETTINGS = Path(__file__).with_name("settings.toml")


def apply() -> None:
    """Apply the settings as flags, which override Streamlit's own files.

    Raises `RuntimeError` for a setting that this Streamlit does not know, as some are for security.
    """
    wanted = dict(_flat(tomllib.loads(SETTINGS.read_text(encoding="utf-8"))))
    options = config.get_config_options(force_reparse=True, options_from_flags=wanted)
    unknown = [name for name, value in wanted.items() if name not in options or options[name].value != value]
    if unknown:
        raise RuntimeError(f"this Streamlit does not take {', '.join(unknown)}")


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
