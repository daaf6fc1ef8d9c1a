"""llama2.c's files with random weights, and its tokenizer files."""

from __future__ import annotations

import struct

import numpy as np

HEADER = (24, 40, 2, 6, 3, 300, 32)  # width, MLP width, layers, heads, key-value heads, vocabulary, context
PIECES = [" t", "he", " the", "at", " c", " cat", "th", "t", "h", "e", "a", "c", " ", "é"]


def parts(header, tied):
    """Name and shape of each tensor of a legacy file, in order; rotary tables have no name."""
    d, mlp, layers, heads, groups, vocabulary, n_ctx = header
    keys = d // heads * groups
    table = ("", (n_ctx, d // heads // 2))
    return [
        ("embedding", (vocabulary, d)), ("norm1", (layers, d)), ("q", (layers, d, d)), ("k", (layers, keys, d)), ("v", (layers, keys, d)),
        ("o", (layers, d, d)), ("norm2", (layers, d)), ("w1", (layers, mlp, d)), ("w2", (layers, d, mlp)), ("w3", (layers, mlp, d)),
        ("norm", (d,)), table, table, *([] if tied else [("output", (vocabulary, d))]),
    ]  # fmt: skip


VERSION_1 = ("norm1", "norm2", "norm", "embedding", "q", "k", "v", "o", "w1", "w2", "w3", "output")


def write(path, version=0, tied=True, header=HEADER, order="<"):
    """A file with random weights, which are returned in float64."""
    rng = np.random.default_rng(0)
    arrays = {n: rng.normal(0, 0.3, s).astype("f4") + ("norm" in n) for n, s in parts(header, tied) if n}
    tables = np.zeros(header[-1] * (header[0] // header[3]), "f4")
    numbers = header if tied or version else (*header[:5], -header[5], header[6])
    begin = struct.pack(f"{order}7i", *numbers)
    names = [name or "tables" for name, _ in parts(header, tied) if name or version == 0]
    if version:
        begin = (struct.pack(f"{order}Ii", 0x616B3432, version) + begin + bytes([tied])).ljust(256, b"\0")
        names = [name for name in VERSION_1 if name in arrays]
    names = list(dict.fromkeys(names))
    body = b"".join((arrays | {"tables": tables})[name].astype(f"{order}f4").tobytes() for name in names)
    path.write_bytes(begin + body)
    return {name: array.astype("f8") for name, array in arrays.items()}


def tokens(path, pieces):
    """A tokenizer file: three special tokens, 256 bytes, then pieces with their scores."""
    special = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{i:02X}>" for i in range(256))]
    rows = [(0.0, piece) for piece in special] + [(score, piece) for piece, score in pieces]
    encoded = (struct.pack("<fi", score, len(data := piece.encode())) + data for score, piece in rows)
    path.write_bytes(struct.pack("<i", 7) + b"".join(encoded))
    return {piece: (i, score) for i, (score, piece) in enumerate(rows)}
