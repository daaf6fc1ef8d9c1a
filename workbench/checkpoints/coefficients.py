"""Learned depth weights of a checkpoint, from its small tensors alone: value-residual lambdas, block attention residuals, gates.

    frame = read_coefficients("hf://moonshotai/Kimi-K3").frame

The index of a sharded checkpoint names the shards of these tensors. The reader fetches the headers of those shards,
and these tensors by ranges of bytes. It builds no model and runs nothing in the files.

Sources of the names: karpathy/nanochat (nanochat/gpt.py), KellerJordan/modded-nanogpt (train_gpt.py), moonshotai/Kimi-K3
(modeling_kimi_linear.py), and our architectures.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from workbench.checkpoints.paths import CONFIG, WEIGHTS, identify
from workbench.checkpoints.safetensors_files import DTYPES
from workbench.checkpoints.state_dicts import read
from workbench.errors import BadCheckpoint
from workbench.file_io import MAX_TEXT
from workbench.storage.remote import is_url, remote, saying

LARGEST = 1 << 22  # bytes of one tensor: of a matrix under such a name nothing is read
NAMED = 12  # names in a refusal
OURS = (
    "resformer_learnable",
    "resformer_dense",
    "resformer_learnable_plus",
    "dwa",
    "value_embedding",
    "bank_of_values",
)
PARTS = {2: ("attention", "MLP")}
PAIRS = {"stream and embedding": ("stream", "embedding"), "own value and embedding's": ("own", "table")}
DEEPEST = 1000  # layer of a dilated average


@dataclass(frozen=True)
class WeightLayout:
    """Names of one code base's depth weights: pattern of a tensor's name -> quantity, with a layer's number as `layer`."""

    name: str
    tensors: Mapping[str, str]
    is_in: Callable[[str], bool] = lambda name: True
    """Whether a checkpoint with a tensor of this name may be of this code base."""


