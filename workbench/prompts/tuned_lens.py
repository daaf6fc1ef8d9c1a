"""Tuned lens: each residual stream is mapped to a final stream by an affine map, and the model's own head reads the result.

    A_n, b_n = argmin over A, b of sum over positions of ||A x_n + b - x_L||^2 / ms(x_L) + ridge ||A - I||^2

x_n is the stream that block n reads, and x_L is the final norm's input. The weight 1 / ms, with the mean square ms of x_L, gives positions
with long streams no more influence than others. The fit is in closed form. It streams weighted moments alone, in float64. The ridge pulls
to the identity, which is the logit lens, and the last map is the identity exactly.

Source: Belrose et al. (2023), arXiv 2303.08112, who minimise the divergence from the output by gradient descent instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors import safe_open
from torch import Tensor

from workbench.checkpoints.saving import weights_hash, write_tensors
from workbench.errors import BadData, WorkbenchError
from workbench.file_io import digest, replacing
from workbench.kernels.cross_entropy import refuse_targets
from workbench.metrics.base import wide
from workbench.models.hook_points import has_hooks
from workbench.models.hooked import HookedModel
from workbench.prompts.prompt import divergence, streams

VERSION = 2  # of the files


@dataclass(frozen=True, kw_only=True, eq=False)
class TunedLens:
    """Affine maps of all streams to the final stream, facts of the fit, and losses on held-out documents."""

    maps: Tensor  # A_n, float32 [layer + 1, d_model, d_model]; the last is the identity
    shifts: Tensor  # b_n, float32 [layer + 1, d_model]
    # weights (hash), data (hash of the ids), documents, positions, held_out (documents), ridge
    fitted_on: Mapping[str, Any]
    held_out: pd.DataFrame
    """A row for each layer and lens: layer, lens (`tuned`, `logit`, `frequency`), loss (nats), se (over documents), kl (nats). The baseline
    `frequency` predicts the frequencies of the tokens after the first of the fitted documents, each count plus 1."""

    def __call__(self, layer: int, x: Tensor) -> Tensor:
        """Map streams [..., d_model] that a layer reads to final streams; x itself for the last layer."""
        if layer == len(self.maps) - 1:
            return x
        y = wide(x)
        return (y @ self.maps[layer].to(y).T + self.shifts[layer].to(y)).to(x.dtype)

    def check(self, model: HookedModel) -> None:
        """Raise `BadData` if a model has other sizes."""
        shape = model.config.n_layers + 1, model.config.d_model
        if tuple(self.shifts.shape) != shape:
            raise BadData(f"the tuned lens maps {tuple(self.shifts.shape)} [layer + 1, d_model], the model has {shape}")

    def file(self, folder: Path) -> Path:
        """Return its file in a folder, named by the data of the fit."""
        return folder / f"{digest(dict(self.fitted_on), VERSION)}.safetensors"

    def save(self, path: str | Path) -> Path:
        """Write maps, facts and losses as one safetensors file."""
        facts = {"version": VERSION, "fitted_on": dict(self.fitted_on), "held_out": self.held_out.to_dict("list")}
        with replacing(Path(path)) as part:
            write_tensors({"maps": self.maps, "shifts": self.shifts}, part, {"tuned_lens": json.dumps(facts)})
        return Path(path)


def load_tuned_lens(path: str | Path, model: HookedModel | None = None) -> TunedLens:
    """Load a tuned lens that `save` wrote.

    Args:
        path: The safetensors file.
        model: The model to read, with the weights of the fit.

    Raises:
        BadData: The file is no tuned lens or damaged, or the model has other weights.
    """
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["tuned_lens"])
            maps, shifts = file.get_tensor("maps"), file.get_tensor("shifts")
        lens = TunedLens(
            maps=maps, shifts=shifts, fitted_on=facts["fitted_on"], held_out=pd.DataFrame(facts["held_out"])
        )
    except Exception as error:  # of safetensors, JSON and missing names
        raise BadData(f"{path} is no tuned lens or damaged: {error}") from error
    if facts["version"] != VERSION or maps.shape != (*shifts.shape, shifts.shape[-1]):
        raise BadData(f"{path} is a tuned lens of version {facts['version']}; version {VERSION} is read: fit it again")
    if model is not None and lens.fitted_on["weights"] != weights_hash(model):  # type: ignore[arg-type]
        raise BadData(f"{path} was fitted on other weights than this model's: fit it again")
    return lens


@torch.no_grad()
def fit_tuned_lens(
    model: HookedModel, tokens: Tensor, *, held_out: Tensor | None = None, ridge: float = 1e-4, batch: int = 8,
    store: Path | None = None, progress: Callable[[int, int], None] | None = None,
) -> TunedLens:  # fmt: skip
    """Fit a tuned lens by ridge regression on documents, and measure it on held-out ones.

    Costs one run per document and 4 (L + 1) d_model^2 operations per position. An observed model reads the held-out documents
    3 (L + 1) times. Memory holds 2 (L + 1) d_model^2 numbers in float64.

    Args:
        model: A model of `build`, or an observed one, without hooks.
        tokens: Ids [document, pos].
        held_out: Ids of the documents on which the losses are measured; by default the last quarter of `tokens`.
        ridge: Strength of the pull to the identity, relative to the mean variance of the stream's channels.
        batch: Documents that run together.
        store: A folder in which the result is stored as safetensors. A lens of the same weights, ids and ridge is loaded from it.
        progress: Called with the documents read and all documents.

    Returns:
        The maps, with the loss of the tuned lens, the logit lens and the token frequencies for each layer.

    Raises:
        BadData: Fewer than two documents, a document of both the fit and the measurement, or the model shows no stream that its head
            could read.
        WorkbenchError: Hooks are registered, so the streams are not the model's own.
    """
    if any(map(has_hooks, model.hook_points())):
        raise WorkbenchError("hooks are registered: fit the lens without them, then read the edited run with it")
    ids, count = model.to_tokens(tokens), len(model.to_tokens(tokens))
    if held_out is None:
        if count < 2:
            raise BadData(f"{count} document: the lens is fitted on some and measured on others, so give at least 2")
        ids, held_out = ids[: count - max(1, count // 4)], ids[count - max(1, count // 4) :]
    held_out = model.to_tokens(held_out)
    refuse_targets(torch.cat([ids[:, 1:].flatten(), held_out[:, 1:].flatten()]), model.n_logits)
    if seen := set(map(tuple, ids.tolist())) & set(map(tuple, held_out.tolist())):
        raise BadData(
            f"{len(seen)} documents are held out and fitted: the losses would be those of the fit; give other documents"
        )
    names, n_layers = streams(model), model.config.n_layers
    if len(names) <= n_layers or (model.foreign is not None and model.is_read_only(names[n_layers])):
        raise BadData("the model shows no stream for each layer that its head could be asked to read")
    fitted_on = {
        "weights": weights_hash(model), "data": digest(ids.tolist(), held_out.tolist()), "documents": len(ids),  # type: ignore[arg-type]
        "positions": ids.numel(), "held_out": len(held_out), "ridge": ridge,
    }  # fmt: skip
    empty = TunedLens(maps=torch.zeros(0), shifts=torch.zeros(0), fitted_on=fitted_on, held_out=pd.DataFrame())
    if store is not None and empty.file(store).exists():
        return load_tuned_lens(empty.file(store))
    total, done = len(ids) + len(held_out), 0
    moments = _Moments(n_layers, model.config.d_model, ids.device)
    for some in ids.split(batch):
        moments.add({n: x.flatten(0, 1) for n, x in _streams_of(model, names, some).items()})
        done += len(some)
        if progress is not None:
            progress(done, total)
    maps, shifts = moments.solve(ridge)
    counts = torch.bincount(ids[:, 1:].flatten(), minlength=model.n_logits) + 1.0  # of predicted tokens
    lens = replace(empty, maps=maps, shifts=shifts)
    rows = list[pd.DataFrame]()
    for some in held_out.split(batch):
        rows.append(_losses(model, names, lens, (counts / counts.sum()).log(), some))
        done += len(some)
        if progress is not None:
            progress(done, total)
    by = pd.concat(rows).groupby(["layer", "lens"], sort=False)
    frame = by.agg(loss=("loss", "mean"), se=("loss", "sem"), kl=("kl", "mean")).reset_index()
    if not frame.loc[frame["lens"] == "logit", "kl"].any():
        raise BadData(f"this {type(model.foreign).__name__} reads its output from elsewhere than its last stream")
    lens = replace(lens, maps=maps.cpu(), shifts=shifts.cpu(), held_out=frame)
    if store is not None:
        lens.save(lens.file(store))
    return lens


class _Moments:
    """Weighted second moments of every stream x with itself and with the final stream y, in float64: [x, 1] [x, 1]' and [x, 1] y'."""

    def __init__(self, n_layers: int, width: int, device: torch.device) -> None:
        self.inner = torch.zeros(n_layers + 1, width + 1, width + 1, dtype=torch.float64, device=device)
        self.outer = torch.zeros(n_layers + 1, width + 1, width, dtype=torch.float64, device=device)

    def add(self, rows: Mapping[int, Tensor]) -> None:
        """Add the streams [position, d_model] of the same positions by layer."""
        y = rows[len(self.inner) - 1].double()
        weight = 1 / y.square().mean(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        for n, x in rows.items():
            one = torch.cat([x.double(), torch.ones_like(weight)], -1)
            self.inner[n] += one.T @ (weight * one)
            self.outer[n] += one.T @ (weight * y)

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Return maps [layer, d, d] and shifts [layer, d] in float32."""
        weight, width = self.inner[:, -1:, -1:], self.outer.shape[-1]
        x, y = self.inner[:, -1, :-1] / weight[:, 0], self.outer[:, -1] / weight[:, 0]
        inner = self.inner[:, :-1, :-1] / weight - x[:, :, None] * x[:, None]
        outer = self.outer[:, :-1] / weight - x[:, :, None] * y[:, None]
        eye = torch.eye(width, dtype=torch.float64, device=inner.device)
        size = inner.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        maps = torch.linalg.lstsq(inner + ridge * size * eye, outer - inner).solution.mT + eye
        maps[-1] = eye
        return maps.float(), (y - (maps @ x[..., None])[..., 0]).float()


