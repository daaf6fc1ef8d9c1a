"""The residual stream: a sublayer's input is the sum of all earlier outputs, an average of earlier states, or one of several streams.

    state_0 = embedding;  state_{s+1} = x_s + f_s(norm(x_s));  x_s = state_s, or sum over j of w_sj state_j

Sublayers are numbered: 2 n is layer n's attention, 2 n + 1 its MLP, 2 L the final norm. x_s is the input of sublayer s.
Shortcuts change the skip connections (`skip`), average states (`stream_sources`) or have several streams (`connections`).
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
MATRICES = ("h_pre", "h_res", "h_post")


def build_stream(n_layers: int, shortcuts: Sequence[Shortcut]) -> Stream:
    """Return the stream of a model with these shortcuts."""
    for shortcut in shortcuts:
        if overrides(shortcut, "connections"):
            return MultiStream(n_layers, shortcut)
        if overrides(shortcut, "stream_sources"):
            return AveragedStream(n_layers, shortcuts, shortcut)
    return Stream(n_layers, shortcuts)


def output_name(sublayer: int) -> str:
    """Return TransformerLens' name of a sublayer's output: `2_attn_out`, `2_mlp_out`."""
    return f"{sublayer // 2}_{KINDS[sublayer % 2]}_out"


class Stream:
    """The ordinary residual stream. A model has one; its blocks ask it for the input of every sublayer."""

    is_plain = True  # whether a block's input is the complete state that the model passes on

    def __init__(self, n_layers: int, shortcuts: Sequence[Shortcut]) -> None:
        self.n_layers = n_layers
        cut = next((s for s in shortcuts if overrides(s, "skip")), None)
        self.skips = [cut.skip(s) if cut else "stream" for s in range(2 * n_layers)]
        self.sources: list[tuple[int, ...]] = [()] * (2 * n_layers + 1)

    def add_hook_points(self, blocks: Sequence[Any]) -> None:
        """Add the stream's own hook points to the blocks."""

    def start(self, x: Tensor, memory: Memory) -> Tensor:
        """Map the embedding [batch, pos, d_model] to the first block's input."""
        return x

    def after_attention(self, block: Any, x: Tensor, out: Tensor, memory: Memory) -> Tensor:
        """Return the MLP's input from the attention's input and output."""
        return self.state(2 * block.layer, x, out, memory)

    def after_mlp(self, block: Any, x: Tensor, out: Tensor, memory: Memory) -> Tensor:
        """Return the input of the next block or of the final norm, after `hook_resid_post`."""
        return block.run_hook("hook_resid_post", self.state(2 * block.layer + 1, x, out, memory))

    def state(self, sublayer: int, x: Tensor, out: Tensor, memory: Memory) -> Tensor:
        """Return the state after a sublayer: its output plus its skip connection."""
        if (skip := self.skips[sublayer]) == "stream":
            return x + out
        return memory["state"] + out if skip == "sum" else out.to(x.dtype)

    def coefficients(self, layer: int) -> tuple[str, ...]:
        """Return the names of the averaged outputs after a block, in order, if the weights are the same for all tokens."""
        return ()

    def points(self, sublayer: int) -> list[str]:
        """Return the hook points whose values `paths` needs for a sublayer's input."""
        return []

    def paths(self, sublayer: int, used: Mapping[str, Tensor]) -> dict[str, Weight]:
        """Return the coefficients of the embedding and all outputs in a sublayer's input, in the run that recorded `used`."""
        state: dict[str, Weight] = {"embed": 1.0}
        reads, history = state, {0: state}
        for s in range(sublayer):
            choices: dict[str, dict[str, Weight]] = {"stream": reads, "sum": state, "": dict.fromkeys(state, 0.0)}
            passing = choices[self.skips[s]]
            reads = state = history[s + 1] = passing | {output_name(s): 1.0}
            if sources := self.sources[s + 1]:
                weights = self.used_weights(s + 1, used)
                reads = {}
                for name in state:
                    pairs = [(w, history[j].get(name, 0.0)) for w, j in zip(weights, sources, strict=True)]
                    terms = (w * share for w, share in pairs if isinstance(share, Tensor) or share)
                    reads[name] = sum(terms, start=0.0)
        return reads

    def used_weights(self, sublayer: int, used: Mapping[str, Tensor]) -> Sequence[Weight]:
        """Return the weights of a sublayer's sources in the run that recorded `used`."""
        raise NotImplementedError


