"""Parts of an observed decoder's stream and logits: outputs of its blocks, split into heads and value paths.

Weights of averaged streams, norms between W_O and the stream, the final norm and the head are fitted to one traced run. A part
without a fit raises `BadData` with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import BadData
from workbench.hook_names import stream_hook
from workbench.kernels.joint_and_null_softmax import Softmax, joint_attention
from workbench.models.decomposition import TOLERANCE, Anatomy, Ending, Reader
from workbench.models.hooked import HookedModel
from workbench.observing.interception.sharded_weights import is_sharded, matrix_and_bias
from workbench.observing.recognition.attention_calls import repeated
from workbench.observing.recognition.decoder_structure import DecoderStructure, LayerStructure
from workbench.observing.recognition.layer_outputs import GATE, SHARE
from workbench.observing.recognition.least_squares import FrozenNorm, depth_weights, fit_norm
from workbench.observing.recognition.value_paths import NEGLIGIBLE, TABLE, Source, ValuePath, mixture_of


class ObservedAnatomy(Anatomy):
    """Anatomy of an observed decoder, from a freshly recognised structure and its value paths."""

    def __init__(
        self, model: HookedModel, structure: DecoderStructure, paths: Sequence[ValuePath], written: dict[int, FrozenNorm],
    ) -> None:  # fmt: skip
        super().__init__(model)
        self.structure, self.paths = structure, paths
        self.foreign: nn.Module = model.foreign
        self.written = written  # norms between W_O and the stream, by layer, once they are fitted

    def needed(self, by: str, layer: int, frozen: bool = False) -> list[str]:
        """Return the hook points of a decomposition; raises `BadData` if the model lacks one."""
        names = [stream_hook(0, self.model.config.n_layers), stream_hook(layer, self.model.config.n_layers)]
        for name in names:
            if name not in self.model.hook_dict:
                raise BadData(f"this model's stream cannot be taken apart: {self._why(name)}")
        for n in range(layer):
            structure = self.structure.layers[n]
            if not structure.adds:
                if by != "layer" or structure.is_normed:
                    raise BadData(f"layer {n} of this model shows no parts: {self._why(f'blocks.{n}.hook_attn_out')}")
                names += [f"blocks.{n}.hook_resid_pre", f"blocks.{n}.hook_resid_post"]  # their difference is one part
            names += [f"blocks.{n}.hook_{x}" for x in ("attn_out", "mlp_out") if getattr(structure, x) is not None]
            if by != "layer" and structure.is_read:
                self._output_norm(n)
                names += [f"blocks.{n}.attn.hook_z"]
            if by == "value_path" and structure.is_read:
                names += [*self._attention_points(n), f"blocks.{n}.attn.hook_v", *self._bases(n).values()]
                names += [f"blocks.{n}.attn.hook_v_weights"] if mixture_of(self.paths, n).by_token else []
        if frozen:
            if isinstance(self.structure.ending, str):
                raise BadData(f"this model's logits cannot be taken apart: {self.structure.ending}")
            names += ["unembed.hook_in"]
        return list(dict.fromkeys(names))

    @property
    def inner_dtypes(self) -> tuple[torch.dtype, ...]:
        """Float32 if a norm of a float64 module computes in it."""
        ending = self.structure.ending
        norms = [*self.written.values(), *([] if isinstance(ending, str) else [ending.norm])]
        return (torch.float32,) if any(norm.is_narrowed for norm in norms) else ()

    def _why(self, name: str) -> str:
        return self.model.absent.get(name, f"it does not show {name}")

    def run(self, given: Any, names: Sequence[str]) -> tuple[Tensor | None, Mapping[str, Tensor]]:
        """Return logits of every position (None without a head) and the activations of a run."""
        model: Any = self.model
        if self.structure.logits is None:
            return None, model.run_with_cache(given, names)[1].cache_dict
        logits, cache = model.everywhere_with_cache(given, names)
        return logits, cache.cache_dict

    def parts(self, read: Reader, by: str, layer: int, through: Tensor | None = None) -> list[tuple[str, Tensor]]:
        """Return pairs (label, [batch, pos, d_model]) that sum to a stream, or their products with a matrix [d_model, n].

        `embed` is the first block's input, `0_attn_bias` the bias of W_O, `0_block_out` all that a block without known parts adds.
        """

        def mapped(part: Tensor) -> Tensor:
            return part if through is None else part.to(through) @ through

        first, *weights = self._weights(read, layer)
        start = read.cut("blocks.0.hook_resid_pre")
        parts = [("embed", mapped(first * start))]
        by_channel = any(isinstance(weight, Tensor) for weight in weights)
        for n, structure in enumerate(self.structure.layers[:layer]):
            weight, joined = weights.pop(0), None
            if not structure.adds:
                added = read.cut(f"blocks.{n}.hook_resid_post") - read.cut(f"blocks.{n}.hook_resid_pre")
                attention = [(f"{n}_block_out", added)]
            elif by != "layer" and structure.is_read:
                # the matrix joins W_O where no factor by channel stands between and more rows than channels of a head pass it
                joined = None if by_channel or start[..., 0].numel() < structure.rows["z"].shape[-1] else through
                attention = self._heads(read, n, by, joined)
            else:
                attention = [(f"{n}_attn_out", read.cut(f"blocks.{n}.hook_attn_out"))]
            parts += [(label, mapped(weight * part) if joined is None else weight * part) for label, part in attention]
            if structure.mlp_out is not None:
                parts.append((f"{n}_mlp_out", mapped(weights.pop(0) * read.cut(f"blocks.{n}.hook_mlp_out"))))
        return parts

    def _weights(self, read: Reader, layer: int) -> list[Any]:
        """Return the weights of the first block's input and of every output so far in a stream."""
        layers, arriving = self.structure.layers[:layer], self.structure.arriving[: layer + 1]
        each = [f"blocks.{n}.hook_{x}" for n, s in enumerate(layers) for x in ("attn_out", "mlp_out") if getattr(s, x)]
        if arriving[-1].by_token is not None:  # fitted to this run
            outputs = [read.cut(name) for name in ("blocks.0.hook_resid_pre", *each)]
            stream = read.cut(stream_hook(layer, self.model.config.n_layers))
            weights, _ = depth_weights(stream, outputs)
            return list(weights.to(stream).repeat_interleave(stream.shape[-1] // weights.shape[-2], dim=-2).unbind(-1))
        if any(s.by_token is not None for s in arriving):
            raise BadData("this model's stream cannot be taken apart: it passes sums of earlier outputs by token")
        outs: list[list[float]] = [[1.0]]  # weights of the first input and of each block's output, in each stream
        for n, arrives in enumerate(arriving):
            padded = [row + [0.0] * (n + 1 - len(row)) for row in outs]
            pairs = list(zip(arrives.weights, padded, strict=True))
            first, *blocks = (sum(w * row[i] for w, row in pairs) for i in range(n + 1))
            keep, again = self.structure.layers[n].keeps if n < layer else (1.0, 0.0)
            outs.append([keep * first + again, *(keep * weight for weight in blocks), 1.0])
        counts = (max(1, sum(getattr(s, x) is not None for x in ("attn_out", "mlp_out"))) for s in layers)
        return [first, *(weight for weight, count in zip(blocks, counts, strict=True) for _ in range(count))]

    def _output_norm(self, n: int) -> FrozenNorm:
        """Fit the norm (or the identity) between W_O and the stream; raises `BadData` if there is no fit."""
        if n in self.written:
            return self.written[n]
        layer = self.structure.layers[n]
        if layer.z is None:
            raise BadData(f"layer {n} shows no heads: no matrix W_O was found after its attention")
        if holds_some_heads(self.foreign, layer):
            raise BadData(f"layer {n} shows no heads: its weights are spread over processes by head (tensor parallel)")
        w_o, bias = output_map(self.foreign, layer)
        z = layer.rows["z"].to(w_o)
        made, added = torch.einsum("rhd,hdm->rm", z, w_o) + bias, layer.rows["attn_out"]
        if made.shape != added.shape or (norm := fit_norm(made.to(added.dtype), added)) is None:
            raise BadData(
                f"layer {n} shows no heads: what its block adds is neither W_O's output nor a norm of it (several mixers in one "
                "block, a part in between)"
            )
        self.written[n] = norm
        return norm

    def _heads(self, read: Reader, n: int, by: str, through: Tensor | None) -> list[tuple[str, Tensor]]:
        """Return what heads (or their value paths) and W_O's bias add to the stream, or the products with a matrix."""
        layer, norm = self.structure.layers[n], self._output_norm(n)
        w_o, bias = (x.to(read.wide) for x in output_map(self.foreign, layer))
        z, added = read(f"blocks.{n}.attn.hook_z"), read.cut(f"blocks.{n}.hook_attn_out")
        made = torch.einsum("bphd,hdm->bpm", read.at_positions(z), w_o) + bias
        divisor, gain = norm.divisor(made, added), norm.gain.to(made)
        zs = self._value_paths(read, n, z) if by == "value_path" else {"": z}
        w_o, rest = gain * norm.read(w_o), gain * norm.read(bias) / divisor
        if norm.shift is not None:
            rest = rest + norm.shift.to(made)
        if through is not None:
            w_o, rest = w_o.to(through) @ through, rest.to(through) @ through
        parts = []
        for path, part in zs.items():
            by_head = torch.einsum("bphd,hdm->hbpm", read.at_positions(part).to(w_o), w_o) / divisor
            parts += [(h, f"L{n}H{h}{path and f'.{path}'}", one) for h, one in enumerate(by_head)]
        parts.sort(key=lambda part: part[0])  # paths of a head side by side
        heads = [(label, part) for _, label, part in parts]
        has_rest = norm.shift is not None or bool(bias.any())
        return [*heads, (f"{n}_attn_bias", rest)] if has_rest else heads

    def _attention_points(self, n: int) -> list[str]:
        """Return the hook points of a layer's rotated queries and keys, or else of its pattern."""
        names = [f"blocks.{n}.attn.hook_{x}" for x in ("rot_q", "rot_k")]
        if all(name in self.model.hook_dict for name in names):
            return names
        pattern = f"blocks.{n}.attn.hook_pattern"
        if pattern not in self.model.hook_dict:
            raise BadData(f"layer {n} shows no value paths: {self._why(pattern)}")
        return [pattern]

    def _fitted(self, n: int, into: str) -> dict[Source, Any]:
        """Return coefficients by source, [head] if heads differ, of a layer's values or of additions to its attention's output."""
        if into == "output" and (changed := self.structure.layers[n].changed):
            if changed not in (SHARE, GATE):
                raise BadData(f"layer {n} shows no value paths: {changed}")
            return {}  # a share of the attention's output, or of each number, which no coefficients explain
        paths = [p for p in self.paths if p.layer == n and p.into == into]
        if not all(p.exact for p in paths):
            what = "values" if into == "value" else "head outputs"
            more = "hold more than what layers project, times one coefficient each"
            raise BadData(f"layer {n} shows no value paths: its {what} {more}")
        if (mixture := mixture_of(self.paths, n)).by_token and into == "value":
            return dict.fromkeys(mixture.order)  # weights are read from the run
        if any(p.head is not None for p in paths):
            return {s: torch.tensor([p.coefficients[s] for p in paths])[:, None] for s in paths[0].coefficients}
        return {s: c for p in paths for s, c in p.coefficients.items() if abs(c) > NEGLIGIBLE}

    def _bases(self, n: int) -> dict[str, str]:
        """Return the hook points of the sources of a layer's values, by path."""
        bases = {}
        for source in (*self._fitted(n, "value"), *self._fitted(n, "output")):
            j = n if source == "own" else 0 if source == "first" else source
            own = f"blocks.{j}.attn.own.hook_v"  # missing where values are nothing else
            point = own if own in self.model.hook_dict else f"blocks.{j}.attn.hook_v"
            bases[_path(source)] = f"blocks.{n}.attn.table.hook_v" if str(source).startswith(TABLE) else point
        return bases

    def _value_paths(self, read: Reader, n: int, z: Tensor) -> dict[str, Tensor]:
        """Split W_O's input [batch, pos, head, d_head] by the source of the values."""
        parts, changed = self._without_gate(read, n, z), self.structure.layers[n].changed
        if changed not in (SHARE, GATE):
            return parts
        run = parts if read.gates is read else self._without_gate(read.gates, n, z)
        total = torch.stack(list(run.values())).sum(0)
        if changed == SHARE:  # by head and position
            share = (z * total).sum(-1, keepdim=True) / total.square().sum(-1, keepdim=True)
        else:  # of each number: where the sum over keys cancels, rounding decides
            share = torch.where(total == 0, 0.0, z / total)
            size = torch.stack(list(self._without_gate(read.gates, n, z, sizes=True).values())).sum(0)
            rounding = torch.where(total == 0, 0.0, share * size * size / total).abs() * torch.finfo(size.dtype).eps
            if not float(rounding.max()) <= TOLERANCE[read.coarsest] * float((share * size).abs().max()):
                raise BadData(f"layer {n} shows no value paths: {changed}, lost to rounding where keys cancel")
        return {path: share * part for path, part in parts.items()}

    def _without_gate(self, read: Reader, n: int, z: Tensor, *, sizes: bool = False) -> dict[str, Tensor]:
        """Return the parts of pattern x values; `sizes`: of the values' magnitudes, which no keys cancel."""
        bases = self._bases(n)
        value, added = self._fitted(n, "value"), self._fitted(n, "output")
        if mixture_of(self.paths, n).by_token:
            weights = read(f"blocks.{n}.attn.hook_v_weights")[..., None, :]
            value = dict(zip(value, weights.unbind(-1), strict=True))
        points = [read(name) for name in self._attention_points(n)]
        parts: dict[str, Tensor] = {}
        for source, c in value.items():
            v = _times(c, read(bases[_path(source)]))
            v = v.abs() if sizes else v
            if len(points) == 1:
                through = torch.einsum("bhqk,bkhd->bqhd", points[0], repeated(v, points[0].shape[1]))
            else:
                through = joint_attention([Softmax(1.0, points[0], [points[1]])], [v])
            if (taken := added.get("own")) is not None:  # of the effective values, which this is a part of
                through = through + _times(taken, repeated(v, z.shape[2]))
            parts[_path(source)] = through
        if (first := added.get("first")) is not None:
            pull = _times(first, repeated(read(bases["first"]), z.shape[2]))
            parts["first"] = parts["first"] + pull if "first" in parts else pull
        return parts

    def adds_values(self, layer: int) -> bool:
        return bool(self._fitted(layer, "output"))

    def ending(self, read: Reader) -> Ending:
        """Return the final norm with the divisors of this run, and the head."""
        ending, n_layers = self.structure.ending, self.model.config.n_layers
        assert not isinstance(ending, str)
        stream, seen = read.cut(stream_hook(n_layers, n_layers)), read.cut("unembed.hook_in")
        if seen.shape != stream.shape:
            raise BadData("the cache holds the head's input at some positions only: give the tokens")
        norm, head = ending.norm, self.model.unembed.weight.detach().to(read.wide) * ending.factor
        shift, bias = (None if x is None else x.to(seen) for x in (norm.shift, ending.bias))
        return Ending(
            centred=norm.centred, divisor=norm.divisor(stream, seen), gain=norm.gain.to(seen), shift=shift,
            head=head.T if ending.transposed else head, bias=bias,
        )  # fmt: skip


def holds_some_heads(foreign: nn.Module, layer: LayerStructure) -> bool:
    """Return whether this process holds only some of a layer's heads (tensor parallel)."""
    if layer.z is None or layer.w_o is not None:
        return False
    weight: Any = getattr(foreign.get_submodule(layer.z.module), "weight", None)
    return weight is not None and is_sharded(weight) and layer.rows["z"].flatten(1).shape[1] not in weight.shape


@torch.no_grad()
def output_map(foreign: nn.Module, layer: LayerStructure) -> tuple[Tensor, Tensor]:
    """Return W_O [head, d_value, d_model] of an observed layer and its bias [d_model], in the matrix's type."""
    assert layer.z is not None
    heads, width = layer.rows["z"].shape[1:]
    if layer.w_o is None:
        matrix, bias = matrix_and_bias(foreign.get_submodule(layer.z.module), layer.rows["z"].flatten(1))
        return matrix.unflatten(0, (heads, width)), bias
    rows = torch.eye(heads * width, dtype=layer.rows["z"].dtype, device=layer.rows["z"].device)
    bias, made = layer.w_o(rows.new_zeros(1, heads, width)), layer.w_o(rows.unflatten(1, (heads, width)))
    return (made - bias).unflatten(0, (heads, width)), bias[0]


def _path(source: Source) -> str:
    if isinstance(source, str):
        return "table" if source.startswith(TABLE) else source
    return f"source.{source}"


def _times(c: Any, x: Tensor) -> Tensor:
    """Multiply [batch, pos, head, d_head] by one coefficient, or one per head."""
    return (c.to(x) if isinstance(c, Tensor) else c) * x
