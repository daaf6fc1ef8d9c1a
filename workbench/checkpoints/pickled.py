"""PyTorch files (`.pt`, `.pth`, `.bin`, `.ckpt`) opened without running what they hold.

Only state dicts and plain containers are read (`weights_only=True`, always). The pickle is read without its tensors, of
which the places in the file are noted; a file's own checksums are held against the bytes.
"""

from __future__ import annotations

import mmap
import pickle
import re
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # torch's documented way to read a checkpoint's layout

from workbench.checkpoints.plain_values import STAND_INS
from workbench.checkpoints.stored import CHUNK, Stored, refuse_other_kinds
from workbench.errors import BadCheckpoint

DAMAGE = (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError)  # what archives stumble over
MAX_DEPTH = 50  # of containers in containers
UNSAFE = re.compile(r"Unsupported global: GLOBAL ([\w.]+)")
_ALLOWING = threading.Lock()  # PyTorch has one list of allowed globals for all threads


def unpickle(path: Path) -> Any:
    """What a PyTorch file holds, its tensors as `Stored`; raises `BadCheckpoint` for anything that could run code."""
    if not path.is_file():
        raise BadCheckpoint(f"{path} is missing")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}") from error
    if magic != b"PK\3\4":  # before PyTorch 1.6: tensors follow one another, so they are read at once
        refuse_other_kinds(path)
        _refuse_more_than_the_file(path)
        return _placed(_load(path, on=_within_the_file), path, None)
    records = _records(path)
    with FakeTensorMode():
        return _placed(_load(path), path, records)


def _refuse_more_than_the_file(path: Path) -> None:
    """Raise `BadCheckpoint` where a storage would take more bytes than the file has, before memory is given to it."""
    size = path.stat().st_size

    def note(value: Any, depth: int = 0) -> None:
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            if (wanted := value.untyped_storage().nbytes()) > size:
                told = f"a tensor's storage would take {wanted} bytes, and the whole file has {size}"
                raise BadCheckpoint(f"{path} is damaged: {told}; copy it again")
        elif isinstance(value, dict | list | tuple) and depth < MAX_DEPTH:
            for inner in value.values() if isinstance(value, dict) else value:
                note(inner, depth + 1)

    if not size:  # said by what reads it
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole, FakeTensorMode():
        note(_load(path, whole))  # a file would make room for as long a text as the pickle claims


def _within_the_file(path: Path) -> Callable[[Any, str], Any]:
    """A place for the storages of a file, each told once: raises `BadCheckpoint` where all together are more than its bytes."""
    size, wanted = path.stat().st_size, 0

    def place(storage: Any, location: str) -> Any:
        nonlocal wanted
        if (wanted := wanted + storage.nbytes()) > size:
            told = f"its tensors' storages would take {wanted} bytes or more, and the whole file has {size}"
            raise BadCheckpoint(f"{path} is damaged: {told}; copy it again")
        return storage

    return place


def _load(path: Path, opened: Any = None, on: Callable[[Path], Any] = lambda _: "cpu") -> Any:
    try:
        try:
            return torch.load(opened or path, map_location=on(path), weights_only=True)
        except pickle.UnpicklingError as error:
            if not _globals_in(path, error):
                raise
        if opened is not None:
            opened.seek(0)
        stand_ins: list[Any] = [(stand_in, name) for name, stand_in in STAND_INS.items()]
        with _ALLOWING, torch.serialization.safe_globals([*stand_ins, *torch.serialization.get_safe_globals()]):
            return torch.load(opened or path, map_location=on(path), weights_only=True)
    except BadCheckpoint:  # of a storage, while it is given its place
        raise
    except Exception as error:  # the unpickler raises whatever damaged bytes make it stumble over, MemoryError included
        raise BadCheckpoint(f"{path} {_why(path, error)}") from error


