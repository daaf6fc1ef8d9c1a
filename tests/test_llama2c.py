"""llama2.c's files: logits against a plain forward, tokens against run.c's own loop, and files that are refused."""

from __future__ import annotations

import itertools
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from llama2c_files import HEADER, PIECES, parts, tokens, write

import workbench
from workbench.checkpoints.formats.llama2c import read_tokenizer
from workbench.errors import BadCheckpoint
from workbench.runs.checkpoint_import import import_run

HERE = Path(__file__).parents[2] / "shared" / "strangers"
STORIES = HERE / "stories260K.bin"
needs_stories = pytest.mark.skipif(not STORIES.is_file(), reason="stories260K.bin is not beside the project")
IDS = """403 407 261 378 432 383 286 261 376 298 315 421 395 317 426 338 401 396 267 337 410 408 419 292 411 322 265 282 295 433"""


def stories():
    """The weights of stories260K in float64."""
    header, data, offset, arrays = struct.unpack("<7i", STORIES.read_bytes()[:28]), STORIES.read_bytes(), 28, {}
    for name, shape in parts(header, tied=True):
        count = math.prod(shape)
        arrays[name] = np.frombuffer(data, "<f4", count, offset).reshape(shape).astype("f8")
        offset += 4 * count
    assert offset == len(data)
    return header, arrays


def forward(header, w, ids):
    """Logits [pos, vocabulary] as run.c computes them, in float64."""
    d, _, layers, heads, groups, _, _ = header
    size, T = d // heads, len(ids)
    angles = np.arange(T)[:, None] / 10_000 ** (np.arange(0, size, 2) / size)

    def norm(x, weight):
        return weight * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)

    def rotated(x):  # [pos, heads, size], neighbouring columns together
        even, odd, cos, sin = x[..., ::2], x[..., 1::2], np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    x = w["embedding"][ids]
    for i in range(layers):
        h = norm(x, w["norm1"][i])
        q = rotated((h @ w["q"][i].T).reshape(T, heads, size))
        k = rotated((h @ w["k"][i].T).reshape(T, groups, size)).repeat(heads // groups, axis=1)
        v = (h @ w["v"][i].T).reshape(T, groups, size).repeat(heads // groups, axis=1)
        scores = np.einsum("qhc,khc->hqk", q, k) / size**0.5
        scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
        pattern = np.exp(scores - scores.max(-1, keepdims=True))
        pattern /= pattern.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khc->qhc", pattern, v).reshape(T, d) @ w["o"][i].T
        h = norm(x, w["norm2"][i])
        gate = h @ w["w1"][i].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["w3"][i].T)) @ w["w2"][i].T
    return norm(x, w["norm"]) @ w.get("output", w["embedding"]).T


@pytest.mark.parametrize(("version", "tied"), [*itertools.product([0, 1], [True, False])])
def test_logits_equal_a_plain_forward(tmp_path, version, tied):
    weights = write(tmp_path / "model.bin", version, tied)
    ids = [1, 5, 299, 7, 7, 30, 2]
    model = workbench.load(tmp_path / "model.bin")
    logits = model(torch.tensor([ids]))[0].detach().double().numpy()
    assert np.abs(logits - forward(HEADER, weights, ids)).max() < 1e-4
    assert model.tokenizer is None
    assert (model.embed.weight is model.unembed.weight) == tied or torch.equal(
        model.embed.weight, model.unembed.weight
    ) == tied
    assert model.source["format"] == "llama2.c"


@needs_stories
def test_the_published_model_writes_the_published_story():
    header, weights = stories()
    model, ids = workbench.load(STORIES), [1]
    for _ in range(30):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert ids[1:] == [int(i) for i in IDS.split()]
    logits = model(torch.tensor([ids]))[0].detach().double().numpy()
    assert np.abs(logits - forward(header, weights, ids)).max() < 1e-4
    text = model.tokenizer.decode(ids[1:])
    assert text.startswith(
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park"
    )
    assert model.tokenizer.encode(text) == ids[1:]
    assert model.to_tokens(text).tolist() == [ids]  # a text begins with <s>, as in run.c
    assert (model.tokenizer.bos_id, model.tokenizer.eos_id) == (1, 2)