class AveragedStream(Stream):
    """A stream that stores earlier states; the input of some sublayers is a weighted sum of them."""

    is_plain = False

    def __init__(self, n_layers: int, shortcuts: Sequence[Shortcut], averager: Shortcut) -> None:
        super().__init__(n_layers, shortcuts)
        self.averager = averager
        self.sources = [(), *(averager.stream_sources(s) for s in range(1, 2 * n_layers + 1))]
        self.stored = {j for sources in self.sources for j in sources}

    def add_hook_points(self, blocks: Sequence[Any]) -> None:
        for n, block in enumerate(blocks):
            block.add_hook_points("dwa_in")  # the state after the block
            for s in (2 * n + 1, 2 * n + 2):
                if self.sources[s]:
                    block.add_hook_points(self.point(s).removeprefix("hook_"))  # weights of its sources, own last
            block.shares_input = not self.sources[2 * n]

    def point(self, sublayer: int) -> str:
        """Return the name in its block of the hook point for a sublayer's weights."""
        if not self.averager.weighs_tokens:
            return "hook_dwa_weights"
        return "hook_mid_depth_weights" if sublayer % 2 else "hook_depth_weights"

    def name(self, sublayer: int) -> str:
        """Return the full name of the hook point for a sublayer's weights."""
        return f"blocks.{(sublayer - 1) // 2}.{self.point(sublayer)}"

    def start(self, x: Tensor, memory: Memory) -> Tensor:
        memory["state"], memory["history"] = x, {0: x}
        return x

    def after_attention(self, block: Any, x: Tensor, out: Tensor, memory: Memory) -> Tensor:
        sublayer = 2 * block.layer + 1
        return self.read(block, sublayer, self.state(sublayer - 1, x, out, memory), memory)

    def after_mlp(self, block: Any, x: Tensor, out: Tensor, memory: Memory) -> Tensor:
        """Return the next input; `hook_resid_post` shows the state after the block, in the last block the final norm's input."""
        sublayer = 2 * block.layer + 2
        last = block.layer == self.n_layers - 1
        x = block.run_hook("hook_dwa_in", self.state(sublayer - 1, x, out, memory))
        x = self.read(block, sublayer, x if last else block.run_hook("hook_resid_post", x), memory)
        return block.run_hook("hook_resid_post", x) if last else x

    def read(self, block: Any, sublayer: int, state: Tensor, memory: Memory) -> Tensor:
        """Return a sublayer's input from the state before it and the stored states."""
        memory["state"], history = state, memory["history"]
        if sublayer in self.stored:
            history[sublayer] = state
        if not (sources := self.sources[sublayer]):
            return state
        states = [history[j] for j in sources]
        weights = self.weights(block, sublayer, states, memory)
        if not isinstance(weights, Tensor):
            return mix(weights, states)
        if weights.ndim == 1 or weights.shape[-2] == 1:
            return mix(weights.unbind(-1), states)
        chunks = [y.unflatten(-1, (weights.shape[-2], -1)) for y in states]
        return mix(weights[..., None, :].unbind(-1), chunks).flatten(-2)

    def weights(self, block: Any, sublayer: int, states: Sequence[Tensor], memory: Memory) -> Sequence[Weight] | Tensor:
        """Return the weights of a sublayer's sources after the hooks at their hook point."""
        weights = self.averager.stream_weights(sublayer, states, memory)
        if not block.hook_state.enabled or not is_hooked(point := getattr(block, self.point(sublayer))):
            return weights
        like = states[-1]
        if not isinstance(weights, Tensor):
            weights = torch.tensor(weights, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        if self.averager.weighs_tokens and weights.ndim == 1:
            weights = weights.expand(*like.shape[:2], 1, -1)
        return point(weights.clone())  # an edit in place must not reach the parameter

    def coefficients(self, layer: int) -> tuple[str, ...]:
        sources = () if self.averager.weighs_tokens else self.sources[2 * layer + 2]
        return (*("embed" if j == 0 else f"block.{j // 2 - 1}" for j in sources[:-1]), "own") if sources else ()

    def points(self, sublayer: int) -> list[str]:
        return [self.name(s) for s in range(1, sublayer + 1) if self.sources[s]]

    def depth_sources(self) -> dict[str, tuple[str, ...]]:
        """Return the sources of the weights by token at each hook point: an output, or a sum of outputs (`a:b`)."""
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


class MultiStream(Stream):
    """Several streams, with matrices by `connections`: x_s = h_pre X;  X' = h_res X + h_post f_s(norm(x_s))^T.

    X [stream, d_model] starts as n copies of the embedding. The final norm reads the mean of the streams, which it maps to the same
    as their published sum, up to eps. `hook_resid_pre` and `hook_resid_mid` show x_s, `hook_resid_post` the mean after the block and
    `hook_streams` all streams.
    """

    is_plain = False

    def __init__(self, n_layers: int, connector: Shortcut) -> None:
        super().__init__(n_layers, ())
        self.connector, self.blocks = connector, list[Any]()

    def add_hook_points(self, blocks: Sequence[Any]) -> None:
        self.blocks = list(blocks)
        for block in blocks:
            block.add_hook_points("streams", *(f"{kind}_{matrix}" for kind in KINDS for matrix in MATRICES))

    def start(self, x: Tensor, memory: Memory) -> Tensor:
        n = self.connector.streams
        return self.read(0, x.unsqueeze(-2).expand(*x.shape[:-1], n, x.shape[-1]), memory)

    def after_attention(self, block: Any, x: Tensor, out: Tensor, memory: Memory) -> Tensor:
        return self.read(2 * block.layer + 1, self.written(out, memory), memory)

    def after_mlp(self, block: Any, x: Tensor, out: Tensor, memory: Memory) -> Tensor:
        """Return the next input; a change of the mean at `hook_resid_post` is added to every stream."""
        streams = block.run_hook("hook_streams", self.written(out, memory))
        if block.layer == self.n_layers - 1:
            return block.run_hook("hook_resid_post", streams.mean(-2))
        if block.hook_state.enabled and is_hooked(point := block.hook_resid_post):
            mean = streams.mean(-2)
            streams = streams + (point(mean.clone()) - mean).unsqueeze(-2)
        return self.read(2 * block.layer + 2, streams, memory)

    def read(self, sublayer: int, streams: Tensor, memory: Memory) -> Tensor:
        """Return a sublayer's input from the streams [batch, pos, stream, d_model]; store the mixed streams for `written`."""
        matrices: Sequence[Tensor] = self.connector.connections(sublayer, streams)
        block, kind = self.blocks[sublayer // 2], KINDS[sublayer % 2]
        if block.hook_state.enabled:
            named = zip(MATRICES, matrices, strict=True)
            matrices = [self.hooked(block, f"hook_{kind}_{name}", x, streams) for name, x in named]
        pre, res, post = (x.to(streams.dtype) for x in matrices)
        memory["passing"], memory["h_post"] = _sums(res, streams), post
        return _sums(pre.unsqueeze(-2), streams).squeeze(-2)

    @staticmethod
    def written(out: Tensor, memory: Memory) -> Tensor:
        """Return the streams after a sublayer with this output."""
        passing, post = memory.pop("passing"), memory.pop("h_post")
        return torch.addcmul(passing, post.unsqueeze(-1), out.to(passing.dtype).unsqueeze(-2))

    @staticmethod
    def hooked(block: Any, name: str, matrix: Tensor, streams: Tensor) -> Tensor:
        """Return a matrix after the hooks at its hook point, which see it with batch and positions."""
        if not is_hooked(point := getattr(block, name)):
            return matrix
        axes = 2 if name.endswith("res") else 1
        # a copy: an edit in place must not reach the parameter
        return point(matrix.expand(*streams.shape[:2], *matrix.shape[-axes:]).clone())

    def name(self, sublayer: int, matrix: str) -> str:
        """Return the full name of a matrix's hook point."""
        return f"blocks.{sublayer // 2}.hook_{KINDS[sublayer % 2]}_{matrix}"

    def points(self, sublayer: int) -> list[str]:
        names = [self.name(s, matrix) for s in range(sublayer) for matrix in MATRICES[1:]]
        return names if sublayer == 2 * self.n_layers else [*names, self.name(sublayer, "h_pre")]

    def paths(self, sublayer: int, used: Mapping[str, Tensor]) -> dict[str, Weight]:
        """Return the coefficients [batch, pos, 1] of the embedding and all outputs in a sublayer's input."""
        if missing := [name for name in self.points(sublayer) if name not in used]:
            raise BadData(f"{missing[0]} is missing: streams mix by token, so give a cache of the whole run")
        shares: dict[str, Tensor] = {}  # of each output in each stream
        for s in range(sublayer):
            res, post = (used[self.name(s, matrix)] for matrix in MATRICES[1:])
            shares = shares or {"embed": torch.ones_like(post)}
            shares = {name: (res @ x.unsqueeze(-1)).squeeze(-1) for name, x in shares.items()} | {output_name(s): post}
        if sublayer == 2 * self.n_layers:
            return {name: x.mean(-1, keepdim=True) for name, x in shares.items()}
        pre = used[self.name(sublayer, "h_pre")]
        shares = shares or {"embed": torch.ones_like(pre)}
        return {name: (pre * x).sum(-1, keepdim=True) for name, x in shares.items()}


def _sums(weights: Tensor, streams: Tensor) -> Tensor:
    """Return weighted sums of streams in their own type, which autocast would shorten."""
    if not torch.is_autocast_enabled(streams.device.type):
        return weights @ streams
    with torch.autocast(streams.device.type, enabled=False):
        return weights @ streams
