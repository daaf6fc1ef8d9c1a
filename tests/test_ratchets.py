"""Numbers of the code base that may only fall; a change that lowers one lowers its limit here too.

A package may grow only where another shrinks in the same commit: the limits of all add up to at most `TOTAL`.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest
from sources import parsed

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow  # whoever tries the project out changes no line of it
TOTAL = 59_902  # lines of Python in workbench/ and app/
LINES = {
    "app": 3_977,
    "workbench": 1_267,
    "workbench/checkpoints": 4_603,
    "workbench/claims": 4_186,
    "workbench/cli": 1_507,
    "workbench/data": 1_631,
    "workbench/interventions": 2_520,
    "workbench/jobs": 431,
    "workbench/kernels": 957,
    "workbench/measurement": 1_135,
    "workbench/metrics": 1_809,
    "workbench/models": 6_226,
    "workbench/observing": 8_539,
    "workbench/plots": 3_387,
    "workbench/prompts": 3_127,
    "workbench/reports": 1_557,
    "workbench/runs": 2_452,
    "workbench/sklearn": 633,
    "workbench/statistics": 590,
    "workbench/storage": 888,
    "workbench/studies": 906,
    "workbench/training": 1_809,
    "workbench/views": 5_765,
}
USED_ONCE = 300  # private helpers whose name stands twice in its file
HARD = {".py": 0.015, ".md": 0.01}  # share of sentences that open without a noun or use a word of `HARD_WORDS`
LONG = {".py": 0.01, ".md": 0.02}  # share of sentences of more than 30 words
HARD_WORDS = re.compile(
    r"\b(told|tells|said so|says so|says which|stands?|stood|goes on|went on|let go|lets go|at hand|of its own|of one's own|of theirs|"
    r"of yours|of ours|nobody|somebody|whoever|thrice|by itself alone|what was|what is|what it|what they|what a|what the|what stays|"
    r"that of|those of|those that|than those|is none|are none|there is none|as it is|as they are|as far as|be it|held against|"
    r"comes last|come last|in its words|in turn the|beside it|beside each|wherever|whatever|howsoever|hence|lest|thereby|therewith|"
    r"of now|of each|kept|begun|say them apart|took off|had to do with)\b",
    re.IGNORECASE,
)
OPENERS = re.compile(
    r"(what|whose|where|of|that|until|without those|as it|as they|than|but|how much|how many|whether|when|to be|nothing|none)\b",
    re.IGNORECASE,
)


@cache
def product():
    """Source and tree of every Python file of the product."""
    paths = [p for folder in ("workbench", "app") for p in sorted((ROOT / folder).rglob("*.py"))]
    return {p.relative_to(ROOT): parsed(p) for p in paths}


def package(path):
    return path.parts[0] if path.parts[0] == "app" or len(path.parts) == 2 else "/".join(path.parts[:2])


def sentences(text):
    text = re.sub(r"```.*?```|~~~.*?~~~", " ", text, flags=re.DOTALL)
    text = re.sub(r"(?m)^(?: {4,}|\t).*$|^\s*\|.*$|^\s*(?:#+ .*|!\[.*|<!--.*)$", " ", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "CODE", text))
    for block in re.split(r"\n\s*\n|\n\s*[-*] |\n\s*\d+\. ", text):
        parts = re.split(r"(?<=[.!?:])\s+(?=[A-Z`*(])", " ".join(block.split()))
        yield from (part for part in parts if len(part.split()) >= 3)


def prose(ending):
    if ending == ".md":
        files = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False)
        names = files.stdout.split() or [
            str(p.relative_to(ROOT)) for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
        ]
        texts = [(ROOT / name).read_text(encoding="utf-8") for name in names if not name.startswith(("LOG", "tests/"))]
    else:
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts = [
            doc
            for _, tree in product().values()
            for node in ast.walk(tree)
            if isinstance(node, kinds) and (doc := ast.get_docstring(node))
        ]
    return [sentence for text in texts for sentence in sentences(text)]


def test_no_package_grows_beyond_its_limit():
    lines = Counter()
    for path, (text, _) in product().items():
        lines[package(path)] += text.count("\n")
    assert {name: n for name, n in lines.items() if n > LINES.get(name, 0)} == {}
    assert sum(LINES.values()) <= TOTAL


def test_helpers_that_are_used_once_get_fewer():
    once = []
    for path, (text, tree) in product().items():
        mentions = Counter(re.findall(r"\w+", text))
        names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        once += [f"{path}:{n}" for n in names if n.startswith("_") and not n.startswith("__") and mentions[n] == 2]
    assert len(once) <= USED_ONCE


def test_every_public_name_has_one_owner():
    owners = defaultdict(list)
    for path, (_, tree) in product().items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith(
                "_"
            ):
                owners[node.name].append(str(path))
    owners.pop("main", None)  # of a script
    assert {name: paths for name, paths in owners.items() if len(paths) > 1} == {}


@pytest.mark.parametrize("ending", [".py", ".md"])
def test_sentences_stay_plain_and_short(ending):
    found = prose(ending)
    hard = [s for s in found if OPENERS.match(s) or HARD_WORDS.search(s)]
    long = [s for s in found if len(s.split()) > 30]
    assert len(hard) / len(found) <= HARD[ending], hard[:20]
    assert len(long) / len(found) <= LONG[ending], long[:20]
