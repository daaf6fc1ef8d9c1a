"""Binary shards of token ids (`.bin`), with the header of llm.c and modded-nanogpt or without one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from workbench.errors import BadData

HEADERS = {20240520: (1, 2), 20240801: (7, 4)}  # magic -> (version, bytes of an id), as llm.c and modded-nanogpt write
HEADER = 1024  # bytes: 256 int32, of which magic, version and the number of ids are used


def read_tokens(path: Path, vocabulary: int) -> np.ndarray:
    """Return the ids [n] of a `.bin` file as a memory map; two or four bytes each, by its header or the vocabulary.

    Raises `BadData` for files that are cut off and ids outside the vocabulary.
    """
    if not path.is_file():
        raise BadData(f"{path} does not exist; give a .bin file of token ids")
    size, start = path.stat().st_size, 0
    head = np.fromfile(path, "<i4", 3)
    width, header = 2 if vocabulary <= 2**16 else 4, len(head) == 3 and size >= HEADER and int(head[0]) in HEADERS
    if header:
        version, width = HEADERS[int(head[0])]
        start, count = HEADER, int(head[2])
        if int(head[1]) != version or size != HEADER + count * width:
            what = f"version {head[1]} and {count} ids"
            raise BadData(f"{path} says {what}, which its {size} bytes do not hold: it is cut off")
    if size <= start or (size - start) % width:
        raise BadData(f"{path}: {size} bytes are no ids of {width} bytes, the width of a vocabulary of {vocabulary}")
    ids = np.memmap(path, f"<u{width}", "r", start)
    for begin in range(0, len(ids), 1 << 24):
        if (high := int(ids[begin : begin + (1 << 24)].max())) >= vocabulary:
            cause = f"it belongs to another tokenizer, or its ids are not {width} bytes wide"
            raise BadData(f"{path} holds id {high}, outside the vocabulary 0..{vocabulary - 1}: {cause}")
    return ids
