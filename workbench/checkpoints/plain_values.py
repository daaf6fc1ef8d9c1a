"""Plain replacements for objects that training scripts save beside weights: numpy scalars and arrays, Namespaces, paths and dates.

PyTorch's safe unpickler calls one of these functions for each such name in a file, so that no other constructor runs. Numbers become
Python numbers, Namespaces dictionaries, paths text, arrays and dates `NotRead`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any


class NotRead:
    """A value that is neither weights nor settings, such as a random generator's state."""

    def __new__(cls, *_: Any) -> NotRead:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        """Ignore the state."""

    def __repr__(self) -> str:
        return "a value that is not read"


class Settings(dict[str, Any]):
    """A dictionary in place of an `argparse.Namespace` or `types.SimpleNamespace`."""

    def __setstate__(self, state: Any) -> None:
        self.update(state if isinstance(state, dict) else {})


class _Type:
    """A numpy type, as `f8` with its byte order."""

    def __init__(self, code: Any = "", *_: Any) -> None:
        self.code, self.order = str(code), "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1] if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">") else "="


def _scalar(kind: Any = None, data: Any = b"", *_: Any) -> Any:
    """Return the number in the bytes of a numpy scalar."""
    match = re.fullmatch(r"([fiub])([1248])", getattr(kind, "code", ""))
    if match is None or not isinstance(data, bytes) or len(data) != int(match[2]):
        return NotRead()
    letters = {
        "f": {2: "e", 4: "f", 8: "d"},
        "i": {1: "b", 2: "h", 4: "i", 8: "q"},
        "u": {1: "B", 2: "H", 4: "I", 8: "Q"},
    }
    letter = "?" if match[1] == "b" else letters[match[1]].get(len(data), "")
    return struct.unpack(f"{kind.order}{letter}", data)[0] if letter else NotRead()


_NUMPY: dict[str, Callable[..., Any]] = {"scalar": _scalar, "_reconstruct": NotRead}
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path", "PurePath")
STAND_INS: dict[str, Callable[..., Any]] = {
    "argparse.Namespace": Settings, "types.SimpleNamespace": Settings, "collections.defaultdict": lambda *_: {},
    "numpy.dtype": _Type, "numpy.ndarray": NotRead, "numpy.core.numeric._frombuffer": NotRead,
    "numpy._core.numeric._frombuffer": NotRead,
    **{f"numpy.{core}.multiarray.{name}": function for core in ("core", "_core") for name, function in _NUMPY.items()},
    **{
        f"{module}.{name}": lambda *parts: "/".join(map(str, parts)).replace("//", "/")
        for module in ("pathlib", "pathlib._local") for name in _PATHS
    },
    **{f"datetime.{name}": NotRead for name in ("datetime", "date", "time", "timedelta", "timezone")},
    **dict.fromkeys(("builtins.dict", "builtins.list", "builtins.int", "builtins.float", "builtins.set"), NotRead),
}  # fmt: skip
"""Functions that PyTorch's safe unpickler calls for these global names."""
