"""Python files as text and as trees, read and parsed once for all tests that look at the code itself."""

from __future__ import annotations

import ast
from functools import cache


@cache
def parsed(path):
    text = path.read_text(encoding="utf-8")
    return text, ast.parse(text)