def _streams_of(model: HookedModel, names: Mapping[int, str], ids: Tensor) -> dict[int, Tensor]:
    cache = model.run_with_cache(ids, names_filter=list(names.values()))[1]
    return {n: cache[name] for n, name in names.items()}


def _losses(
    model: HookedModel, names: Mapping[int, str], lens: TunedLens, frequency: Tensor, ids: Tensor
) -> pd.DataFrame:
    """Compute loss and divergence from the output for each lens, layer and document."""
    read = _streams_of(model, names, ids)
    last = read[model.config.n_layers]

    def log_probabilities(stream: Tensor) -> Tensor:
        if model.foreign is None:
            return wide(model.unembed(model.ln_final(stream))).log_softmax(-1)
        with model.hooks([(names[model.config.n_layers], lambda x, hook: stream)]):
            return wide(model.everywhere(ids)).log_softmax(-1)

    def rows() -> Iterator[dict[str, Any]]:
        output = log_probabilities(last)
        for layer, x in read.items():
            readings = {"tuned": log_probabilities(lens(layer, x)), "logit": log_probabilities(x)}
            readings["frequency"] = frequency.expand_as(output)
            for name, reading in readings.items():
                log_p = reading[:, :-1]
                loss = -log_p.gather(-1, ids[:, 1:, None])[..., 0].mean(-1)
                kl = divergence(output[:, :-1], log_p).mean(-1)
                for i, pair in enumerate(zip(loss.tolist(), kl.tolist(), strict=True)):
                    yield {"layer": layer, "lens": name, "document": i, "loss": pair[0], "kl": pair[1]}

    return pd.DataFrame(rows())
