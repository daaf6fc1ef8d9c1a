"""The layout's own rules: few rooms, small files and functions, one direction between files, words of the field."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from sources import parsed

ROOT = Path(__file__).parents[1]
PRODUCT = ("workbench", "app", "analyses")
MAX_LOOSE, MAX_FILE, MAX_FUNCTION = 8, 600, 80


@cache
def nodes(path):
    """Imports and functions of a file, wherever they stand."""
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in statements(parsed(path)[1]) if isinstance(node, kinds)]


def statements(node):
    """All statements below one; `ast.walk` goes through the expressions too, ten times as many."""
    for part in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, part, ()):
            yield child
            yield from statements(child)


def python(*folders):
    return [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py")) if "golden" not in p.parts]


def module(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module(path): path for path in python(*PRODUCT)}


def home(name, node):
    """The full name of what `from ... import` names in a module: one dot is its own package, two are the one around it."""
    package = name.split(".") if MODULES[name].name == "__init__.py" else name.split(".")[:-1]
    above = package[: len(package) - node.level + 1] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])])


def imports(name):
    """Modules of ours that a module imports anywhere: at the top, in a function, for type checking alone."""
    found = set()
    for node in nodes(MODULES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            where = home(name, node)
            full = {alias.name: f"{where}.{alias.name}" for alias in node.names}
            found |= {full[a] if full[a] in MODULES else where for a in full}
    return (found & MODULES.keys()) - {name}


def circles():
    """Groups of files that import each other in a loop (Tarjan 1972), packages' faces taken as what they hand on."""
    graph = {name: imports(name) for name in MODULES if MODULES[name].name != "__init__.py"}
    index, low, stack, found = {}, {}, [], []

    def visit(name):
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name] & graph.keys()):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def test_few_modules_stand_loose_at_the_top_of_the_library():
    loose = [p.name for p in (ROOT / "workbench").glob("[!_]*.py")]
    assert len(loose) <= MAX_LOOSE, loose


@pytest.mark.slow
def test_no_files_import_each_other_in_a_circle():
    assert circles() == []


@pytest.mark.parametrize("folder", [*PRODUCT, "tests", "benchmarks"])
def test_files_are_short(folder):
    long = {str(p.relative_to(ROOT)): n for p in python(folder) if (n := len(p.read_text().splitlines())) > MAX_FILE}
    assert long == {}


@pytest.mark.slow
@pytest.mark.parametrize("folder", PRODUCT)
def test_functions_are_short(folder):
    long = {
        f"{path.relative_to(ROOT)}:{node.name}": lines
        for path in python(folder)
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (lines := node.end_lineno - node.lineno + 1) > MAX_FUNCTION
    }
    assert long == {}