def _globals_in(path: Path, error: Exception) -> list[str]:
    """Names in the pickle that PyTorch's safe unpickler refuses; of files of before PyTorch 1.6 the first one."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # such files, and damaged ones, cannot be listed
        return UNSAFE.findall(str(error))


def _why(path: Path, error: Exception) -> str:
    culprits = [name for name in _globals_in(path, error) if name not in STAND_INS]
    if not culprits:
        cause = next(iter(str(error).rpartition("WeightsUnpickler error: ")[2].strip().splitlines()), "")
        return f"is damaged or no PyTorch checkpoint: {type(error).__name__}: {cause}"
    named = ", ".join(culprits[:6])
    if any(c.startswith("torch.nn.") for c in culprits):
        return (
            f"holds a whole pickled module ({named}), which only running its code could open. Where that code is, save "
            "the weights alone, torch.save(module.state_dict(), path), and open that file"
        )
    return (
        f"would have to run code to be opened: it holds {named}. Where that code is, save the weights alone, "
        "torch.save(torch.load(path, weights_only=False)['model'], OUT) with the key of the weights, and open OUT"
    )


def _records(path: Path) -> dict[int, zipfile.ZipInfo]:
    """The archive's records by the offset of their first byte; the pickle's checksum is checked, none may be compressed.

    Nor may one claim more bytes than the file has: PyTorch makes room for what it reads before it reads.
    """
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            _refuse_other_archives(archive.namelist(), path)
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
                    told = f"{info.filename} would take {info.file_size} bytes, and the whole file has {size}"
                    raise BadCheckpoint(f"{path} is damaged: {told}; copy it again")
                records[begin] = info
    except BadCheckpoint:
        raise
    except DAMAGE as error:
        raise BadCheckpoint(f"{path} is damaged or no PyTorch checkpoint: {error}; copy it again") from error
    return records


def _refuse_other_archives(names: list[str], path: Path) -> None:
    """Raise `BadCheckpoint` for programs that PyTorch stores, and for archives of other libraries."""
    inside = {name.split("/", 1)[-1] for name in names}
    if any(name.startswith("code/") for name in inside):
        raise BadCheckpoint(
            f"{path} is a TorchScript program (torch.jit.save), not weights alone. If you trust it, save its weights, "
            "torch.save(torch.jit.load(path).state_dict(), OUT), and open OUT"
        )
    if any(name.endswith(("exported_program.json", "models/model.json")) for name in names):
        raise BadCheckpoint(
            f"{path} is an exported program (torch.export.save), not weights alone. If you trust it, save its weights, "
            "torch.save(torch.export.load(path).state_dict, OUT), and open OUT"
        )
    if "data.pkl" not in inside:
        shown = ", ".join(sorted(names)[:4]) or "nothing"
        raise BadCheckpoint(
            f"{path} is a ZIP archive without the data.pkl of a PyTorch checkpoint: it holds {shown}. Open the file that torch.save or "
            "safetensors wrote"
        )


def _placed(value: Any, path: Path, records: dict[int, zipfile.ZipInfo] | None) -> Any:
    """The same containers with each tensor as a `Stored`; what occurs twice is placed once."""
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

    return place(value, 0)


def _stored(tensor: torch.Tensor, path: Path, records: dict[int, zipfile.ZipInfo] | None) -> Stored:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise BadCheckpoint(f"{path}: a tensor of layout {tensor.layout} is not read; save it dense")
    shape, size = tuple(tensor.shape), tensor.numel() * tensor.element_size()
    if size > (whole := path.stat().st_size):
        repeats = f"a tensor {list(shape)} would take {size} bytes, and the whole file has {whole}"
        raise BadCheckpoint(
            f"{path}: {repeats}: it is damaged, or the tensor repeats itself (`expand`); save it without"
        )
    if records is None:
        return Stored(path, tensor.dtype, shape, held=tensor.detach())
    begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    stride = None if tensor.is_contiguous() else tensor.stride()
    first = int(tensor.storage_offset()) * tensor.element_size()
    if 0 in shape:
        return Stored(path, tensor.dtype, shape)
    stored = Stored(path, tensor.dtype, shape, (begin or 0) + first, stride)
    record = records.get(begin) if begin is not None else None
    if record is None or first + stored.span * tensor.element_size() > record.file_size:
        raise BadCheckpoint(f"{path} is damaged: a tensor {list(shape)} has no such bytes in the file; copy it again")
    return stored


def check_sums(path: Path, tensors: Iterable[Stored]) -> None:
    """Hold the archive's checksums against the bytes of these tensors; raises `BadCheckpoint` where they differ."""
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
    """Read a record in pieces and forget it; `zipfile` raises at its end where the checksum is another."""
    with archive.open(info) as record:
        while record.read(CHUNK):
            pass
