"""NeuTRENO: the attention output is pulled toward the first layer's values.

U_n = A_n V_n + neutreno_lambda (V_1 - V_n) for layers n >= 2, at the token's own position: the added term is not attended to.

Source: Nguyen, Nguyen, Baraniuk (NeurIPS 2023), Mitigating Over-smoothing in Transformers via Regularized Nonlocal
Functionals. lambda = 0.4 as there for language and as in Zhou et al. (2024). With grouped heads V_1 and V_n are first
repeated to the query heads (the published code has no grouped heads). In combination with ResFormer V_n is the mixed value
and lambda = 0.2 (Zhou et al.'s code).
Seam: `output`, before W_O.
Parameters: none.
Cache: 2 L T D; the added term needs only the new token's values.
Degenerate case: neutreno_lambda = 0 is the vanilla decoder.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from workbench.config import ModelConfig
from workbench.models.options import number_option
from workbench.models.shortcut import Path, Projection, Shortcut, Source, Tensors, Weights, mix


class NeuTRENO(Shortcut):
    """Regulariser toward V_1 on the attention output."""

    prefix = "neutreno"

    def __init__(self, config: ModelConfig, *, neutreno_lambda: float = 0.4) -> None:
        super().__init__(config)
        self.neutreno_lambda = number_option("neutreno_lambda", neutreno_lambda)

    def sources(self, tensor: str, layer: int) -> tuple[Source, ...]:
        return (0,) if tensor == "v" and layer > 0 else ()

    def idle(self, root: Callable[[Projection, int], Source]) -> bool:
        return self.config.n_layers > 1 and len({root("v", n) for n in range(self.config.n_layers)}) == 1  # V_1 - V_1

    def constants(self, path: Path, layer: int) -> dict[str, float]:
        return {"first": self.neutreno_lambda} if path == "output" and layer > 0 else {}

    def output(self, layer: int, z: Tensor, v: Tensor, sources: Tensors, weights: Weights) -> Tensor:
        if layer == 0:
            return z
        pull = sources[0] - v
        if (repeat := z.shape[-2] // v.shape[-2]) > 1:
            pull = pull.repeat_interleave(repeat, dim=-2)
        return mix([1.0, weights["first"]], [z, pull])
