"""Plain stand-ins for what training scripts leave beside weights: numpy scalars and arrays, Namespaces, paths and dates.

PyTorch's safe unpickler takes a function for each global name that a file may hold. It gets these, so that neither numpy's
nor anyone's constructors run on a file's bytes: numbers become Python numbers, Namespaces become dictionaries, paths become
text, and arrays and dates become `NotRead`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any


class NotRead:
    """The place of a value that is neither weights nor settings, as a random generator's state."""

    def __new__(cls, *_: Any) -> NotRead:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        """Forget it."""

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


def _path(*parts: Any) -> str:
    return "/".join(str(part) for part in parts).replace("//", "/")


def _dictionary(*_: Any) -> dict[Any, Any]:
    return {}


_NUMPY: dict[str, Callable[..., Any]] = {"scalar": _scalar, "_reconstruct": NotRead}
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path", "PurePath")
STAND_INS: dict[str, Callable[..., Any]] = {
    "argparse.Namespace": Settings, "types.SimpleNamespace": Settings, "collections.defaultdict": _dictionary,
    "numpy.dtype": _Type, "numpy.ndarray": NotRead, "numpy.core.numeric._frombuffer": NotRead,
    "numpy._core.numeric._frombuffer": NotRead,
    **{f"numpy.{core}.multiarray.{name}": function for core in ("core", "_core") for name, function in _NUMPY.items()},
    **{f"{module}.{name}": _path for module in ("pathlib", "pathlib._local") for name in _PATHS},
    **{f"datetime.{name}": NotRead for name in ("datetime", "date", "time", "timedelta", "timezone")},
    **dict.fromkeys(("builtins.dict", "builtins.list", "builtins.int", "builtins.float", "builtins.set"), NotRead),
}  # fmt: skip
"""What PyTorch's safe unpickler calls for each of these global names."""
