"""Small faults that a program could have had: places of a source file where one edit changes what it computes.

A mutant replaces one expression or statement: a comparison's edge, a sign, a factor, a term of a sum, an axis, an index or
constant off by one, a default, a check that no longer refuses, a call that no longer happens. Annotations, docstrings, the
words of messages, `strict=` of zip, `frozen=`, `kw_only=` and `repr=` of a dataclass and what only type checkers read (a
`Protocol`) are left alone. So is what no number and no word depends on, and somebody chose by eye: where figures and pages are
made (`DRAWN`) the sizes, margins, gaps, opacities and frames that an argument or entry names (`_LOOKS`) and how far a shown
number is rounded; limits, waiting times and pixels in a constant that says so (`_LIMITS`), and whether exactly these are let in;
and calls of the garbage collector.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_EDGES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
}  # fmt: skip
_ASSERTIONS = ("strict", "frozen", "kw_only", "repr")  # of zip and of a dataclass: they state what holds already
_LOOKS = re.compile(
    r"(^|_)(height|width|size|opacity|margin|pad|gap|standoff|thickness|spacing|spinner|max_entries|wrap_lines|hide_index|cliponaxis"
    r"|showgrid|zeroline|automargin|alignment)$"
)
_LIMITS = re.compile(r"^(MAX|MOST|CHUNK)_?|_(S|MS|PX)$")
DRAWN = ("workbench/plots/", "workbench/views/", "app/")
_WORDS = (ast.JoinedStr, ast.List, ast.Tuple)
_PATH = re.compile(r"(folder|path|root|runs|directory|parent|here)$")  # what a file's name is joined to by a slash


@dataclass(frozen=True)
class Mutant:
    """One edit: `text` in place of the characters from `start` to `end` of the file at `path` (relative to the root)."""

    path: str
    line: int
    last: int
    kind: str
    start: int
    end: int
    before: str
    text: str
    repeat: int  # how many equal edits stand before it in the file
    always: bool  # the line runs on import

    def key(self) -> str:
        """Equal in two versions of a file as long as the edited text is."""
        return f"{self.path}|{self.kind}|{self.before}|{self.text}|{self.repeat}"

    def applied(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


def mutants_of(root: Path, path: Path) -> list[Mutant]:
    """All mutants of a file, in its order."""
    source = path.read_text(encoding="utf-8")
    whole = ast.parse(source)
    starts = [0]
    for row in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(row.encode()))
    encoded = source.encode()

    def at(row: int, column: int) -> int:
        return len(encoded[: starts[row - 1] + column].decode())

    found: list[Mutant] = []
    seen: dict[tuple[str, str, str], int] = {}
    drawn = path.relative_to(root).as_posix().startswith(DRAWN)
    for node, kind, text, always in _edits(whole, at_import=True, drawn=drawn):
        start, end = at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0)
        before = source[start:end]
        repeat = seen[kind, before, text] = seen.get((kind, before, text), -1) + 1
        lines = (node.lineno, node.end_lineno or node.lineno)
        found.append(Mutant(path.relative_to(root).as_posix(), *lines, kind, start, end, before, text, repeat, always))
    return found


def sample(candidates: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` at random, at most one a line: those with the smallest hash of seed and edit, so that a line elsewhere moves none."""
    chosen: dict[tuple[str, int], Mutant] = {}
    for mutant in sorted(candidates, key=lambda m: hashlib.sha256(f"{seed}|{m.key()}".encode()).digest()):
        if len(chosen) == count:
            break
        chosen.setdefault((mutant.path, mutant.line), mutant)
    return list(chosen.values())


Edit = tuple[ast.expr | ast.stmt, str, str, bool]


def _edits(node: ast.AST, at_import: bool, drawn: bool) -> Iterator[Edit]:
    if _chosen(node, drawn):
        return
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.keyword) and node.arg in _ASSERTIONS:
        return
    if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Protocol" for base in node.bases):
        return
    if isinstance(node, ast.expr | ast.stmt):
        for kind, text in _changes(node):
            yield node, kind, text, at_import
    if isinstance(node, ast.If) and all(isinstance(x, ast.Raise) for x in node.body):
        yield node.test, "removed check", "False", at_import
    inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for name, child in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params"):
            continue
        for at, one in enumerate(child if isinstance(child, list) else [child]):
            if isinstance(one, ast.AST) and not (isinstance(node, ast.Dict) and drawn and _looks(node.keys[at])):
                yield from _edits(one, at_import and not (inside and name == "body"), drawn)


def _looks(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and bool(_LOOKS.search(str(key.value)))


def _chosen(node: ast.AST, drawn: bool) -> bool:
    """What somebody chose by eye, and nothing is computed from."""
    match node:
        case ast.keyword(arg=str() as name):
            return drawn and bool(_LOOKS.search(name))
        case ast.Assign(targets=[ast.Tuple(elts=names)]):
            return all(isinstance(name, ast.Name) and _LIMITS.search(name.id) for name in names)
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name.isupper() and bool(_LIMITS.search(name))
        case ast.Call(func=ast.Name(id="round"), args=[_, ast.Constant()]):
            return drawn
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="gc")))):
            return True
    return False


def _changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(kind, new text) of the edits of one node itself."""
    match node:
        case ast.Compare(ops=[op], comparators=[right]) if type(op) in _EDGES and not _limit(op, right):
            yield "comparison", _with(node, ops=[_EDGES[type(op)]()])
        case ast.BoolOp(op=op):
            yield "and, or", _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.BinOp(left=left, op=op, right=right) if not _wordy(left) and not _wordy(right):
            if type(op) in _ARITHMETIC:
                yield "sign or factor", _with(node, op=_ARITHMETIC[type(op)]())
            if isinstance(op, ast.Add | ast.Sub):
                yield "dropped term", f"({ast.unparse(left)})"
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)):
            yield "axis or index", f"({-value - 1})"
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            yield "sign or factor" if isinstance(node.op, ast.USub) else "removed not", f"({ast.unparse(operand)})"
        case ast.Constant(value=bool() as value):
            yield "switch", str(not value)
        case ast.Constant(value=int() as value):
            yield "off by one", str(value + 1)
        case ast.Constant(value=float() as value):
            yield "constant", repr(value * 2 if value else 1.0)
        case ast.AugAssign(op=op) if type(op) in _ARITHMETIC:
            yield "sign or factor", _with(node, op=_ARITHMETIC[type(op)]())
        case ast.IfExp(test=test):
            yield "swapped branches", _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Expr(value=ast.Call()):
            yield "dropped call", "pass"


def _with(node: ast.AST, **fields: object) -> str:
    """The node's text with other fields; an expression in parentheses."""
    same = dict(ast.iter_fields(node)) | fields
    text = ast.unparse(ast.fix_missing_locations(ast.copy_location(type(node)(**same), node)))
    return f"({text})" if isinstance(node, ast.expr) else text


def _limit(op: ast.cmpop, right: ast.expr) -> bool:
    """Whether exactly the limit is let in: as good as another limit by one, which is left alone as well."""
    return (
        isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
        and isinstance(right, ast.Name)
        and bool(_LIMITS.search(right.id))
    )


def _wordy(node: ast.AST) -> bool:
    """Words, lists of them and paths: arithmetic on them ends in a TypeError, a fault that needs no test."""
    if isinstance(node, _WORDS) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        return True
    return isinstance(node, ast.Name | ast.Attribute) and bool(_PATH.search(ast.unparse(node)))
