"""What is mixed into a layer's values, shown where its attention reads them: earlier layers' values, a table's, and the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.observing.listening.run import Heard, HookedRun
from workbench.observing.recognition.fits import fit, weights_by_token
from workbench.observing.recognition.value_paths import TABLE

_MAX_FITTED = 4096  # positions: enough for coefficients to 1e-7


def show_sources(run: HookedRun, heard: Heard, v: Tensor) -> None:
    """Show the sources of a mixed value [batch, pos, kv_head, d_head] and their coefficients in it.

    Of several attentions in a layer those of all together, with the last one.
    """
    i, own, block = heard.layer, run.own_values, run.points.blocks[heard.layer]
    if i in run.own_values_read and heard.part.v is None and not block.mixture.sources:
        run.keep_own_values(heard, v)
    if i not in run.mixtures or (whole := run.gather(heard, "effective values", v)) is None:
        return
    v = whole
    for j, point in run.mixtures[i].items():
        run.show(point, own[j])
    table = run.tables[block.mixture.table].reshape(v.shape) if block.mixture.table else None
    if table is not None:
        run.show(block.table_point, table)
    points, dtype = run.layer_points[i], torch.promote_types(v.dtype, torch.float32)
    if "v_weights" in points:
        named: dict[Any, Any] = {"own": own.get(i), "first": own.get(0), TABLE + block.mixture.table: table, **own}
        weights, _ = weights_by_token(v, [named[s] for s in block.mixture.order])
        run.show(points["v_weights"], weights.to(dtype))
    elif "v_mix" in points:
        values = [own[j] for j in (*run.mixtures[i], i) if j in own]
        target, *values = (x.flatten(0, 1)[:_MAX_FITTED] for x in (v, *values))
        coefficients, _ = fit(target, values)
        coefficients = coefficients if i in own else [*coefficients, 0.0]
        run.show(points["v_mix"], v.new_tensor(coefficients, dtype=dtype))
