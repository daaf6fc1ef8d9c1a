"""Kinds of files by their first bytes: files that are no checkpoints are refused with what to do."""

from __future__ import annotations

from pathlib import Path

from workbench.checkpoints.paths import GGUF
from workbench.errors import BadCheckpoint

HEAD = 256  # bytes that tell the kind of a file
SAVE = "save the weights with safetensors or torch.save"
KINDS = (  # first bytes of intact files of other kinds, and what to do
    ((b"GGUF",), GGUF),
    ((b"lmgg", b"fmgg", b"tjgg"), "a GGML file (llama.cpp, whisper.cpp), which is not read: open the model it was converted from"),
    ((b"version https://git-lfs",), "a pointer of Git LFS, not the file it stands for: fetch that with `git lfs pull`"),
    ((b"ONNX",), "an ONNX model, which is not read: open the checkpoint it was exported from"),
    (
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P",),
        "a file of PyTorch before 1.6, which is not read: torch.save(torch.load(path, weights_only=True), OUT) converts it",
    ),
    (
        (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
        "a Python pickle, which could run code: save the weights alone where it was made, torch.save(module.state_dict(), OUT)",
    ),
    ((b"\x89HDF",), f"an HDF5 file (Keras), which is not read: {SAVE}"),
    ((b"\x93NUMPY",), f"a NumPy array, not a checkpoint: {SAVE}"),
    ((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"7z\xbc\xaf", b"\x28\xb5\x2f\xfd"), "a compressed file: unpack it, then open what is in it"),
    ((b"<!DOCTYPE", b"<!doctype", b"<html"), "a web page, not the file it links to: download that file again"),
)  # fmt: skip


def first_bytes(path: Path) -> bytes:
    """Return the first bytes of a regular file; raises `BadCheckpoint` if it is missing or cannot be read."""
    if not path.is_file():
        raise BadCheckpoint(f"{path} is missing")
    try:
        with path.open("rb") as file:
            return file.read(HEAD)
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}") from error


def refuse_other_kinds(path: Path) -> None:
    """Raise `BadCheckpoint` for intact files of other kinds, which their first bytes tell."""
    begin = b"ONNX" if path.suffix == ".onnx" else first_bytes(path)
    if kind := next((kind for signatures, kind in KINDS if begin.startswith(signatures)), None):
        raise BadCheckpoint(f"{path} is {kind}")
    # no signature: a version and a producer
    if begin.startswith(b"\x08") and (b"pytorch" in begin or b"onnx" in begin):
        raise BadCheckpoint(f"{path} is an ONNX model, which is not read: open the checkpoint it was exported from")
    if begin[8:10] == b'{"' and path.suffix != ".safetensors":
        raise BadCheckpoint(f"{path} is a safetensors file under another name: call it {path.stem}.safetensors")
    if begin.startswith(b"PK") and path.suffix == ".safetensors":
        raise BadCheckpoint(
            f"{path} is a ZIP archive, as torch.save writes, no safetensors file: call it {path.stem}.pt"
        )
