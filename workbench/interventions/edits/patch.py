"""Edit `patch`: replace activations by those of a second prompt or of other positions.

    patch:layer=2,site=v,position=5

Source: activation patching as in Meng et al. (2022), ROME, and Wang et al. (2023), IOI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from workbench.errors import BadData, WorkbenchError
from workbench.interventions.edits.base import HEADS, Edit, Inputs, one_of
from workbench.interventions.edits.text import Numbers
from workbench.models.hooked import HookedModel


@dataclass(frozen=True, kw_only=True)
class Patch(Edit):
    """Replace activations by those of a second prompt (`prompt=other`) or of other positions of the prompt (`same`).

    `site`: `stream` (input of block n; L: input of the final norm), `v`, `own_v`, `q`, `k` (before rotation), `z`,
    `attn_out`, `mlp_out`. `position` are set, from `from_position`: as many, one for all, or none for the same ones. Prompts
    of unequal length are aligned by naming positions. The activations come from the unedited model.
    """

    kind = "patch"
    presets: ClassVar[Mapping[str, str]] = {"site=stream": "patch the stream from the second prompt"}
    site: str = one_of("stream", "v", "own_v", "q", "k", "z", "attn_out", "mlp_out")
    head: Numbers = ()
    position: Numbers = ()
    prompt: str = one_of("other", "same")
    from_position: Numbers = ()

    def refuse(self) -> None:
        if self.prompt == "same" and not self.from_position:
            raise WorkbenchError(f"{self}: say from which positions, as from_position=3")
        if len(set(self.position)) < len(self.position):
            raise WorkbenchError(f"{self}: a position is named twice")
        if self.head and self.site not in HEADS:
            raise WorkbenchError(f"{self}: {self.site} has no heads; heads are told apart at v, own_v, q, k and z")
        if len(self.from_position) > 1 and self.position and len(self.from_position) != len(self.position):
            raise WorkbenchError(f"{self}: {self._unequal(len(self.from_position), len(self.position))}")

    @staticmethod
    def _unequal(read: int, to: int) -> str:
        return f"{read} positions to read for {to} to set; give as many, or one"

    @property
    def target(self) -> str:
        return self.site

    @property
    def reads_other(self) -> bool:
        return self.prompt == "other"

    @property
    def reads_prompt(self) -> bool:
        return True

    def n_layers(self, model: HookedModel) -> int:
        return model.config.n_layers + (self.site == "stream")

    def check(self, model: HookedModel, inputs: Inputs) -> None:
        super().check(model, inputs)
        source = inputs.tokens if self.prompt == "same" else inputs.other
        assert source is not None
        self.in_reach(self.from_position, source)

    def prepare(self, model: HookedModel, layers: Sequence[int], inputs: Inputs) -> None:
        inputs.read(model, self.prompt, [name for n in layers for name in self.points(model, n)])

    def replaced(self, model: HookedModel, tensor: Tensor, name: str, layer: int, inputs: Inputs) -> Tensor:
        self.same_prompt(tensor, inputs)
        source = inputs.activations[self.prompt, name]
        length = tensor.shape[1]
        to = [p % length for p in self.position] or list(range(length))
        read = [p % source.shape[1] for p in self.from_position or self.position] or list(range(length))
        read = read * len(to) if len(read) == 1 else read
        if len(read) != len(to):
            raise BadData(f"{self}: {self._unequal(len(read), len(to))}")
        new = tensor.clone()
        new[:, to] = source[:, read].to(tensor)
        return new
