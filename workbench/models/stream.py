"""What a sublayer reads of the outputs before it: their sum, the residual stream, or weighted averages of what stood there.

    y_0 = embedding;  y_{s+1} = x_s + f_s(norm(x_s));  x_s = y_s, or sum over j of w_sj y_j

Sublayers are counted through: 2 n is layer n's attention, 2 n + 1 its MLP, 2 L the final norm. x_s is what sublayer s reads, y_s
what stands before it. Shortcuts say what passes by a sublayer (`skip`) and what is averaged (`stream_sources`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.errors import BadData
from workbench.models.hook_points import is_hooked
from workbench.models.shortcut import Memory, Shortcut, Weight, mix, overrides

KINDS = ("attn", "mlp")


class Stream:
    """The residual stream. One for a model; its blocks ask it what follows each sublayer."""

    whole = True
    """Whether what a block reads is all that passes on."""

    def __init__(self, n_layers: int, shortcuts: Sequence[Shortcut]) -> None:
        self.n_layers = n_layers
        cut = next((s for s in shortcuts if overrides(s, "skip")), None)
        self.skips = [cut.skip(s) if cut else "stream" for s in range(2 * n_layers)]
        self.sources: list[tuple[int, ...]] = [()] * (2 * n_layers + 1)

    def add_hook_points(self, blocks: Sequence[Any]) -> None:
        """What the blocks show beside the usual points."""

    def start(self, x: Tensor, memory: Memory) -> Tensor:
        """The embedding [batch, pos, d_model] -> what the first block reads."""
        return x

    def after_attention(self, block: Any, x: Tensor, out: Tensor, memory: Memory) -> Tensor:
        """What the MLP reads of what the attention read and its output."""
        return self.joined(2 * block.layer, x, out, memory)

    def after_mlp(self, block: Any, x: Tensor, out: Tensor, memory: Memory) -> Tensor:
        """What follows the block: the next one's input, or the final norm's; past `hook_resid_post`."""
        joined: Tensor = block.run_hook("hook_resid_post", self.joined(2 * block.layer + 1, x, out, memory))
        return joined

    def joined(self, sublayer: int, x: Tensor, out: Tensor, memory: Memory) -> Tensor:
        """A sublayer's output and what passes by it."""
        if (skip := self.skips[sublayer]) == "stream":
            return x + out
        return memory["stood"] + out if skip == "sum" else out.to(x.dtype)

    def coefficients(self, layer: int) -> tuple[str, ...]:
        """What the weights of what follows a block multiply, in their order, where they are the same for all tokens."""
        return ()

    def points(self, sublayer: int) -> list[str]:
        """Hook points on the way to what a sublayer reads: their weights are those of `paths`."""
        return []

    def paths(self, sublayer: int, used: Mapping[str, Tensor]) -> dict[str, Weight]:
        """How much of the embedding and of each output arrives in what a sublayer reads, in the run that `used` is of."""
        stood: dict[str, Weight] = {"embed": 1.0}
        reads, history = stood, {0: stood}
        for s in range(sublayer):
            nothing: dict[str, Weight] = dict.fromkeys(stood, 0.0)
            passing = {"stream": reads, "sum": stood, "": nothing}[self.skips[s]]
            stood = history[s + 1] = passing | {output_name(s): 1.0}
            reads = stood
            if sources := self.sources[s + 1]:
                row = self.used_weights(s + 1, used)
                reads = {name: _total(row, [history[j].get(name, 0.0) for j in sources]) for name in stood}
        return reads

    def used_weights(self, sublayer: int, used: Mapping[str, Tensor]) -> Sequence[Weight]:
        """The weights of what a sublayer reads in the run that `used` is of."""
        raise NotImplementedError


