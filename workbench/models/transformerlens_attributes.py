"""The attributes that TransformerLens' tools read from a model: stacked weights, zero biases, tokens as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.errors import BadData, WorkbenchError
from workbench.models.layers import NORMS

if TYPE_CHECKING:
    from transformer_lens import FactoredMatrix

_STACKED = dict.fromkeys(("W_Q", "W_K", "W_V", "W_O"), "attn") | dict.fromkeys(("W_in", "W_gate", "W_out"), "mlp")
_BIASES = {"b_Q": "Hd", "b_K": "Gd", "b_V": "Gd", "b_O": "D", "b_in": "M", "b_gate": "M", "b_out": "D"}


class _Weights(dict[str, Tensor]):
    """Weights by name; reading a weight that a layer lacks raises an error with the reason."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.absent: dict[str, str] = {}

    def __missing__(self, name: str) -> Tensor:
        if name in self.absent:
            raise WorkbenchError(self.absent[name])
        raise KeyError(name)


def _stacked(circuits: list[FactoredMatrix]) -> FactoredMatrix:
    return type(circuits[0])(torch.stack([c.A for c in circuits]), torch.stack([c.B for c in circuits]))


class LensTools:
    """A mixin of `HookedModel` that reads the embedding, the blocks, the head and the tokenizer."""

    if TYPE_CHECKING:
        config: ModelConfig
        embed: nn.Embedding
        unembed: nn.Linear
        ln_final: Any
        blocks: Any
        tokenizer: Any

        def to_tokens(self, text: Any, prepend_bos: bool | None = None) -> Tensor: ...

    @property
    def W_E(self) -> Tensor:  # noqa: N802
        """[d_vocab, d_model]."""
        return self.embed.weight

    @property
    def W_U(self) -> Tensor:  # noqa: N802
        """[d_model, d_vocab]."""
        return self.unembed.weight.T

    @property
    def b_U(self) -> Tensor:  # noqa: N802
        """[d_vocab], zeros: the head has no bias."""
        return self.unembed.weight.new_zeros(self.config.d_vocab)

    @property
    def W_pos(self) -> Tensor:  # noqa: N802
        """[n_ctx, d_model], zeros: positions are rotary."""
        return self.embed.weight.new_zeros(self.config.n_ctx, self.config.d_model)

    def __getattr__(self, name: str) -> Any:
        """Return weights stacked over the layers under TransformerLens' names, and zeros for the biases.

        Weights are `W_Q`, `W_K`, `W_V` and `W_O` [layer, (kv_)head, ...], `W_in`, `W_gate` and `W_out`. Raises
        `WorkbenchError` if a layer lacks the projection.
        """
        if name in _STACKED:
            return torch.stack([getattr(getattr(block, _STACKED[name]), name) for block in self.blocks])
        if name in _BIASES:
            c = self.config
            sizes = {"H": c.n_heads, "G": c.n_key_value_heads, "d": c.d_head, "D": c.d_model, "M": c.d_mlp}
            return self.embed.weight.new_zeros(c.n_layers, *(sizes[axis] for axis in _BIASES[name]))
        return super().__getattr__(name)  # type: ignore[misc]

    @property
    def OV(self) -> FactoredMatrix:  # noqa: N802
        """TransformerLens' circuits W_V W_O [layer, head, d_model, d_model]; see `blocks[i].attn.OV` for one layer."""
        return _stacked([block.attn.OV for block in self.blocks])

    @property
    def QK(self) -> FactoredMatrix:  # noqa: N802
        """TransformerLens' circuits W_Q W_K^T [layer, head, d_model, d_model]; see `blocks[i].attn.QK` for one layer."""
        return _stacked([block.attn.QK for block in self.blocks])

    def accumulated_bias(self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True) -> Tensor:
        """[d_model], zeros: our projections have no bias."""
        return self.embed.weight.new_zeros(self.config.d_model)

    def tl_parameters(self) -> dict[str, Tensor]:
        """Return weights under TransformerLens' names, one entry per layer.

        `W_K` and `W_V` are repeated to their query heads. `W_V` does not include coefficients of mixing. A layer with a
        shared source has no such entry; the error names the source.
        """
        weights: dict[str, Tensor] = _Weights({"embed.W_E": self.W_E, "unembed.W_U": self.W_U, "unembed.b_U": self.b_U})
        weights["ln_final.w"] = self.ln_final.weight
        repeats = self.config.n_heads // self.config.n_key_value_heads
        for i, block in enumerate(self.blocks):
            norms = {name: getattr(block, name) for name in NORMS}
            for short, attribute in (("w", "weight"), ("b", "bias")):
                has = {name: getattr(norm, attribute, None) for name, norm in norms.items()}
                weights |= {f"blocks.{i}.{name}.{short}": tensor for name, tensor in has.items() if tensor is not None}
            for name, part in _STACKED.items():
                try:
                    weight = getattr(getattr(block, part), name)
                except WorkbenchError as error:
                    weights.absent[f"blocks.{i}.{part}.{name}"] = str(error)  # type: ignore[attr-defined]
                    continue
                repeated = weight.repeat_interleave(repeats, 0) if name in ("W_K", "W_V") else weight
                weights[f"blocks.{i}.{part}.{name}"] = repeated
        return weights

    def tokens_to_residual_directions(self, tokens: Any) -> Tensor:
        """Return the direction [..., d_model] of the normed stream, before the final gain, that raises each token's logit.

        Tokens are ids, or a text of one token.
        """
        tokens = self.to_single_token(tokens) if isinstance(tokens, str) else tokens
        ids = torch.as_tensor(tokens, device=self.unembed.weight.device)
        return self.unembed.weight[ids] * self.ln_final.weight

    def to_str_tokens(self, text: Any, prepend_bos: bool | None = None) -> list[str]:
        """Return the tokens of one text or one row of ids as text; without a tokenizer the ids as text."""
        ids = self.to_tokens(text, prepend_bos)[0].tolist()
        return self.tokenizer.token_strings(ids) if self.tokenizer else [str(i) for i in ids]

    def to_string(self, tokens: Any) -> str:
        ids = self.to_tokens(tokens)[0].tolist()
        return self.tokenizer.decode(ids) if self.tokenizer else " ".join(map(str, ids))

    def to_single_str_token(self, token: int) -> str:
        return self.to_str_tokens(torch.tensor([int(token)]))[0]

    def to_single_token(self, text: str) -> int:
        """Return the id of a text of one token; raise `BadData` for several."""
        ids = self.to_tokens(text, prepend_bos=False)[0].tolist()
        if len(ids) != 1:
            raise BadData(f"{text!r} is {len(ids)} tokens, not one")
        return ids[0]
