"""llama2.c's `.bin` files, legacy and version 1 (float32), with their tokenizer files (`tokenizer.bin`, `tok512.bin`).

A legacy file begins with seven int32: width, MLP width, layers, heads, key-value heads, vocabulary, context. A negative vocabulary means
an output matrix of its own. Version 1 has a header of 256 bytes that begins with `ak42`. Queries and keys rotate neighbouring columns,
with base 10,000. A tokenizer file is an int32, then a float32 score, an int32 length and the bytes of each token.
Source: karpathy/llama2.c, export.py, run.c and tokenizer.py.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch

from workbench.checkpoints.file_signatures import first_bytes
from workbench.checkpoints.format import Format
from workbench.checkpoints.stored_tensors import Stored
from workbench.data.tokenizer import ForeignTokenizer
from workbench.errors import BadCheckpoint
from workbench.file_io import read_bytes

MAGIC, HEADER = b"24ka", 256
SETTINGS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
FIXED = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 1e4, "workbench": {"architecture": "transformer"}}
MOST = (1 << 16, 1 << 18, 1 << 10, 1 << 10, 1 << 10, 1 << 22, 1 << 22)
"""Largest plausible value of each: other files begin with larger or negative numbers."""
LAYER = "model.layers.{}."
UNKNOWN, BOS, EOS, FIRST_BYTE, FIRST_PIECE = 0, 1, 2, 3, 259  # token ids
SWAPPED = "with swapped bytes (big-endian); export it on a little-endian machine"


def read_weights(path: Path) -> tuple[dict[str, Stored], Mapping[str, Any]] | None:
    """Return the tensors, by Llama's names, and the settings of a file; None for other files."""
    head, size = first_bytes(path), path.stat().st_size
    if head[:4] == MAGIC:
        version = int.from_bytes(head[4:8], "little")
        if version != 1:
            what = "quantised (version 2, int8)" if version == 2 else f"of version {version}"
            raise BadCheckpoint(
                f"{path} is a llama2.c file {what}; read are legacy files and version 1: export it again with "
                "`python export.py OUT.bin --version 1 --checkpoint ckpt.pt`"
            )
        fields, start = head[8:36], HEADER
    elif head[:4] == MAGIC[::-1]:
        raise BadCheckpoint(f"{path} is a llama2.c file {SWAPPED}")
    else:
        fields, start = head[:28], 28
    values = _plausible(fields, "<")
    if values is None:
        if head[:4] == MAGIC:
            raise BadCheckpoint(f"{path} is a llama2.c file whose header is damaged; copy it again")
        if _plausible(fields, ">") and size % 4 == 0:
            raise BadCheckpoint(f"{path} looks like a llama2.c file {SWAPPED}")
        return None
    tied = values[5] > 0 if start == 28 else head[36] == 1
    config = dict(zip(SETTINGS, map(abs, values), strict=True)) | FIXED
    tensors, end = _tensors(path, config, start, tied)
    if end != size:
        what = "ends too early" if size < end else "is too long"
        raise BadCheckpoint(
            f"{path} {what}: by its header, a llama2.c file of {end} bytes, it has {size}; copy it again"
        )
    return tensors, config


def _plausible(fields: bytes, order: str) -> tuple[int, ...] | None:
    """Return the seven numbers of a header if a Llama can have them."""
    if len(fields) < 28:
        return None
    values = struct.unpack(f"{order}7i", fields)
    d_model, _, _, heads, groups, vocabulary, _ = values
    sizes = (*values[:5], abs(vocabulary), values[6])
    fits = all(0 < n <= most for n, most in zip(sizes, MOST, strict=True))
    return values if fits and d_model % (2 * heads) == 0 and heads % groups == 0 else None


