"""The published Llama-style decoder, top to bottom, on which every architecture is composed.

    x = RMSNorm(H_{n-1});  A_n = softmax(rope(Q) rope(K)^T / sqrt(d_head) + causal mask);  H' = H_{n-1} + (A_n V_n) W_O
    H_n = H' + W_down(silu(W_gate y) * (W_up y)),  y = RMSNorm(H');  logits = W_head RMSNorm(H_L)

Source: the baseline of Zhou et al. (2024), Value Residual Learning; rotary positions in half-split form. No bias, no
dropout, untied head. Attention is fused unless a hook asks for scores or pattern; points without hooks cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.errors import WorkbenchError
from workbench.files import digest
from workbench.kernels.attention import AttentionStatistics, attention_statistics, statistics_of
from workbench.models.hooked import HookedModel, Part, Point, at, causal_scores, hooked, keep, probabilities
from workbench.models.shortcut import Projection, Shortcut, mix, overrides
from workbench.names import STATISTICS

Memory = dict[tuple[str, int], Tensor]  # what later layers read: (q, k or v, layer) -> tensor
_PROJ = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}
_HOOK = {"q": "hook_q", "k": "hook_k", "v": "hook_v"}


class RMSNorm(Part):
    """g x / sqrt(mean(x^2) + eps), statistics in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.hook_scale = Point()  # [batch, pos, 1], the divisor
        self.hook_normalized = Point()  # [batch, pos, d_model], before the gain
        keep(self)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        if not (self.switch.on and (hooked(self.hook_scale) or hooked(self.hook_normalized))):
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        scale = at(self, "hook_scale", (wide.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())
        return at(self, "hook_normalized", (wide / scale).to(x.dtype)) * self.weight


class Rotary(nn.Module):
    """Rotary positions: x cos + rot(x) sin with rot([a; b]) = [-b; a] over the two halves of a head."""

    def __init__(self, d_head: int, n_ctx: int, theta: float) -> None:
        super().__init__()
        self.d_head, self.n_ctx, self.theta = d_head, n_ctx, theta
        self.tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def forward(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines, each [length, 1, d_head], computed once for a device and dtype."""
        key = (like.device, like.dtype)
        if key not in self.tables:
            self.tables[key] = self._table(like)
        cos, sin = self.tables[key]
        return cos[:length], sin[:length]

    @torch.inference_mode(False)  # a table made in inference mode could never be trained with
    def _table(self, like: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(like.dtype, torch.float32)
        exponent = torch.arange(0, self.d_head, 2, device=like.device, dtype=wide) / self.d_head
        position = torch.arange(self.n_ctx, device=like.device, dtype=wide)
        angle = torch.outer(position, 1.0 / self.theta**exponent)
        cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((-angle.sin(), angle.sin()), -1)
        return cos[:, None].to(like.dtype), sin[:, None].to(like.dtype)


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """[batch, pos, head, d_head] turned by its position; the sign of rot() is in the sines."""
    return x * turn[0] + x.roll(x.shape[-1] // 2, -1) * turn[1]  # unfused: rounds as the published code does


class Branch(Part):
    """A tensor on its way into a layer's mix: `own`, `first`, or `source.<j>`."""

    def __init__(self, projections: Sequence[str]) -> None:
        super().__init__()
        for name in projections:
            setattr(self, f"hook_{name}", Point())
        keep(self)


class Attention(Part):
    """Causal attention with grouped key-value heads; q, k and v may be mixtures over layers."""

    def __init__(self, config: ModelConfig, layer: int, shortcuts: Sequence[Shortcut]) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.sources: dict[str, tuple[int, ...]] = {}
        self.mixers: dict[str, tuple[Shortcut, tuple[int, ...]]] = {}  # who mixes, and which of the sources
        self.owned: set[str] = set()  # projections of this layer's own
        widths: dict[Projection, int] = {"q": config.d_model, "k": config.d_key_value, "v": config.d_key_value}
        for name, width in widths.items():
            if all(s.owns(name, layer) for s in shortcuts):
                setattr(self, f"{name}_proj", nn.Linear(config.d_model, width, bias=False))
                self.owned.add(name)
            self.sources[name] = tuple(sorted({j for s in shortcuts for j in s.sources(name, layer)}))
            for mixer in shortcuts:
                if mixer.mixes(name, layer):
                    self.mixers[name] = mixer, mixer.sources(name, layer)
                    setattr(self, f"hook_{name}_mix", Point())  # [sources + 1], own last
        self.o_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.outputs = [s for s in shortcuts if overrides(s, "output")]
        self.shown = [n for n in widths if n in self.owned and (n == "v" or self.sources[n])]
        if self.shown:
            self.own = Branch(self.shown)
        self.branches = {name: self._branches(name, js) for name, js in self.sources.items()}
        self.kept: set[str] = set()  # tensors a later layer reads, told by the model
        for point in ("q", "k", "v", "rot_q", "rot_k", "attn_scores", "pattern", "z", *STATISTICS):
            setattr(self, f"hook_{point}", Point())
        self.statistics = tuple(getattr(self, f"hook_{name}") for name in STATISTICS)
        keep(self)

    def _branches(self, name: str, layers: tuple[int, ...]) -> dict[int, Branch]:
        """Where each source's `hook_<name>` stands: `first`, or `source.<j>` where others than layer 0 are sources."""
        if layers == (0,):
            self.first = getattr(self, "first", None) or Branch([])
            branches = {0: self.first}
        elif layers:
            self.source = getattr(self, "source", None) or nn.ModuleDict()
            branches = {j: self.source[str(j)] if str(j) in self.source else Branch([]) for j in layers}
            self.source.update({str(j): branch for j, branch in branches.items()})
        else:
            branches = {}
        for branch in branches.values():
            setattr(branch, _HOOK[name], Point())
        return branches

    def project(self, name: Projection, x: Tensor, memory: Memory) -> tuple[Tensor, dict[int, Tensor]]:
        """Effective query, key or value [batch, pos, head, d_head], and the sources it may have used."""
        own: Any = None
        if name in self.owned:
            own = getattr(self, _PROJ[name])(x).view(*x.shape[:2], -1, self.config.d_head)
            if name in self.shown:
                own = at(self.own, _HOOK[name], own)
        sources = {j: at(branch, _HOOK[name], memory[name, j]) for j, branch in self.branches[name].items()}
        mixed = self._mixed(name, own, sources) if name in self.mixers else own
        mixed = at(self, _HOOK[name], mixed)
        if name in self.kept:
            memory[name, self.layer] = mixed if name not in self.mixers or own is None else own
        return mixed, sources

    def _mixed(self, name: Projection, own: Tensor | None, sources: dict[int, Tensor]) -> Tensor:
        mixer, layers = self.mixers[name]
        weights = mixer.weights(name, self.layer)
        if self.switch.on and hooked(point := getattr(self, f"{_HOOK[name]}_mix")):
            like = next(iter(sources.values()))
            wide = torch.promote_types(like.dtype, torch.float32)
            weights = point(torch.stack([torch.as_tensor(w, dtype=wide, device=like.device) for w in weights])).unbind()
        return mix(weights, [*(sources[j] for j in layers), own])

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Head outputs [batch, pos, head, d_head]; statistics and pattern only where a hook asks for them."""
        if self.switch.on and (found := self._observed(q, k, v)) is not None:
            return found
        grouped = k.shape[-2] != q.shape[-2]
        return F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=grouped
        ).transpose(1, 2)

    def _observed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Fire what listens to the attention; the head outputs where they came of it."""
        wanted = [point for point in self.statistics if hooked(point)]
        if hooked(self.hook_attn_scores) or hooked(self.hook_pattern):
            z, scores, pattern = self._eager(q, k, v)
            if wanted:  # of the pattern in use, whatever a hook made of it
                self._show(wanted, statistics_of(scores, pattern))
            return z
        if not wanted:
            return None
        # autocast leaves q and k wider than v; attention runs in v's type
        z, statistics = attention_statistics(q.to(v.dtype), k.to(v.dtype), v)
        self._show(wanted, statistics)
        trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        return None if trained else z

    @staticmethod
    def _show(points: list[Point], statistics: AttentionStatistics) -> None:
        for point in points:
            value = getattr(statistics, str(point.name).rsplit("hook_", 1)[-1])
            if point(value) is not value:
                raise WorkbenchError(f"{point.name} can be read, not replaced: it is computed beside the attention")

    def _eager(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = at(self, "hook_attn_scores", causal_scores(q, k))
        pattern = at(self, "hook_pattern", probabilities(scores, q.dtype))
        v = v.repeat_interleave(q.shape[-2] // v.shape[-2], dim=-2)
        return torch.einsum("bhqk,bkhd->bqhd", pattern, v), scores, pattern

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        """Normalised stream [batch, pos, d_model] -> attention's addition to the stream."""
        q, _ = self.project("q", x, memory)
        k, _ = self.project("k", x, memory)
        v, sources = self.project("v", x, memory)
        z = self.attend(at(self, "hook_rot_q", rotate(q, turn)), at(self, "hook_rot_k", rotate(k, turn)), v)
        for shortcut in self.outputs:
            z = shortcut.output(self.layer, z, v, sources)
        return self.o_proj(at(self, "hook_z", z).flatten(-2))

    @property
    def W_O(self) -> Tensor:  # noqa: N802
        """[head, d_head, d_model]."""
        return self.o_proj.weight.T.unflatten(0, (self.config.n_heads, -1))


class MLP(Part):
    """W_down(silu(W_gate x) * (W_up x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.d_mlp, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.d_mlp, bias=False)
        self.down_proj = nn.Linear(config.d_mlp, config.d_model, bias=False)
        self.hook_pre, self.hook_pre_linear, self.hook_post = Point(), Point(), Point()
        keep(self)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, pos, d_model] -> [batch, pos, d_model]."""
        gate, up = at(self, "hook_pre", self.gate_proj(x)), at(self, "hook_pre_linear", self.up_proj(x))
        return self.down_proj(at(self, "hook_post", F.silu(gate) * up))

    @property
    def W_out(self) -> Tensor:  # noqa: N802
        """[d_mlp, d_model]."""
        return self.down_proj.weight.T


class Block(Part):
    """Attention and MLP, each added to the stream after a norm."""

    hook_out_is_single_residual_stream = True  # what TransformerLens' logit lens asks

    def __init__(self, config: ModelConfig, layer: int, shortcuts: Sequence[Shortcut]) -> None:
        super().__init__()
        self.ln1, self.ln2 = (RMSNorm(config.d_model, config.rms_norm_eps) for _ in range(2))
        self.attn, self.mlp = Attention(config, layer, shortcuts), MLP(config)
        for name in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"):
            setattr(self, f"hook_{name}", Point())
        keep(self)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        """Raw block output [batch, pos, d_model]; `hook_resid_post` is the model's to fire."""
        x = at(self, "hook_resid_pre", x)
        x = at(self, "hook_resid_mid", x + at(self, "hook_attn_out", self.attn(self.ln1(x), turn, memory)))
        return x + at(self, "hook_mlp_out", self.mlp(self.ln2(x)))


class Unembed(Part, nn.Linear):
    """Logits from the normalised stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.d_model, config.d_vocab, bias=False)
        self.hook_in = Point()  # the final norm's output
        keep(self)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, pos, d_model] -> [batch, pos, d_vocab]."""
        return super().forward(at(self, "hook_in", x))


class Transformer(HookedModel):
    """A decoder with hooks: the vanilla one, or composed with shortcuts. Build it with `workbench.build`."""

    def __init__(
        self, config: ModelConfig, shortcuts: Sequence[Shortcut] = (), *, architecture: str = "transformer"
    ) -> None:
        super().__init__(config, architecture)
        self.embed, self.hook_embed = nn.Embedding(config.d_vocab, config.d_model), Point()
        self.rotary = Rotary(config.d_head, config.n_ctx, config.rope_theta)
        self.blocks = nn.ModuleList(Block(config, i, shortcuts) for i in range(config.n_layers))
        self.ln_final = RMSNorm(config.d_model, config.rms_norm_eps)
        self.unembed = Unembed(config)
        self.shortcuts = tuple(shortcuts)
        for shortcut in shortcuts:
            self.add_module(shortcut.prefix, shortcut)
        for block in self.blocks:
            for name, layers in block.attn.sources.items():
                for j in layers:
                    self.blocks[j].attn.kept.add(name)
        self.averagers = tuple(s for s in shortcuts if overrides(s, "stream"))  # a tuple: not registered a second time
        for i, block in enumerate(self.blocks if self.averagers else ()):
            block.hook_dwa_in = Point()  # raw block output
            if self.averagers[0].stream_weights(i) is not None:
                block.hook_dwa_weights = Point()  # [averaged outputs], own last
            keep(block)
        keep(self)
        self.setup()  # TransformerLens: names the modules, must come last

    def logits(self, tokens: Tensor) -> Tensor:
        """Token ids [batch, pos] -> logits [batch, pos, d_vocab]."""
        x = at(self, "hook_embed", self.embed(tokens))
        turn, memory, history = self.rotary(tokens.shape[1], x), Memory(), [x]
        for layer, block in enumerate(self.blocks):
            x = block(x, turn, memory)
            x = at(block, "hook_resid_post", x) if not self.averagers else self.average(layer, x, history)
        return self.unembed(self.ln_final(x))

    def average(self, layer: int, x: Tensor, history: list[Tensor]) -> Tensor:
        """What the next block reads where outputs are averaged; the last `hook_resid_post` is the final norm's input."""
        block, last = self.blocks[layer], layer == self.config.n_layers - 1
        x = at(block, "hook_dwa_in", x)
        x = x if last else at(block, "hook_resid_post", x)
        history.append(x)
        weights = self.averagers[0].stream_weights(layer)
        if weights is not None:
            x = self.averagers[0].stream(layer, history, at(block, "hook_dwa_weights", weights))
        return at(block, "hook_resid_post", x) if last else x

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw every matrix from N(0, init_std), each from a generator seeded by (seed, its name).

        Tensors of equal name and shape are therefore bitwise equal in all architectures of one seed. Gains and the
        shortcuts' own parameters keep the values they were built with.
        """
        own = tuple(f"{s.prefix}." for s in self.shortcuts)
        for name, tensor in self.named_parameters():
            if tensor.ndim == 2 and not name.startswith(own):
                generator = torch.Generator().manual_seed(int(digest("init", seed, name), 16) % 2**63)
                drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
                tensor.copy_(drawn * self.config.init_std)
