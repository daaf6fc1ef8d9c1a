"""Folders of the project's parts, in a clone and in an installation.

    in a clone    app/  analyses/  data/  beside workbench/       python -m analyses.race_to_induction
    installed     workbench/app  /analyses  /shipped  inside it   python -m workbench.analyses.race_to_induction

A wheel installs one package (`setup.py`). Imports inside `app/` and `analyses/` are relative, so that the same files work in both.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from itertools import pairwise
from pathlib import Path

from workbench.environment import CACHE, XDG_CACHE, cache_folder, variable

HERE = Path(__file__).parent
INSTALLED = (HERE / "app").is_dir()
ANALYSES = (HERE if INSTALLED else HERE.parent) / "analyses"
README = "README.md"


def complete_data() -> Path:
    """Return the folder in the cache for the complete shipped data, of which a wheel holds a part; `workbench data` fills it."""
    return cache_folder(variable(CACHE), variable(XDG_CACHE)) / "data"


def lenses_folder() -> Path:
    """Return the folder of tuned lenses in the cache."""
    return cache_folder(variable(CACHE), variable(XDG_CACHE)) / "lenses"


def _shipped() -> Path:
    if not INSTALLED:
        return HERE.parent / "data"
    part = HERE / "shipped"
    with contextlib.suppress(OSError, RuntimeError):  # no complete data, or no home
        if (complete_data() / README).read_bytes() == (part / README).read_bytes():
            return complete_data()
    return part


SHIPPED = _shipped()
"""Text, evidence, trained models and prompts; see its `README.md`."""
DISTRIBUTION = "value-residual-workbench"


def module(name: str) -> str:
    """Return the full name of `app.server` or `analyses.tables`."""
    return f"workbench.{name}" if INSTALLED else name


def studies() -> dict[str, Path]:
    """Return the files of the shipped studies, by name."""
    return {path.stem: path for path in sorted((ANALYSES / "studies").glob("*.toml"))}


def absent_studies() -> list[str]:
    """Return the shipped studies that this installation lacks: `workbench data` adds them."""
    listed = re.findall(r"`evidence/(\w+)/`", (SHIPPED / README).read_text(encoding="utf-8"))
    return [name for name in listed if not (SHIPPED / "evidence" / name).is_dir()]


def plugins(kind: str) -> dict[str, str]:
    """Return the modules that other packages name as entry points `workbench.metrics` or `workbench.architectures`, by module."""
    from importlib.metadata import entry_points

    points = entry_points(group=f"workbench.{kind}")
    return {plugin.module: plugin.dist.name if plugin.dist else "" for plugin in points}


def load_plugins(kind: str) -> None:
    """Import the `plugins` of a kind, which register themselves. Raises `ImportError` naming the package that fails."""
    for module, package in plugins(kind).items():
        try:
            importlib.import_module(module)
        except Exception as error:
            raise ImportError(f"{package}: its entry point workbench.{kind}, {module}, fails: {error}") from error


def install(extra: str) -> str:
    """Return the command that installs an optional part."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def refuse_a_namesake() -> None:
    """Raise `ImportError` if another project's `workbench` was installed into the same folder; our command exits with code 2."""
    theirs = next(HERE.parent.glob("workbench-*.dist-info"), None) if INSTALLED else None
    if theirs is not None:
        refusal = (
            f"{HERE.parent} holds two projects whose package is called workbench, {DISTRIBUTION} and "
            f"{theirs.name.removesuffix('.dist-info')}; each overwrites files of the other. Remove both "
            f"(pip uninstall workbench {DISTRIBUTION}), install one, and give the other an environment of its own"
        )
        ours = {Path(word).stem for word in sys.argv[:1]} & {"workbench", DISTRIBUTION}
        if ours or ("-m", "workbench") in pairwise(sys.orig_argv):
            print(f"workbench: {refusal}", file=sys.stderr)
            sys.exit(2)
        raise ImportError(refusal)
