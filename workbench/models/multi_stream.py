"""Several residual streams in place of the one: a sublayer reads them weighted, they mix, and its output goes to each of them.

    x_s = h_pre X;  X' = h_res X + h_post f_s(norm(x_s))^T;  X [stream, d_model], at the start n copies of the embedding

The final norm reads the streams' mean, which is the published sum over n: the norm takes the factor away, up to eps, and norms of
streams stay comparable with one stream's. What a block reads (`hook_resid_pre`, `hook_resid_mid`) is x_s, and `hook_resid_post`
shows the mean after the block, all of them at `hook_streams`: measures of the stream read these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.errors import BadData
from workbench.models.hook_points import is_hooked
from workbench.models.shortcut import Memory, Shortcut, Weight
from workbench.models.stream import KINDS, Stream, output_name

MATRICES = ("h_pre", "h_res", "h_post")


class MultiStream(Stream):
    """Streams whose matrices a shortcut makes (`connections`)."""

    whole = False

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
        """The mean at `hook_resid_post`: what a hook adds to it is added to every stream."""
        streams = block.run_hook("hook_streams", self.written(out, memory))
        if block.layer == self.n_layers - 1:
            mean: Tensor = block.run_hook("hook_resid_post", streams.mean(-2))
            return mean
        if block.hook_state.enabled and is_hooked(point := block.hook_resid_post):
            mean = streams.mean(-2)
            streams = streams + (point(mean.clone()) - mean).unsqueeze(-2)
        return self.read(2 * block.layer + 2, streams, memory)

    def read(self, sublayer: int, streams: Tensor, memory: Memory) -> Tensor:
        """What a sublayer reads of the streams [batch, pos, stream, d_model]; what passes by it is kept."""
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
        """The streams behind a sublayer."""
        passing, post = memory.pop("passing"), memory.pop("h_post")
        return torch.addcmul(passing, post.unsqueeze(-1), out.to(passing.dtype).unsqueeze(-2))

    @staticmethod
    def hooked(block: Any, name: str, matrix: Tensor, streams: Tensor) -> Tensor:
        """A matrix as it leaves its hook point, with batch and positions; without hooks as it is."""
        if not is_hooked(point := getattr(block, name)):
            return matrix
        axes = 2 if name.endswith("res") else 1
        # a copy: an edit in place must not reach the parameter
        shown: Tensor = point(matrix.expand(*streams.shape[:2], *matrix.shape[-axes:]).clone())
        return shown

    def name(self, sublayer: int, matrix: str) -> str:
        """Hook point of a matrix."""
        return f"blocks.{sublayer // 2}.hook_{KINDS[sublayer % 2]}_{matrix}"

    def points(self, sublayer: int) -> list[str]:
        names = [self.name(s, matrix) for s in range(sublayer) for matrix in MATRICES[1:]]
        return names if sublayer == 2 * self.n_layers else [*names, self.name(sublayer, "h_pre")]

    def paths(self, sublayer: int, used: Mapping[str, Tensor]) -> dict[str, Weight]:
        """How much of the embedding and of each output arrives in what a sublayer reads: [batch, pos, 1] each."""
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
    """Weighted sums of streams, in their type: autocast would multiply in a shorter one."""
    if not torch.is_autocast_enabled(streams.device.type):
        return weights @ streams
    with torch.autocast(streams.device.type, enabled=False):
        return weights @ streams
