"""The parts of an observed decoder's stream and logits: what its blocks add, split into heads and value paths.

Everything is found in the numbers of one traced run: what each block adds, the weights of averaged streams, the norms (of
the end, and those between W_O and the stream), the head. What is not found is refused in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import BadData
from workbench.kernels.joint import Softmax, joint_attention
from workbench.models.anatomy import Anatomy, Ending, Reader
from workbench.models.hooked import HookedModel
from workbench.names import stream_hook
from workbench.observing.interception.weights import applied, is_sharded
from workbench.observing.recognition.frozen_norm import FrozenNorm, fit_norm
from workbench.observing.recognition.outputs import SHARE
from workbench.observing.recognition.stream_sums import depth_weights
from workbench.observing.recognition.structure import DecoderStructure, LayerStructure
from workbench.observing.recognition.value_paths import NEGLIGIBLE, TABLE, Source, ValuePath, mixture_of


class ObservedAnatomy(Anatomy):
    """Of an observed decoder, from a structure and value paths that were recognised just now."""

    def __init__(self, model: HookedModel, structure: DecoderStructure, paths: Sequence[ValuePath]) -> None:
        super().__init__(model)
        self.structure, self.paths = structure, paths
        self.written: dict[int, FrozenNorm] = {}  # what stands between W_O and the stream

    def needed(self, by: str, layer: int, frozen: bool = False) -> list[str]:
        """Hook points that a decomposition reads; raises `BadData` where the model does not show them."""
        names = [stream_hook(0, self.model.config.n_layers), stream_hook(layer, self.model.config.n_layers)]
        for name in names:
            if name not in self.model.hook_dict:
                raise BadData(f"this model's stream cannot be taken apart: {self._why(name)}")
        for n in range(layer):
            structure = self.structure.layers[n]
            if not structure.adds:
                if by != "layer" or structure.is_normed:
                    raise BadData(f"layer {n} of this model shows no parts: {self._why(f'blocks.{n}.hook_attn_out')}")
                names += [f"blocks.{n}.hook_resid_pre", f"blocks.{n}.hook_resid_post"]  # what it adds, as a whole
            names += [f"blocks.{n}.hook_{x}" for x in ("attn_out", "mlp_out") if getattr(structure, x) is not None]
            if by != "layer" and structure.is_read:
                self._check_output(n)
                names += [f"blocks.{n}.attn.hook_z"]
            if by == "value_path" and structure.is_read:
                names += [*self._attention_points(n), f"blocks.{n}.attn.hook_v", *self._bases(n).values()]
                names += [self._weights_point(n)] if mixture_of(self.paths, n).by_token else []
        if frozen:
            if isinstance(self.structure.ending, str):
                raise BadData(f"this model's logits cannot be taken apart: {self.structure.ending}")
            names += ["unembed.hook_in"]
        return list(dict.fromkeys(names))

    @property
    def inner_dtypes(self) -> tuple[torch.dtype, ...]:
        """Float32 where a norm of a float64 module passes through it."""
        ending = self.structure.ending
        norms = [*self.written.values(), *([] if isinstance(ending, str) else [ending.norm])]
        return (torch.float32,) if any(norm.is_narrowed for norm in norms) else ()

    def _why(self, name: str) -> str:
        return self.model.absent.get(name, f"it does not show {name}")

    def run(self, given: Any, names: Sequence[str]) -> tuple[Tensor | None, Mapping[str, Tensor]]:
        """Logits of every position, None of a module without a head, and activations of a run."""
        model: Any = self.model
        if self.structure.logits is None:
            return None, model.run_with_cache(given, names)[1].cache_dict
        logits, cache = model.everywhere_with_cache(given, names)
        return logits, cache.cache_dict

    # ---- the stream --------------------------------------------------------------------------------------------------

    def parts(self, read: Reader, by: str, layer: int) -> list[tuple[str, Tensor]]:
        """(label, [batch, pos, d_model]): `embed` is what the first block reads, `0_attn_bias` that of W_O, `0_block_out` a block whole."""
        first, *weights = self._weights(read, layer)
        found = [("embed", first * read.cut("blocks.0.hook_resid_pre"))]
        for n, structure in enumerate(self.structure.layers[:layer]):
            if not structure.adds:
                mine = [
                    (f"{n}_block_out", read.cut(f"blocks.{n}.hook_resid_post") - read.cut(f"blocks.{n}.hook_resid_pre"))
                ]
            elif by != "layer" and structure.is_read:
                mine = self._heads(read, n, by)
            else:
                mine = [(f"{n}_attn_out", read.cut(f"blocks.{n}.hook_attn_out"))]
            weight = weights.pop(0)
            found += [(label, weight * part) for label, part in mine]
            if structure.mlp_out is not None:
                found.append((f"{n}_mlp_out", weights.pop(0) * read.cut(f"blocks.{n}.hook_mlp_out")))
        return found

    def _weights(self, read: Reader, layer: int) -> list[Any]:
        """How much of what the first block reads, and of each output so far, arrives in a stream."""
        layers, arriving = self.structure.layers[:layer], self.structure.arriving[: layer + 1]
        each = [f"blocks.{n}.hook_{x}" for n, s in enumerate(layers) for x in ("attn_out", "mlp_out") if getattr(s, x)]
        if arriving[-1].by_token is not None:  # of this run
            outputs = [read.cut(name) for name in ("blocks.0.hook_resid_pre", *each)]
            stream = read.cut(stream_hook(layer, self.model.config.n_layers))
            weights, _ = depth_weights(stream, outputs)
            return list(weights.to(stream).repeat_interleave(stream.shape[-1] // weights.shape[-2], dim=-2).unbind(-1))
        if any(s.by_token is not None for s in arriving):
            raise BadData(
                "this model's stream cannot be taken apart: sums of earlier outputs by token stand on its way"
            )
        first, *blocks = self._constants(layer)
        counts = (max(1, sum(getattr(s, x) is not None for x in ("attn_out", "mlp_out"))) for s in layers)
        return [first, *(weight for weight, count in zip(blocks, counts, strict=True) for _ in range(count))]

    def _constants(self, layer: int) -> list[float]:
        """How much of what the first block reads, and of what each block adds, arrives in a stream, the same for all tokens."""
        outs: list[list[float]] = []  # of the first stream and of each block's output
        for n, arrives in enumerate(self.structure.arriving[: layer + 1]):
            sources = [[1.0], *outs]
            width = n + 1
            padded = [row + [0.0] * (width - len(row)) for row in sources]
            read = [sum(w * row[i] for w, row in zip(arrives.weights, padded, strict=True)) for i in range(width)]
            keep, again = self.structure.layers[n].keeps if n < layer else (1.0, 0.0)
            outs.append([keep * read[0] + again, *(keep * weight for weight in read[1:]), 1.0])
        return read

    # ---- heads -------------------------------------------------------------------------------------------------------

    def _check_output(self, n: int) -> None:
        """Find what stands between W_O and the stream; raises `BadData` where that cannot be held."""
        if n in self.written:
            return
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
                f"layer {n} shows no heads: what its block adds is not what W_O makes, nor a norm of it (several mixers in one "
                "block, a part in between)"
            )
        self.written[n] = norm

    @property
    def foreign(self) -> nn.Module:
        """The observed module."""
        return self.model.foreign

    def _heads(self, read: Reader, n: int, by: str) -> list[tuple[str, Tensor]]:
        layer, norm = self.structure.layers[n], self.written[n]
        w_o, bias = (x.to(read.wide) for x in output_map(self.foreign, layer))
        z, added = read(f"blocks.{n}.attn.hook_z"), read.cut(f"blocks.{n}.hook_attn_out")
        made = torch.einsum("bphd,hdm->bpm", read.kept(z), w_o) + bias
        divisor, gain = norm.divisor(made, added), norm.gain.to(made)

        def arrives(x: Tensor) -> Tensor:
            """What of a part of W_O's output is added to the stream."""
            return gain * norm.read(x) / divisor

        zs = self._value_paths(read, n, z) if by == "value_path" else {"": z}
        found = []
        for path, part in zs.items():
            by_head = arrives(torch.einsum("bphd,hdm->hbpm", read.kept(part), w_o))
            found += [(f"L{n}H{h}{path and f'.{path}'}", one) for h, one in enumerate(by_head)]
        found.sort(key=lambda each: int(each[0].partition(".")[0].partition("H")[2]))  # paths of a head side by side
        rest = None if not bool(bias.any()) else arrives(bias.expand_as(made))
        if norm.shift is not None:
            rest = norm.shift.to(made) + (0.0 if rest is None else rest)
        return found if rest is None else [*found, (f"{n}_attn_bias", rest.expand_as(made))]

    # ---- value paths -------------------------------------------------------------------------------------------------

    def _attention_points(self, n: int) -> list[str]:
        """What a layer's pattern is made of: rotated queries and keys, else the pattern itself."""
        names = [f"blocks.{n}.attn.hook_{x}" for x in ("rot_q", "rot_k")]
        if all(name in self.model.hook_dict for name in names):
            return names
        pattern = f"blocks.{n}.attn.hook_pattern"
        if pattern not in self.model.hook_dict:
            raise BadData(f"layer {n} shows no value paths: {self._why(pattern)}")
        return [pattern]

    def _fitted(self, n: int, into: str) -> dict[Source, Any]:
        """Coefficients by source of a layer's values, or of what is added beside its attention; by head [head] where they differ."""
        if into == "output" and (changed := self.structure.layers[n].changed):
            if changed != SHARE:
                raise BadData(f"layer {n} shows no value paths: {changed}")
            return {}  # a share of what it attends to, which no coefficients explain
        mine = [p for p in self.paths if p.layer == n and p.into == into]
        if not all(p.exact for p in mine):
            what = "values" if into == "value" else "head outputs"
            raise BadData(
                f"layer {n} shows no value paths: its {what} hold more than what layers project, times one coefficient each"
            )
        if (mixture := mixture_of(self.paths, n)).by_token and into == "value":
            return dict.fromkeys(mixture.order)  # weights are read from the run
        if any(p.head is not None for p in mine):
            return {s: torch.tensor([p.coefficients[s] for p in mine])[:, None] for s in mine[0].coefficients}
        return {s: c for p in mine for s, c in p.coefficients.items() if abs(c) > NEGLIGIBLE}

    def _bases(self, n: int) -> dict[str, str]:
        """Hook points of what a layer's values are made of, by path."""
        sources = {**self._fitted(n, "value"), **self._fitted(n, "output")}
        tables = {_path(s): f"blocks.{n}.attn.table.hook_v" for s in sources if str(s).startswith(TABLE)}
        layers = {s: n if s == "own" else 0 if s == "first" else s for s in sources if _path(s) not in tables}
        return tables | {_path(s): self._projected(int(j)) for s, j in layers.items()}

    def _weights_point(self, n: int) -> str:
        return f"blocks.{n}.attn.hook_v_weights"

    def _projected(self, n: int) -> str:
        """Hook point of what a layer projects: of its values, where they are nothing else."""
        own = f"blocks.{n}.attn.own.hook_v"
        return own if own in self.model.hook_dict else f"blocks.{n}.attn.hook_v"

    def _value_paths(self, read: Reader, n: int, z: Tensor) -> dict[str, Tensor]:
        """What W_O reads [batch, pos, head, d_head] by where the values come from."""
        layer, bases = self.structure.layers[n], self._bases(n)
        value, beside = self._fitted(n, "value"), self._fitted(n, "output")
        if mixture_of(self.paths, n).by_token:
            value = dict(zip(value, read(self._weights_point(n))[..., None, :].unbind(-1), strict=True))
        parts: dict[str, Tensor] = {}
        for source, c in value.items():
            v = _times(c, read(bases[_path(source)]))
            through = self._attended(read, n, v)
            if (taken := beside.get("own")) is not None:  # that of the effective values, whose part this is
                through = through + _times(taken, _wide(v, z.shape[2]))
            parts[_path(source)] = through
        if (first := beside.get("first")) is not None:
            added = _times(first, _wide(read(bases["first"]), z.shape[2]))
            parts["first"] = parts["first"] + added if "first" in parts else added
        if layer.changed == SHARE:  # the same share of every part, of each head and position
            whole = torch.stack(list(parts.values())).sum(0)
            share = (z * whole).sum(-1, keepdim=True) / whole.square().sum(-1, keepdim=True)
            return {path: share * part for path, part in parts.items()}
        return parts

    def _attended(self, read: Reader, n: int, v: Tensor) -> Tensor:
        names = self._attention_points(n)
        if len(names) == 1:
            pattern = read(names[0])
            return torch.einsum("bhqk,bkhd->bqhd", pattern, _wide(v, pattern.shape[1]))
        q, k = (read(name) for name in names)
        return joint_attention([Softmax(1.0, q, [k])], [v])

    # ---- the end -----------------------------------------------------------------------------------------------------

    def ending(self, read: Reader) -> Ending:
        """The final norm as it divides in this run, and the head."""
        found, n_layers = self.structure.ending, self.model.config.n_layers
        assert not isinstance(found, str)
        stream, seen = read.cut(stream_hook(n_layers, n_layers)), read.cut("unembed.hook_in")
        if seen.shape != stream.shape:
            raise BadData("the cache holds what the head reads of some positions only: give the tokens")
        norm, head = found.norm, self.model.unembed.weight.detach().to(read.wide) * found.factor
        shift, bias = (None if x is None else x.to(seen) for x in (norm.shift, found.bias))
        return Ending(
            centred=norm.centred, divisor=norm.divisor(stream, seen), gain=norm.gain.to(seen), shift=shift,
            head=head.T if found.transposed else head, bias=bias,
        )  # fmt: skip


