"""`equal`: the first site at which two models differ on the same tokens, and the difference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from workbench.console import ROWS, notebook_html
from workbench.errors import WorkbenchError
from workbench.models.hooked import HookedModel
from workbench.observing.observation import observe

ORDER = (
    "hook_resid_pre", "attn.hook_q", "attn.hook_k", "attn.own.hook_v", "attn.source.0.hook_v", "attn.hook_v_mix", "attn.hook_v",
    "attn.hook_rot_q", "attn.hook_rot_k", "attn.hook_z", "hook_attn_out", "hook_mlp_out", "hook_resid_post",
)  # fmt: skip
ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative differences due to rounding, by the coarser type of the two models."""


@dataclass(frozen=True)
class Comparison:
    """The first difference of two models; true for equal models. `table` has every site in the order of computation."""

    site: str | None  # hook point of the first difference, or `logits`
    layer: int | None
    difference: float  # largest absolute difference there
    relative: float  # the same over the largest entry of both
    position: int | None  # token position of that difference, where the site has positions
    table: pd.DataFrame
    tolerance: float

    def __bool__(self) -> bool:
        return self.site is None

    def __str__(self) -> str:
        n = len(self.table)
        if self.site is None:
            worst = self.table["relative"].max()
            return f"equal at {n} sites: largest relative difference {worst:.2g}, tolerance {self.tolerance:.2g}"
        where = "" if self.position is None else f", position {self.position}"
        shapes = "" if math.isfinite(self.difference) else "; not comparable: shapes differ or not finite"
        return f"first difference at {self.site}{where}: {self.difference:.3g} ({self.relative:.3g} relative){shapes}"

    def _repr_html_(self) -> str:
        texts = self.table.astype(object).where(self.table.notna(), "")
        table = texts.to_html(index=False, border=0, max_rows=ROWS, float_format=lambda x: f"{x:.3g}")
        return notebook_html("equal" if self else "not equal", {"result": str(self)}, table)


@torch.no_grad()
def equal(a: Any, b: Any, tokens: Any, *, tolerance: float | None = None) -> Comparison:
    """Compare two models, own or observed, site by site on the same tokens [batch, pos].

    Compares the sites that both models have, without statistics and patterns.

    Args:
        a: Model, or a `torch.nn.Module`, which is observed first.
        b: The other one.
        tokens: Ids [batch, pos].
        tolerance: Largest relative difference of equal models; 0 for bitwise equality. The default allows rounding (1e-4 in float32).

    Raises:
        WorkbenchError: The models have different numbers of layers.
    """
    for model in (a, b):
        if not isinstance(model, nn.Module):
            raise WorkbenchError(f"cannot compare a {type(model).__name__}; give models or modules")
    a, b = (model if isinstance(model, HookedModel) else observe(model, tokens, quiet=True) for model in (a, b))
    if a.config.n_layers != b.config.n_layers:
        raise WorkbenchError(f"{a.config.n_layers} layers against {b.config.n_layers}: there is no site to compare")
    blocks = [f"blocks.{i}.{point}" for i in range(a.config.n_layers) for point in ORDER]
    names = [n for n in ["hook_embed", *blocks, "unembed.hook_in"] if n in a.hook_dict and n in b.hook_dict]
    out, cache = a.run_with_cache(tokens, names_filter=names)
    rows: list[dict[str, Any]] = []

    def compare(tensor: Tensor, hook: Any) -> None:
        rows.append(_row(str(hook.name), cache[str(hook.name)], tensor))

    with b.hooks([(name, compare) for name in names]):
        logits = b(tokens)
    rows.sort(key=lambda row: names.index(row["site"]))
    if isinstance(out, Tensor) and isinstance(logits, Tensor):
        rows.append(_row("logits", out, logits))
    table = pd.DataFrame(rows).astype({"layer": "Int64", "position": "Int64"})
    if tolerance is None:
        tolerance = max(ROUNDING.get(m.embed.weight.dtype, 1e-4) for m in (a, b))
    first = next((row for row in rows if not row["relative"] <= tolerance), None)
    first = first or {"site": None, "layer": None, "difference": 0.0, "relative": 0.0, "position": None}
    return Comparison(**first, table=table, tolerance=tolerance)


def _row(site: str, a: Tensor, b: Tensor) -> dict[str, Any]:
    layer = int(site.split(".")[1]) if site.startswith("blocks.") else None
    row = {"site": site, "layer": layer, "difference": math.inf, "relative": math.inf, "position": None}
    if a.shape != b.shape:
        return row
    a, b = a.double().cpu(), b.double().cpu()
    apart = (a - b).abs()
    if not bool(apart.isfinite().all()):
        return row
    size = max(float(a.abs().max()), float(b.abs().max()))
    worst = float(apart.max())
    position = int(apart.argmax()) // math.prod(apart.shape[2:]) % apart.shape[1] if apart.ndim > 2 and worst else None
    return row | {"difference": worst, "relative": worst / size if size else 0.0, "position": position}