LAYER = r"(?P<layer>\d+)"
LAYOUTS = (
    WeightLayout("Kimi K3", {
        rf".*layers\.{LAYER}\.(?P<part>self_attention|mlp)_res_(norm|proj)\.weight": "query",
        r".*output_attn_res_(norm|proj)\.weight": "query",
    }, lambda name: "_res_proj." in name),
    WeightLayout("workbench", {
        r"attention_residuals\.(queries|gains)\.(?P<sublayer>\d+)": "query",
    }, lambda name: name.startswith("attention_residuals.")),
    WeightLayout("workbench", {
        r"resformer_learnable(_plus)?\.(?P<quantity>first|own|logits|scale)": "after the first layer",
        rf"resformer_dense\.rows\.{LAYER}": "values of layer", rf"dwa\.alphas\.{LAYER}\.weight": "output",
        r"value_embedding\.(?P<quantity>own|table)": "", r"bank_of_values\.(?P<quantity>gains)": "",
    }, lambda name: name.split(".")[0] in OURS),
    WeightLayout("nanochat", {
        r"(?P<quantity>resid_lambdas|x0_lambdas|smear_lambda|backout_lambda)": "",
        rf"transformer\.h\.{LAYER}\.attn\.(?P<quantity>ve_gate)\.weight": "norm by head",
    }, lambda name: name.startswith("transformer.h.")),
    WeightLayout("modded-nanogpt", {
        r"(?P<quantity>(resid|post|x0|bigram)_lambdas|skip_weights|scalars|skip_gates|smear_lambda|backout_lambda)": "",
        rf"blocks\.{LAYER}\.(?P<quantity>lambdas)": "stream and embedding",
        rf"blocks\.{LAYER}\.attn\.(?P<quantity>lambdas)": "own value and embedding's",
        rf"blocks\.{LAYER}\.attn\.(?P<quantity>lamb)": "other value; own: 1 less this",
    }, lambda name: name.startswith("blocks.") or name == "scalars"),
)  # fmt: skip
"""In this order: the first one that matches a tensor is the checkpoint's."""
ALIKE = (
    r"(?!.*\.tables\.).*(^|[._])(lamb(da)?s?|scalars|skip|backout|smear|mudd|ve_gates?|attn_res|res_(proj|norm)|"
    rf"attention_residuals|{'|'.join(OURS)})([._]|$)"
)
"""Words in names of depth weights."""


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Depth weights of one checkpoint."""

    layout: str
    frame: pd.DataFrame
    """A row for each number: quantity, layer, part (sublayer, source or head), value, tensor (its name in the files)."""
    vectors: dict[str, Tensor] = field(default_factory=dict)
    """Queries times gains of attention residuals [d_model], by sublayer: their products with normed outputs are the logits."""
    bytes_read: int
    notes: list[str] = field(default_factory=list)


def read_coefficients(path: str | Path) -> Coefficients:
    """Read the learned depth weights of a checkpoint from its small tensors.

    The weights of attention residuals depend on the token. Their row has the norm of query times gain. This is the standard deviation of
    the logits for outputs in random directions. A norm of 0 gives equal weights.

    Args:
        path: A safetensors file, a directory with `model.safetensors` or its index, a PyTorch file of nanochat or modded-nanogpt, a
            run, or a URL of a safetensors file or such a directory (`hf://owner/name`), of which only these bytes are fetched.

    Returns:
        The numbers by layer, their layout, and how many bytes were read.

    Raises:
        BadCheckpoint: No tensor has a name of a known layout, a shard lacks a tensor of the index, or a file is damaged.
    """
    files = _Ranged(path)
    source = files if files.is_table else _Opened(path)
    names = source.names()
    layout = next((each for each in LAYOUTS if any(map(each.is_in, names)) and any(_matches(each, names))), None)
    if layout is None:
        small = sorted(names, key=lambda name: (name.count("."), name))
        raise BadCheckpoint(
            f"{path} has no depth weights under the names of {', '.join(dict.fromkeys(each.name for each in LAYOUTS))}; it has "
            f"{', '.join(small[:NAMED])}{f' and {len(small) - NAMED} more' if len(small) > NAMED else ''}"
        )
    matches = list(_matches(layout, names))
    tensors = source.read([name for name, *_ in matches])
    if any(words == "query" for _, _, words in matches):
        rows, vectors, notes = _queries(matches, tensors, source.config())
    else:
        dilation = _dilation(tensors, source.config()) if any(words == "output" for *_, words in matches) else None
        rows, vectors, notes = [row for match in matches for row in _rows(*match, tensors[match[0]], dilation)], {}, []
    if unread := [name for name in names if name not in tensors and re.match(ALIKE, name)]:
        more = f" and {len(unread) - NAMED} more" if len(unread) > NAMED else ""
        notes.append(
            f"Not read, though their names are like those of depth weights: {', '.join(unread[:NAMED])}{more}."
        )
    quantities = {row["quantity"] for row in rows}
    if "scalars" in quantities:
        notes.append("modded-nanogpt changed the order of `scalars` between versions: they are numbered, not named.")
    if quantities & {"scalars", "skip_weights"}:
        notes.append("Weights of skips are as stored: a version that gates them multiplies by their sigmoid.")
    frame = pd.DataFrame(rows, columns=["quantity", "layer", "part", "value", "tensor"]).astype({"layer": "Int64"})
    return Coefficients(layout=layout.name, frame=frame, vectors=vectors, bytes_read=source.count, notes=notes)


def _matches(layout: WeightLayout, names: list[str]) -> Iterator[tuple[str, dict[str, str], str]]:
    """Yield name, groups of the pattern and meaning of the numbers for each tensor of a layout."""
    for name in names:
        for pattern, words in layout.tensors.items():
            if match := re.fullmatch(pattern, name):
                yield name, {k: v for k, v in match.groupdict().items() if v is not None}, words


def _dilation(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> int | None:
    """Return the dilation of DenseFormer's averages, which each read (layer + 1) // dilation + 1 outputs; None if several fit."""
    matches = ((re.fullmatch(r"dwa\.alphas\.(\d+)\.weight", name), t.numel()) for name, t in tensors.items())
    counts = {int(m[1]): n for m, n in matches if m}
    every = range(1, min(max(counts, default=0), DEEPEST) + 3)
    fits = [d for d in every if all(n == (layer + 1) // d + 1 for layer, n in counts.items())]
    told = ((config.get("workbench") or {}).get("options") or {}).get("dilation")
    return told if told in fits else fits[0] if len(fits) == 1 else None


def _rows(
    name: str, groups: dict[str, str], words: str, tensor: Tensor, dilation: int | None
) -> Iterator[dict[str, Any]]:
    """Yield the numbers of a tensor: by layer, by layer and sublayer, or the sources of one layer."""
    layer = int(groups["layer"]) if "layer" in groups else None
    quantity = groups.get("quantity", "weight")
    row = {"quantity": quantity, "layer": layer, "part": "", "tensor": name}
    values = tensor.double()
    if words == "norm by head":
        values = values.reshape(len(values), -1).norm(dim=-1)
        yield from (
            row | {"quantity": f"{quantity}, norm", "part": f"head {h}", "value": float(x)}
            for h, x in enumerate(values)
        )
    elif layer is not None:
        values = values.flatten()
        named: Sequence[str] = PAIRS.get(words, ())
        if words == "output":
            read = None if dilation is None else range((layer + 1) % dilation, layer + 2, dilation)
            named = [f"source {i}, own last" if read is None else f"output {read[i]}" for i in range(len(values))]
        for i, x in enumerate(values.tolist()):
            part = named[i] if len(values) == len(named) else f"{words} {i}" if len(values) > 1 else words
            yield row | {"part": part, "value": x}
    elif values.ndim > 1 and set(values.shape[1:]) <= PARTS.keys():
        # by layer, of its sublayers, and by stream that they write
        for cell in itertools.product(*map(range, values.shape)):
            part = ", ".join([PARTS[2][cell[1]], *(f"stream {i}" for i in cell[2:])])
            yield row | {"layer": cell[0], "part": part, "value": float(values[cell])}
    else:
        later = words == "after the first layer"
        numbered = quantity not in ("scalars", "skip_weights", "skip_gates", "table", "gains")
        numbered = numbered and (values.numel() > 1 or (later and values.ndim == 1))
        if numbered and values.ndim > 1:
            raise BadCheckpoint(
                f"{name} has the shape {list(values.shape)}, so which axis is the layer is unknown; known are [layer] and [layer, 2, ...]"
            )
        cells = itertools.product(*map(range, values.shape))
        for n, (cell, x) in enumerate(zip(cells, values.flatten().tolist(), strict=True)):
            if numbered:
                yield row | {"layer": n + later, "value": x}
            else:
                yield row | {"part": ", ".join(map(str, cell)) if values.numel() > 1 else "", "value": x}


def _queries(
    matches: list[tuple[str, dict[str, str], str]], tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Tensor], list[str]]:
    """Return the rows of attention residuals, and each sublayer's query times gain."""
    pairs: dict[tuple[int | None, str], dict[str, str]] = {}
    last = max((int(groups["sublayer"]) for _, groups, _ in matches if "sublayer" in groups), default=0)
    for name, groups, _ in matches:
        if "sublayer" in groups:
            layer, inside = divmod(int(groups["sublayer"]), 2)
            is_last = not inside and int(groups["sublayer"]) == last
            key: tuple[int | None, str] = (None, "output") if is_last else (layer, ("attention", "MLP")[inside])
        else:
            key = (
                int(groups["layer"]) if "layer" in groups else None,
                {"mlp": "MLP", "self_attention": "attention"}.get(groups.get("part", ""), "output"),
            )
        kind = "query" if "proj" in name or ".queries." in name else "gain"
        if (before := pairs.setdefault(key, {}).setdefault(kind, name)) != name:
            raise BadCheckpoint(f"{before} and {name} are both the {kind} of one sublayer, of two stacks of layers")
    rows, vectors = [], {}
    for (n, part), names in sorted(
        pairs.items(), key=lambda pair: (pair[0][0] is None, pair[0][0] or 0, pair[0][1] == "MLP")
    ):
        if missing := {"query", "gain"} - names.keys():
            raise BadCheckpoint(f"{next(iter(names.values()))} has no {missing.pop()} beside it in this checkpoint")
        vector = tensors[names["query"]].double().flatten() * tensors[names["gain"]].double().flatten()
        vectors[part if n is None else f"{part} {n}"] = vector
        row = {"quantity": "depth query, norm", "layer": n, "part": part, "value": float(vector.norm())}
        rows.append({**row, "tensor": names["query"]})
    size = config.get("attn_res_block_size", (config.get("text_config") or {}).get("attn_res_block_size"))
    notes = [f"Outputs are summed in blocks of {size} layers (attn_res_block_size)."] if size else []
    return rows, vectors, notes


class _Opened:
    """Tensors of a checkpoint of this machine in any form that `load` reads."""

    def __init__(self, path: str | Path) -> None:
        self.state, self.count = read(identify(path)), 0

    def names(self) -> list[str]:
        return list(self.state.tensors)

    def config(self) -> Mapping[str, Any]:
        return self.state.info.config or {}

    def read(self, names: list[str]) -> dict[str, Tensor]:
        tensors = {name: self.state.tensors[name].read(name) for name in names}
        self.count += sum(t.nbytes for t in tensors.values())
        return tensors


class _Ranged:
    """Safetensors files of a directory or URL, read by ranges of bytes."""

    def __init__(self, path: str | Path) -> None:
        text, self.count, self.of = str(path).rstrip("/"), 0, dict[str, str]()
        self.url, self.headers = text, dict[str, tuple[dict[str, Any], int]]()
        index, self.is_table = f"{WEIGHTS}.index.json", True
        if text.endswith(".safetensors"):
            self.url, _, name = text.rpartition("/") if "/" in text else (".", "", text)
            self.of = dict.fromkeys(self._header(name)[0], name)
        elif self._exists(index):
            mapping = json.loads(self._bytes(index)).get("weight_map")
            if not isinstance(mapping, dict) or any(
                "/" in str(f) or not str(f).endswith(".safetensors") for f in mapping.values()
            ):
                raise BadCheckpoint(f"{text}/{index} has no weight_map of safetensors files beside it")
            self.of = {str(name): str(file) for name, file in mapping.items()}
        elif self._exists(WEIGHTS):
            self.of = dict.fromkeys(self._header(WEIGHTS)[0], WEIGHTS)
        elif is_url(text):
            raise BadCheckpoint(f"{text} has neither {WEIGHTS} nor its index; fetch it and give the local path")
        else:
            self.is_table = False  # a run, a PyTorch file

    def names(self) -> list[str]:
        return list(self.of)

    def config(self) -> Mapping[str, Any]:
        return json.loads(self._bytes(CONFIG)) if self._exists(CONFIG) else {}

    def read(self, names: list[str]) -> dict[str, Tensor]:
        tensors = {}
        for name in names:
            file = self.of[name]
            header, start = self._header(file)
            entry = header.get(name)
            if entry is None:
                raise BadCheckpoint(f"{self.url}/{file} has no {name}, which the index names there")
            dtype, (begin, end) = DTYPES.get(entry["dtype"]), entry["data_offsets"]
            size = math.prod(entry["shape"]) * (0 if dtype is None else torch.empty(0, dtype=dtype).element_size())
            if dtype is None or end - begin != size or not 0 <= size <= LARGEST or begin < 0:
                kind = f"{entry['dtype']} {entry['shape']} in {end - begin} bytes"
                raise BadCheckpoint(f"{self.url}/{file}: {name} is {kind}, which is no depth weight")
            data = self._bytes(file, start + begin, start + end)
            tensors[name] = torch.frombuffer(bytearray(data), dtype=dtype).reshape(entry["shape"])
            if not bool(tensors[name].float().isfinite().all()):
                raise BadCheckpoint(f"{self.url}/{file}: {name} holds NaN or Inf")
        return tensors

    def _header(self, file: str) -> tuple[dict[str, Any], int]:
        """Return a file's header, and where its tensors begin."""
        if file not in self.headers:
            length = int.from_bytes(self._bytes(file, 0, 8), "little")
            if not 2 <= length <= MAX_TEXT:
                raise BadCheckpoint(f"{self.url}/{file} is no safetensors file: a header of {length} bytes")
            try:
                header = json.loads(self._bytes(file, 8, 8 + length))
            except ValueError as error:
                raise BadCheckpoint(f"{self.url}/{file} is no safetensors file: {error}") from error
            header.pop("__metadata__", None)
            self.headers[file] = header, 8 + length
        return self.headers[file]

    def _exists(self, file: str) -> bool:
        if is_url(self.url):
            return remote(self.url).exists(file)
        with contextlib.suppress(OSError, ValueError):  # a name that is too long, or with a NUL
            return (Path(self.url) / file).is_file()
        return False

    def _bytes(self, file: str, start: int = 0, end: int | None = None) -> bytes:
        if is_url(self.url):
            place = remote(self.url)
            with saying("read", f"{self.url}/{file}"):
                data: bytes = place.system.cat_file(place[file], start, end)
        else:
            try:
                with (Path(self.url) / file).open("rb") as opened:
                    opened.seek(start)
                    data = opened.read(MAX_TEXT if end is None else end - start)
            except OSError as error:
                raise BadCheckpoint(f"{self.url}/{file} cannot be read: {error}") from error
        if end is not None and len(data) < end - start:
            raise BadCheckpoint(f"{self.url}/{file} is cut off: it ends before byte {end}")
        self.count += len(data)
        return data