class AveragedStream(Stream):
    """What stands before a sublayer is kept, and what some sublayers read is a weighted sum of it."""

    whole = False

    def __init__(self, n_layers: int, shortcuts: Sequence[Shortcut], averager: Shortcut) -> None:
        super().__init__(n_layers, shortcuts)
        self.averager = averager
        self.sources = [(), *(averager.stream_sources(s) for s in range(1, 2 * n_layers + 1))]
        self.kept = {j for sources in self.sources for j in sources}

    def add_hook_points(self, blocks: Sequence[Any]) -> None:
        for n, block in enumerate(blocks):
            block.add_hook_points("dwa_in")  # what stands after the block
            for s in (2 * n + 1, 2 * n + 2):
                if self.sources[s]:
                    block.add_hook_points(self.point(s).removeprefix("hook_"))  # weights of its sources, own last
            block.shares_input = not self.sources[2 * n]

    def point(self, sublayer: int) -> str:
        """Name in its block of the hook point that weights of what a sublayer reads pass."""
        if not self.averager.weighs_tokens:
            return "hook_dwa_weights"
        return "hook_mid_depth_weights" if sublayer % 2 else "hook_depth_weights"

    def start(self, x: Tensor, memory: Memory) -> Tensor:
        memory["stood"], memory["history"] = x, {0: x}
        return x

    def after_attention(self, block: Any, x: Tensor, out: Tensor, memory: Memory) -> Tensor:
        sublayer = 2 * block.layer + 1
        return self.read(block, sublayer, self.joined(sublayer - 1, x, out, memory), memory)

    def after_mlp(self, block: Any, x: Tensor, out: Tensor, memory: Memory) -> Tensor:
        """The last `hook_resid_post` is the final norm's input; the others show what stands after their block."""
        sublayer = 2 * block.layer + 2
        last = block.layer == self.n_layers - 1
        x = block.run_hook("hook_dwa_in", self.joined(sublayer - 1, x, out, memory))
        x = self.read(block, sublayer, x if last else block.run_hook("hook_resid_post", x), memory)
        return block.run_hook("hook_resid_post", x) if last else x

    def read(self, block: Any, sublayer: int, stood: Tensor, memory: Memory) -> Tensor:
        """What a sublayer reads, of what stands before it."""
        memory["stood"], history = stood, memory["history"]
        if sublayer in self.kept:
            history[sublayer] = stood
        if not (sources := self.sources[sublayer]):
            return stood
        outputs = [history[j] for j in sources]
        weights = self.weights(block, sublayer, outputs, memory)
        if not isinstance(weights, Tensor):
            return mix(weights, outputs)
        if weights.ndim == 1 or weights.shape[-2] == 1:
            return mix(weights.unbind(-1), outputs)
        chunks = [y.unflatten(-1, (weights.shape[-2], -1)) for y in outputs]
        return mix(weights[..., None, :].unbind(-1), chunks).flatten(-2)

    def weights(
        self, block: Any, sublayer: int, outputs: Sequence[Tensor], memory: Memory
    ) -> Sequence[Weight] | Tensor:
        """Coefficients as they leave their hook point; without hooks as they are."""
        weights = self.averager.stream_weights(sublayer, outputs, memory)
        if not block.hook_state.enabled or not is_hooked(point := getattr(block, self.point(sublayer))):
            return weights
        like = outputs[-1]
        if not isinstance(weights, Tensor):
            weights = torch.tensor(weights, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        if self.averager.weighs_tokens and weights.ndim == 1:
            weights = weights.expand(*like.shape[:2], 1, -1)
        hooked: Tensor = point(weights.clone())  # an edit in place must not reach the parameter
        return hooked

    def coefficients(self, layer: int) -> tuple[str, ...]:
        sources = () if self.averager.weighs_tokens else self.sources[2 * layer + 2]
        return (*("embed" if j == 0 else f"block.{j // 2 - 1}" for j in sources[:-1]), "own") if sources else ()

    def points(self, sublayer: int) -> list[str]:
        return [self.name(s) for s in range(1, sublayer + 1) if self.sources[s]]

    def name(self, sublayer: int) -> str:
        """The hook point in full."""
        return f"blocks.{(sublayer - 1) // 2}.{self.point(sublayer)}"

    def depth_sources(self) -> dict[str, tuple[str, ...]]:
        """Hook point of each sublayer's weights by token -> what they multiply: an output, or outputs summed (`a:b`)."""
        labels = ["embed"]
        for s in range(2 * self.n_layers):
            first = labels[s].partition(":")[0] + ":" if self.skips[s] == "sum" else ""
            labels.append(first + output_name(s))
        reads = enumerate(self.sources) if self.averager.weighs_tokens else ()
        return {self.name(s): tuple(labels[j] for j in sources) for s, sources in reads if sources}

    def used_weights(self, sublayer: int, used: Mapping[str, Tensor]) -> Sequence[Weight]:
        row = used[name] if (name := self.name(sublayer)) in used else None
        if row is None and self.averager.weighs_tokens:
            raise BadData(f"{name} is missing: weights depend on the tokens, so give a cache of the whole run")
        if row is None:
            row = torch.as_tensor(self.averager.stream_weights(sublayer, (), {}))
        if row.ndim == 1:
            return row.double().tolist()
        width = self.averager.config.d_model // row.shape[-2]
        chunked = row if row.shape[-2] == 1 else row.repeat_interleave(width, -2)
        return chunked.unbind(-1)


def output_name(sublayer: int) -> str:
    """TransformerLens' name of a sublayer's output: `2_attn_out`, `2_mlp_out`."""
    return f"{sublayer // 2}_{KINDS[sublayer % 2]}_out"


def _total(weights: Sequence[Weight], values: Sequence[Weight]) -> Weight:
    """Their weighted sum, terms that are nothing left out."""
    total: Weight = 0.0
    for weight, value in zip(weights, values, strict=True):
        if isinstance(value, Tensor) or value:
            total = total + weight * value
    return total
