"""PyTorch files (`.pt`, `.pth`, `.bin`, `.ckpt`) opened without running code: only state dicts and plain containers are read.

The pickle is read (always with `weights_only=True`) without its tensors, whose places in the file are noted. `torch.load(mmap=True)` is not
used: a mapped file that its owner shortens ends the process, and checksums are not compared.
"""

from __future__ import annotations

import pickle
import re
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # torch's documented way to read a checkpoint's layout

from workbench.checkpoints.file_signatures import first_bytes, refuse_other_kinds
from workbench.checkpoints.stored_tensors import CHUNK, Stored
from workbench.errors import BadCheckpoint

DAMAGE = (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError)  # raised for damaged archives
MAX_DEPTH = 50  # of containers in containers
ARCHIVE = b"PK\3\4"
_ALLOWING = threading.Lock()  # PyTorch has one list of allowed globals for all threads


def unpickle(path: Path) -> Any:
    """Return the contents of a PyTorch file, its tensors as `Stored`; raises `BadCheckpoint` for anything that could run code."""
    refuse_other_kinds(path)
    if first_bytes(path)[:2] != ARCHIVE[:2]:
        raise BadCheckpoint(f"{path} is damaged or no PyTorch checkpoint: it is no ZIP archive; copy it again")
    records = _records(path)
    stand_ins: list[Any] = [(stand_in, name) for name, stand_in in STAND_INS.items()]
    with FakeTensorMode():
        try:
            try:
                contents = torch.load(path, map_location="cpu", weights_only=True)
            except pickle.UnpicklingError:
                if not _unsafe_globals(path):
                    raise
                with _ALLOWING, torch.serialization.safe_globals([*stand_ins, *torch.serialization.get_safe_globals()]):
                    contents = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # damaged bytes make the unpickler raise errors of any kind, MemoryError included
            if not (culprits := [name for name in _unsafe_globals(path) if name not in STAND_INS]):
                cause = next(iter(str(error).rpartition("WeightsUnpickler error: ")[2].strip().splitlines()), "")
                what = f"is damaged or no PyTorch checkpoint: {type(error).__name__}: {cause}"
            elif any(name.startswith("torch.nn.") for name in culprits):
                what = (
                    f"holds a whole pickled module ({', '.join(culprits[:6])}), which only running its code could open. Where that code "
                    "is, save the weights alone, torch.save(module.state_dict(), path), and open that file"
                )
            else:
                what = (
                    f"would have to run code to be opened: it holds {', '.join(culprits[:6])}. Where that code is, save the weights alone, "
                    "torch.save(torch.load(path, weights_only=False)['model'], OUT) with the key of the weights, and open OUT"
                )
            raise BadCheckpoint(f"{path} {what}") from error
        seen: dict[int, Any] = {}

        def place(item: Any, depth: int) -> Any:
            if id(item) in seen:
                return seen[id(item)]
            if depth > MAX_DEPTH:
                raise BadCheckpoint(f"{path} nests containers more than {MAX_DEPTH} deep")
            if isinstance(item, torch.Tensor):
                result: Any = _stored(item, path, records)
            elif isinstance(item, dict):
                result = {key: place(inner, depth + 1) for key, inner in item.items()}
            elif isinstance(item, list | tuple):
                result = [place(inner, depth + 1) for inner in item]
            else:
                return item
            return seen.setdefault(id(item), result)

        return place(contents, 0)


