"""The published Llama-style decoder, to which the shortcuts of every architecture are added.

    x = RMSNorm(H_{n-1});  A_n = softmax(rope(Q) rope(K)^T / sqrt(d_head) + causal mask);  H' = H_{n-1} + (A_n V_n) W_O
    H_n = H' + W_down(silu(W_gate y) * (W_up y)),  y = RMSNorm(H');  logits = W_head RMSNorm(H_L)

Source: the baseline of Zhou et al. (2024), Value Residual Learning; rotary positions in half-split form. No bias, no
dropout, untied head. The attention itself is in `attention_layer.py`; hook points without hooks cost nothing.
Parameters: 2 vocab d + L (2 d^2 + 2 d D + 3 d f) + (2 L + 1) d, D = d_key_value.
Cache: 2 L T D elements for T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.file_io import digest
from workbench.kernels.cross_entropy import MIN_LOGITS, cross_entropy
from workbench.models.attention_layer import Attention, JointAttention, Recipe
from workbench.models.cross_layer_wiring import LayerWiring, wire
from workbench.models.generation import KeyValueCache
from workbench.models.hook_points import HookedModule, HookPoint
from workbench.models.hooked import HookedModel
from workbench.models.layers import Embedding, Linear, NormedLinear, RMSNorm, Rotary, Rotation, block_norms
from workbench.models.residual_stream import Stream, build_stream
from workbench.models.shortcut import Memory, Shortcut, Weight, overrides

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # of a module


class MLP(HookedModule):
    """W_down(silu(W_gate x) * (W_up x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.d_model, config.d_mlp, bias=False)
        self.up_proj = Linear(config.d_model, config.d_mlp, bias=False)
        self.down_proj = Linear(config.d_mlp, config.d_model, bias=False)
        self.add_hook_points("pre", "pre_linear", "post")

    def forward(self, x: Tensor) -> Tensor:
        """[batch, pos, d_model] -> [batch, pos, d_model]."""
        gate, up = self.run_hook("hook_pre", self.gate_proj(x)), self.run_hook("hook_pre_linear", self.up_proj(x))
        return self.down_proj(self.run_hook("hook_post", F.silu(gate) * up))

    @property
    def W_gate(self) -> Tensor:  # noqa: N802
        """[d_model, d_mlp]."""
        return self.gate_proj.weight.T

    @property
    def W_in(self) -> Tensor:  # noqa: N802
        """[d_model, d_mlp]."""
        return self.up_proj.weight.T

    @property
    def W_out(self) -> Tensor:  # noqa: N802
        """[d_mlp, d_model]."""
        return self.down_proj.weight.T


class Block(HookedModule):
    """Attention and MLP, each after a norm; the model's stream gives both inputs."""

    hook_out_is_single_residual_stream = True  # for TransformerLens' logit lens

    def __init__(self, config: ModelConfig, wiring: LayerWiring, residual: Stream, norms: str) -> None:
        super().__init__()
        for name, norm in block_norms(config, norms).items():
            setattr(self, name, norm)
        self.attn, self.mlp = (JointAttention if wiring.joint else Attention)(config, wiring), MLP(config)
        if norms == "post":
            for name in ("q_proj", "k_proj"):
                if hasattr(self.attn, name):
                    setattr(self.attn, name, NormedLinear(getattr(self.attn, name), config.rms_norm_eps))
        self.layer, self.residual = wiring.layer, residual
        self.shares_input = False  # whether later averages read this block's input too
        self.add_hook_points("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")

    def forward(self, x: Tensor, rotation: Rotation, memory: Memory, cache: KeyValueCache | None = None) -> Tensor:
        """Map the block's input [batch, pos, d_model] to the input of the next block or of the final norm."""
        x = self.run_hook_on_copy("hook_resid_pre", x) if self.shares_input else self.run_hook("hook_resid_pre", x)
        out = self.attn(self.ln1(x), rotation, memory, cache)
        out = self.run_hook("hook_attn_out", out if self.ln1_post is None else self.ln1_post(out))
        x = self.run_hook("hook_resid_mid", self.residual.after_attention(self, x, out, memory))
        out = self.mlp(self.ln2(x))
        out = self.run_hook("hook_mlp_out", out if self.ln2_post is None else self.ln2_post(out))
        return self.residual.after_mlp(self, x, out, memory)


class Unembed(HookedModule, Linear):
    """The unembedding: logits from the normalised stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.d_model, config.d_vocab, bias=False)
        self.add_hook_points("in")  # the final norm's output

    def forward(self, x: Tensor) -> Tensor:
        """[batch, pos, d_model] -> [batch, pos, d_vocab]."""
        return super().forward(self.run_hook("hook_in", x))


class Transformer(HookedModel):
    """A decoder with hooks and shortcuts; `workbench.build` makes one."""

    @property
    def caches(self) -> bool:  # type: ignore[override]
        """True unless values come from another sequence of the batch."""
        return not any(overrides(s, "arriving") for s in self.shortcuts)

    def __init__(
        self, config: ModelConfig, shortcuts: Sequence[Shortcut] = (), *, architecture: str = "transformer"
    ) -> None:
        super().__init__(config, architecture)
        self.embed, self.hook_embed = Embedding(config.d_vocab, config.d_model), HookPoint()
        self.rotary = Rotary(config.d_head, config.n_ctx, config.rope_theta)
        self.residual = build_stream(config.n_layers, shortcuts)
        norms = next((s.norms for s in shortcuts if s.norms != "pre"), "pre")
        layers = wire(config.n_layers, shortcuts)
        self.blocks = nn.ModuleList(Block(config, wiring, self.residual, norms) for wiring in layers)
        self.residual.add_hook_points(list(self.blocks))
        self.ln_final = RMSNorm(config.d_model, config.rms_norm_eps)
        self.unembed = Unembed(config)
        self.shortcuts = tuple(shortcuts)
        for shortcut in shortcuts:
            self.add_module(shortcut.prefix, shortcut)
        self.preparing = tuple(s for s in shortcuts if overrides(s, "prepare"))  # a tuple: not registered a second time
        for i, block in enumerate(self.blocks):
            self.absent |= {f"blocks.{i}.attn.hook_{point}": why for point, why in block.attn.absent.items()}
        self.setup()  # TransformerLens: names the modules, must come last

    def logits(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Map token ids [batch, pos] to logits [batch, pos, d_vocab]; with a cache the ids continue its tokens."""
        return self.unembed(self.normalised(tokens, cache))

    def losses(self, tokens: Tensor) -> Tensor | None:
        """Compute the loss of every next token from chunks of logits; return None for few logits or a hooked head."""
        head, logits = self.unembed, len(tokens) * (tokens.shape[1] - 1) * self.config.d_vocab
        if logits < MIN_LOGITS or type(head) is not Unembed or any(getattr(head, hooks) for hooks in HOOKS):
            return None
        x = head.run_hook("hook_in", self.normalised(tokens))[:, :-1]
        losses = cross_entropy(x.flatten(0, 1), head.weight, tokens[:, 1:].flatten())
        return losses.unflatten(0, (len(tokens), -1))

    def normalised(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Map token ids [batch, pos] to the unembedding's input [batch, pos, d_model]."""
        x = self.stream_at(tokens, len(self.blocks), cache)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return self.ln_final(x)

    def stream_at(self, tokens: Tensor, layer: int, cache: KeyValueCache | None = None) -> Tensor:
        """Return the stream [batch, pos, d_model] that block `layer` reads, or with layer L the final norm; later blocks do not run."""
        x = self.run_hook("hook_embed", self.embed(tokens))
        past = 0 if cache is None else cache.length
        rotation = self.rotary(tokens.shape[1], x, past)
        memory: Memory = {"past": past}
        for shortcut in self.preparing:
            memory.update(shortcut.prepare(tokens))
        x = self.residual.start(x, memory)
        for block in islice(self.blocks, layer):
            x = block(x, rotation, memory, cache)
        return x

    def stream_paths(
        self, layer: int, *, mid: bool = False, cache: Mapping[str, Tensor] | None = None
    ) -> dict[str, Weight]:
        """Return the coefficients of the embedding and of all earlier outputs in a block's input.

        Without averages and cut skips all coefficients are 1.

        Args:
            layer: Block 0..L - 1, or L for the final norm.
            mid: Whether to return the coefficients in the input of the block's MLP.
            cache: Activations of a run; its weights of averages take precedence, since a hook may have changed them. Required if the
                weights depend on the tokens.

        Returns:
            Numbers, or tensors [batch, pos, 1] or [batch, pos, d_model], by TransformerLens' names: `embed`, `<n>_attn_out`,
            `<n>_mlp_out`.
        """
        return self.residual.paths(2 * layer + mid, cache or {})

    def recipes(self) -> list[Recipe]:
        """Return the recipes that rebuild the patterns of the layers whose attention a shortcut defines."""
        return [block.attn.recipe() for block in self.blocks if isinstance(block.attn, JointAttention)]

    def decays(self, name: str) -> bool:
        """Return whether weight decay applies to a parameter: to matrices, and to coefficients if an option asks for it."""
        tensor = self.get_parameter(name)
        if tensor.ndim == 2 and min(tensor.shape) > 1:
            return True
        return any(name.startswith(f"{s.prefix}.") and s.decays for s in self.shortcuts)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw every matrix from N(0, init_std), each with a generator seeded by (seed, its name).

        Tensors of equal name and shape are bitwise equal in all architectures of one seed. Gains and coefficients keep
        the values of their construction.
        """

        def draw(name: str, tensor: Tensor, prefix: str = "") -> None:
            generator = torch.Generator().manual_seed(int(digest("init", seed, prefix + name), 16) % 2**63)
            drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
            tensor.copy_(drawn * self.config.init_std)

        own = tuple(f"{s.prefix}." for s in self.shortcuts)
        for name, tensor in self.named_parameters():
            if tensor.ndim == 2 and not name.startswith(own):
                draw(name, tensor)
        for shortcut in self.shortcuts:
            shortcut.initialise(partial(draw, prefix=f"{shortcut.prefix}."))