def _tensors(path: Path, config: Mapping[str, Any], start: int, tied: bool) -> tuple[dict[str, Stored], int]:
    """Return the tensors of a file and the offset behind the last one."""
    d, mlp, layers, heads, groups, vocabulary, n_ctx = (config[key] for key in SETTINGS)
    keys = d // heads * groups
    embeddings, final = ("model.embed_tokens.weight", (vocabulary, d)), ("model.norm.weight", (d,))
    head = [] if tied else [("lm_head.weight", (vocabulary, d))]
    norms = {"input_layernorm": (d,), "post_attention_layernorm": (d,)}
    attention = {f"self_attn.{x}_proj": (keys if x in "kv" else d, d) for x in "qkvo"}
    feed_forward = {"mlp.gate_proj": (mlp, d), "mlp.down_proj": (d, mlp), "mlp.up_proj": (mlp, d)}
    parts = {**norms, **attention, **feed_forward}
    if start == HEADER:
        order: list[Any] = ["input_layernorm", "post_attention_layernorm", final, embeddings]
        order += [*attention, *feed_forward, *head]
    else:
        tables = [("", (n_ctx, d // heads // 2))] * 2  # of cosines and sines, which are computed here
        order = [
            embeddings, "input_layernorm", *attention, "post_attention_layernorm", *feed_forward, final, *tables, *head
        ]  # fmt: skip
    tensors, offset = dict[str, Stored](), start
    for part in order:
        names = [f"{LAYER.format(i)}{part}.weight" for i in range(layers)] if isinstance(part, str) else [part[0]]
        shape = parts[part] if isinstance(part, str) else part[1]
        for name in names:
            if name:
                tensors[name] = Stored(path, torch.float32, shape, offset)
            offset += 4 * math.prod(shape)
    if tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors, offset


def llama2c_tokenizer(path: Path, d_vocab: int) -> ForeignTokenizer | None:
    """Return the tokenizer in `tok512.bin` (by the vocabulary's size) or `tokenizer.bin` beside a file, None without one."""
    beside = (path.with_name(name) for name in (f"tok{d_vocab}.bin", "tokenizer.bin"))
    return next((read_tokenizer(file, d_vocab) for file in beside if file.is_file()), None)


def read_tokenizer(path: Path, d_vocab: int) -> ForeignTokenizer:
    """Return the tokenizer of a file: byte-pair encoding that joins the pair of the highest score, with bytes as fallback."""
    data = read_bytes(path)
    pieces, scores, offset = list[str](), list[float](), 4
    try:
        while offset < len(data):
            score, length = struct.unpack_from("<fi", data, offset)
            offset += 8 + length
            if length < 0 or offset > len(data):
                raise ValueError(f"token {len(pieces)} has a length of {length} bytes")
            pieces.append(data[offset - length : offset].decode())
            scores.append(score)
    except (struct.error, ValueError) as error:
        raise BadCheckpoint(f"{path} is damaged or no tokenizer file of llama2.c: {error}; copy it again") from error
    if len(pieces) != d_vocab:
        raise BadCheckpoint(
            f"{path} has {len(pieces)} tokens and the model {d_vocab}; put the model's own tokenizer there"
        )
    if pieces[FIRST_BYTE:FIRST_PIECE] != [f"<0x{byte:02X}>" for byte in range(256)]:
        raise BadCheckpoint(
            f"{path} has no 256 byte tokens from id {FIRST_BYTE} on; it is no tokenizer file of llama2.c"
        )
    pieces[:FIRST_BYTE] = ["<unk>", "<s>", "</s>"]
    ids = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
    merges = [
        (-scores[i], i, (piece[:cut], piece[cut:]))
        for i, piece in itertools.islice(enumerate(pieces), FIRST_PIECE, None)
        for cut in range(1, len(piece))
        if ids.get(piece[:cut], 0) >= FIRST_PIECE and ids.get(piece[cut:], 0) >= FIRST_PIECE
    ]
    model = tokenizers.models.BPE(ids, [pair for *_, pair in sorted(merges)], unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Prepend(" ")
    parts = tokenizers.decoders
    backend.decoder = parts.Sequence([parts.ByteFallback(), parts.Fuse(), parts.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return ForeignTokenizer(backend, BOS, EOS)


FORMAT = Format(name="llama2.c", read=read_weights, tokenizer=llama2c_tokenizer, rotates_neighbours=True)