def joined(text, vocabulary):
    """Ids as run.c's `encode` makes them: characters or bytes, then the best pair joined until there is none."""
    pieces = [
        p if p in vocabulary else f"<0x{b:02X}>" for p in f" {text}" for b in ([0] if p in vocabulary else p.encode())
    ]
    while True:
        pairs = [
            (vocabulary[a + b][1], -i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in vocabulary
        ]
        if not pairs:
            return [vocabulary[piece][0] for piece in pieces]
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@needs_stories
def test_the_published_tokenizer_encodes_as_the_original():
    tokenizer, data = read_tokenizer(HERE / "tok512.bin", 512), (HERE / "tok512.bin").read_bytes()
    vocabulary, offset = {}, 4
    for i in range(512):
        score, length = struct.unpack_from("<fi", data, offset)
        vocabulary[data[offset + 8 : offset + 8 + length].decode()] = (i, score)
        offset += 8 + length
    rng, words = (
        np.random.default_rng(0),
        [
            "Once",
            "upon",
            "a",
            "time",
            "there",
            "was",
            "the",
            "ball,",
            "big",
            "red!",
            "Lily's",
            "dog",
            "said:",
            "“Hello”",
            "123\n\n",
        ],
    )
    for _ in range(300):
        text = " ".join(rng.choice(words, 12)) + "".join(rng.choice(list("aabcdehlost ,.é\n"), 20))
        assert tokenizer.encode(text) == joined(text, vocabulary), text


def test_an_import_takes_the_tokenizer_along(tmp_path):
    header = (*HEADER[:5], 259 + len(PIECES), HEADER[6])
    write(tmp_path / "model.bin", header=header)
    tokens(tmp_path / "tokenizer.bin", [(piece, -float(i)) for i, piece in enumerate(PIECES)])
    run = import_run(tmp_path / "model.bin", tmp_path / "runs", name="mine")
    original, model = workbench.load(tmp_path / "model.bin"), run.load()
    assert model.tokenizer.encode("the cat") == original.tokenizer.encode("the cat")
    assert run.start_token == model.start_token == model.tokenizer.bos_id == 1
    assert torch.equal(model("the cat"), original("the cat"))
    assert run.info["imported"]["format"] == "llama2.c"


BAD = {
    "ends too early": lambda data: data[:-8],
    "is too long": lambda data: data + bytes(4),
    "swapped bytes": lambda data: np.frombuffer(data, "<u4").astype(">u4").tobytes(),
    "damaged or no PyTorch checkpoint": lambda data: b"\xff\xff\xff\x7f" + data[4:],
}


@pytest.mark.parametrize("reason", BAD)
def test_files_that_do_not_fit_their_header_are_refused(tmp_path, reason):
    write(tmp_path / "model.bin")
    (tmp_path / "model.bin").write_bytes(BAD[reason]((tmp_path / "model.bin").read_bytes()))
    with pytest.raises(BadCheckpoint, match=reason) as refusal:
        workbench.load(tmp_path / "model.bin")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d[:4] + struct.pack("<i", 2) + d[8:], r"quantised \(version 2, int8\)"),
        (lambda d: d[:4] + struct.pack("<i", 9) + d[8:], "of version 9"),
        (lambda d: d[3::-1] + d[4:], "swapped bytes"),
        (lambda d: d[:8] + struct.pack("<i", -5) + d[12:], "header is damaged"),
        (lambda d: d[:100], "ends too early"),
    ],
)
def test_other_versions_are_refused_by_name(tmp_path, change, reason):
    write(tmp_path / "model.bin", version=1)
    (tmp_path / "model.bin").write_bytes(change((tmp_path / "model.bin").read_bytes()))
    with pytest.raises(BadCheckpoint, match=reason):
        workbench.load(tmp_path / "model.bin")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d[:-1], "no tokenizer file of llama2.c"),
        (lambda d: d[:4] + struct.pack("<fi", 0, -1) + d[12:], "length of -1 bytes"),
        (lambda d: d.replace(b"<0x07>", b"<0xZZ>"), "no 256 byte tokens"),
        (lambda d: d.replace(b"<0x07>", b"\xff" * 6), "no tokenizer file of llama2.c"),
    ],
)
def test_damaged_tokenizers_are_refused(tmp_path, change, reason):
    tokens(tmp_path / "tok.bin", [(piece, -float(i)) for i, piece in enumerate(PIECES)])
    (tmp_path / "tok.bin").write_bytes(change((tmp_path / "tok.bin").read_bytes()))
    with pytest.raises(BadCheckpoint, match=reason):
        read_tokenizer(tmp_path / "tok.bin", 259 + len(PIECES))


KINDS = {
    b"GGUF": "GGUF", b"lmgg": "GGML", b"ONNX": "ONNX", b"\x08\x07\x12\x07pytorch": "ONNX", b"version https://git-lfs.github.com": "Git LFS",
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.": "before 1.6", b"\x80\x04\x95": "Python pickle", b"\x89HDF\r\n": "HDF5",
    b"\x93NUMPY\x01": "NumPy", b"\x1f\x8b\x08": "compressed", b"<!DOCTYPE html>": "web page", b"PK\x05\x06": "ZIP|damaged",
    struct.pack("<Q", 40) + b'{"a":': "safetensors file under another name",
}  # fmt: skip


@pytest.mark.parametrize("begin", KINDS)
def test_files_of_other_kinds_are_named(tmp_path, begin):
    (tmp_path / "model.bin").write_bytes(begin + bytes(400))
    with pytest.raises(BadCheckpoint, match=KINDS[begin]):
        workbench.load(tmp_path / "model.bin")