def _unsafe_globals(path: Path) -> list[str]:
    """Return the names in the pickle that PyTorch's safe unpickler refuses; none if the file is damaged."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:
        return []


def _records(path: Path) -> dict[int, zipfile.ZipInfo]:
    """Return the archive's records by the offset of their first byte; compressed ones, and larger ones than the file, are refused."""
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            names = archive.namelist()
            inside = {name.split("/", 1)[-1] for name in names}
            script = any(name.startswith("code/") for name in inside)
            if script or any(name.endswith(("exported_program.json", "models/model.json")) for name in names):
                kind = "a TorchScript program (torch.jit.save)" if script else "an exported program (torch.export.save)"
                weights = "torch.jit.load(path).state_dict()" if script else "torch.export.load(path).state_dict"
                raise BadCheckpoint(
                    f"{path} is {kind}, not weights alone. If you trust it, save its weights, torch.save({weights}, OUT), and open OUT"
                )
            if "data.pkl" not in inside:
                shown = ", ".join(sorted(names)[:4]) or "nothing"
                what = f"is a ZIP archive without the data.pkl of a PyTorch checkpoint: it holds {shown}"
                raise BadCheckpoint(f"{path} {what}. Open the file that torch.save or safetensors wrote")
            records = {}
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED:
                    raise BadCheckpoint(
                        f"{path} was packed again by a program that compresses: {info.filename} is not stored as it is. Pack it "
                        "without (zip -0 -r), or save what torch.load(path, weights_only=True) gives"
                    )
                if info.filename.endswith("/data.pkl"):
                    _check_sum(archive, info)
                file.seek(info.header_offset + 26)
                begin = info.header_offset + 30 + sum(int.from_bytes(file.read(2), "little") for _ in range(2))
                if begin + info.file_size > size:
                    what = f"{info.filename} would take {info.file_size} bytes, and the whole file has {size}"
                    raise BadCheckpoint(f"{path} is damaged: {what}; copy it again")
                records[begin] = info
    except BadCheckpoint:
        raise
    except DAMAGE as error:
        raise BadCheckpoint(
            f"{path} begins as a ZIP archive, the form of torch.save, but cannot be read as one ({error}): copy it again"
        ) from error
    return records


def _stored(tensor: torch.Tensor, path: Path, records: dict[int, zipfile.ZipInfo]) -> Stored:
    """Return the place of a tensor in the file; raises `BadCheckpoint` if the file has no such bytes."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise BadCheckpoint(f"{path}: a tensor of layout {tensor.layout} is not read; save it dense")
    shape, size = tuple(tensor.shape), tensor.numel() * tensor.element_size()
    if size > (limit := path.stat().st_size):
        raise BadCheckpoint(
            f"{path}: a tensor {list(shape)} would take {size} bytes, and the whole file has {limit}: it is damaged, or the tensor repeats "
            "itself (`expand`); save it without"
        )
    if 0 in shape:
        return Stored(path, tensor.dtype, shape)
    begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    first = int(tensor.storage_offset()) * tensor.element_size()
    stride = None if tensor.is_contiguous() else tensor.stride()
    stored = Stored(path, tensor.dtype, shape, (begin or 0) + first, stride)
    record = records.get(begin) if begin is not None else None
    if record is None or first + stored.span * tensor.element_size() > record.file_size:
        raise BadCheckpoint(f"{path} is damaged: a tensor {list(shape)} has no such bytes in the file; copy it again")
    return stored


def check_sums(path: Path, tensors: Iterable[Stored]) -> None:
    """Compare the archive's checksums with the bytes of these tensors; raises `BadCheckpoint` if they differ."""
    if first_bytes(path)[:4] != ARCHIVE:  # formats of others have no checksums
        return
    records = sorted(_records(path).items())
    starts = {t.offset for t in tensors if t.held is None}
    wanted = [info for begin, info in records if any(begin <= s < begin + max(info.file_size, 1) for s in starts)]
    try:
        with zipfile.ZipFile(path) as archive:
            for info in wanted:
                _check_sum(archive, info)
    except DAMAGE as error:
        raise BadCheckpoint(f"{path} is damaged: {error}; copy it again") from error


def _check_sum(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
    """Read a record in pieces; `zipfile` raises at its end if the checksum differs."""
    with archive.open(info) as record:
        while record.read(CHUNK):
            pass


# Plain replacements for what training scripts save beside weights: PyTorch's safe unpickler calls one of these functions for each such
# name in a file, so that no other constructor runs. Numbers become Python numbers, Namespaces dictionaries, paths text.


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
    try:
        (number,) = np.frombuffer(data, kind.order + re.fullmatch("[fiub][1248]", kind.code)[0])  # type: ignore[index]
        return number.item()
    except (AttributeError, TypeError, ValueError):
        return NotRead()


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
