"""Edit `values`: replace a layer's values.

values:layer=2..5,how=token_mean
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from workbench.errors import BadData, WorkbenchError
from workbench.interventions.edits.base import Edit, Inputs, mean_over_positions, one_of, site_points
from workbench.interventions.edits.text import Numbers
from workbench.models.hooked import HookedModel


@dataclass(frozen=True, kw_only=True)
class Values(Edit):
    """Values are replaced, of all heads or of some key-value heads.

    `site`: `v` (effective values, which the pattern multiplies and later layers reuse), `own_v` (own projection before
    mixing), `arriving` (values from other layers or a table). `how`: `zero`; `mean` over the positions of the
    prompt, later ones included; `token_mean` (by token id, from a table); `layer` (those of `from_layer` at this site);
    `prompt` (a second prompt's); `shuffle` (among positions, by `seed`). Other layers' and prompts' come from the unedited
    model.
    """

    kind = "values"
    presets: ClassVar[Mapping[str, str]] = {
        "how=zero": "drop the values (zero)", "how=mean": "replace values by their mean over the whole prompt",
        "how=token_mean": "replace values by the mean of their token", "how=shuffle": "shuffle values among positions",
        "how=layer,from_layer=0": "replace values by the first layer's",
        "how=prompt": "replace values by the second prompt's",
        "site=arriving,how=zero": "cut the value shortcut (what arrives from other layers)",
    }  # fmt: skip
    head: Numbers = ()
    how: str = one_of("zero", "mean", "token_mean", "layer", "prompt", "shuffle")
    site: str = one_of("v", "own_v", "arriving")
    from_layer: int = 0
    seed: int = 0

    def refuse(self) -> None:
        self.only_with("from_layer", "how", "layer")
        self.only_with("seed", "how", "shuffle")
        if self.from_layer < 0 or self.seed < 0:
            raise WorkbenchError(f"{self}: from_layer and seed are counted from 0")
        if self.how == "token_mean" and self.site == "arriving":
            raise WorkbenchError(f"{self}: there is no table of what arrives; choose site=v or site=own_v")

    @property
    def target(self) -> str:
        return self.site

    @property
    def reads_other(self) -> bool:
        return self.how == "prompt"

    @property
    def reads_prompt(self) -> bool:
        return self.how in ("token_mean", "layer", "prompt")

    @property
    def reads_means(self) -> str:
        return self.site if self.how == "token_mean" else ""

    def what(self, model: HookedModel) -> str:
        return "values that arrive from elsewhere" if self.site == "arriving" else self.site

    def check(self, model: HookedModel, inputs: Inputs) -> None:
        super().check(model, inputs)
        if self.reads_means:
            table = inputs.means.get(self.site)
            if table is None:
                raise BadData(f"{self} needs a table: means=token_means(model, {self.site!r}, batches of other tokens)")
            if len(table.counts) != model.config.d_vocab or set(self.layers(model)) - set(table.sums):
                raise BadData(f"{self}: the table of means is another model's; make one of this model")

    def prepare(self, model: HookedModel, layers: Sequence[int], inputs: Inputs) -> None:
        if self.how == "prompt":
            inputs.read(model, "other", [name for n in layers for name in self.points(model, n)])
        if self.how == "layer":
            inputs.read(model, "same", [self._read_from(model)])

    def _read_from(self, model: HookedModel) -> str:
        """Hook point of the values that `how=layer` puts elsewhere; what arrives is exchanged for effective values."""
        site = "v" if self.site == "arriving" else self.site
        Values(layer=(self.from_layer,), site=site).layers(model)  # refused by name
        return site_points(model, site, self.from_layer)[0]

    def replaced(self, model: HookedModel, tensor: Tensor, name: str, layer: int, inputs: Inputs) -> Tensor:
        if self.how == "zero":
            return torch.zeros_like(tensor)
        if self.how == "mean":
            return mean_over_positions(tensor)
        if self.how == "shuffle":
            order = torch.randperm(tensor.shape[1], generator=torch.Generator().manual_seed(self.seed))
            return tensor[:, order.to(tensor.device)]
        self.same_prompt(tensor, inputs)
        if self.how == "token_mean":
            table, tokens = inputs.means[self.site], inputs.tokens
            assert tokens is not None
            means = table.replacement(layer, tokens, "token_mean").to(tensor)
            return torch.where(table.seen(tokens)[..., None, None], means, tensor)
        read = ("same", self._read_from(model)) if self.how == "layer" else ("other", name)
        found = inputs.activations[read]
        return found.expand(len(tensor), *found.shape[1:])