def holds_some_heads(foreign: nn.Module, layer: LayerStructure) -> bool:
    """Whether this process has some of a layer's heads alone, as tensor parallel modules are spread."""
    weight: Any = (
        None
        if layer.z is None or layer.w_o is not None
        else getattr(foreign.get_submodule(layer.z.module), "weight", None)
    )
    return weight is not None and is_sharded(weight) and layer.rows["z"].flatten(1).shape[1] not in weight.shape


@torch.no_grad()
def output_map(foreign: nn.Module, layer: LayerStructure) -> tuple[Tensor, Tensor]:
    """W_O [head, d_value, d_model] of an observed layer and what its matrix adds [d_model], in the matrix's type."""
    assert layer.z is not None
    heads, width = layer.rows["z"].shape[1:]
    rows = torch.eye(heads * width, dtype=layer.rows["z"].dtype, device=layer.rows["z"].device)
    if layer.w_o is not None:
        bare, zero = layer.w_o, rows.new_zeros(1, heads, width)
        bias, made = bare(zero), bare(rows.unflatten(1, (heads, width)))
    else:
        module = foreign.get_submodule(layer.z.module)
        bias, made = applied(module, torch.zeros_like(rows[:1])), applied(module, rows)
    return (made - bias).unflatten(0, (heads, width)), bias[0]


def _path(source: Source) -> str:
    if isinstance(source, str):
        return "table" if source.startswith(TABLE) else source
    return f"source.{source}"


def _times(c: Any, x: Tensor) -> Tensor:
    """A coefficient, of all heads or of each, times [batch, pos, head, d_head]."""
    return (c.to(x) if isinstance(c, Tensor) else c) * x


def _wide(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[2], dim=2)
