"""Logit lens and logit attribution as measures over documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.hook_names import stream_hook
from workbench.interventions.registered_experiments import ByDocument, batches_of, intervention

CHUNK = 64  # positions whose logits are held at a time


@intervention(
    name="logit_lens", unit="nats", range=">= 0", reading="lower: the answer is readable earlier",
    source="logit lens (nostalgebraist 2020); loss, divergence from the output, rank of the next token",
)  # fmt: skip
@torch.no_grad()
def logit_lens_by_layer(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Prediction read off each stream: softmax(W_U norm(h_n)), with the model's own final norm.

    The loss of the next token; `kl`: divergence of the reading from the model's prediction; `rank`: tokens ahead of the
    true one (0: it leads). Layer n is what block n reads, L the final norm's input, where loss and output agree.
    Caution: early layers need not speak the head's language (basis drift), and value paths change what depth is used for.
    """
    n_layers = model.config.n_layers
    names = {layer: stream_hook(layer, n_layers) for layer in range(n_layers + 1)}
    readings, chunks = ByDocument(), lambda t: t.split(CHUNK, dim=1)
    for ids in batches_of(model, sample, batch):
        logits, cache = model.run_with_cache(ids, names_filter=list(names.values()))
        final, targets = logits[:, :-1].double().log_softmax(-1), ids[:, 1:]
        for layer, name in names.items():
            parts: dict[str | None, list[Tensor]] = {None: [], "kl": [], "rank": []}
            for x, target, true in zip(*map(chunks, (cache[name][:, :-1], targets, final)), strict=True):
                log_p = model.unembed(model.ln_final(x)).double().log_softmax(-1)
                of_target = log_p.gather(-1, target[..., None])
                parts[None].append(-of_target.squeeze(-1))
                parts["kl"].append((true.exp() * (true - log_p)).sum(-1))
                parts["rank"].append((log_p > of_target).sum(-1).double())
            for variant, values in parts.items():
                unit = "tokens" if variant == "rank" else "nats"
                readings.add(torch.cat(values, 1).mean(1), layer=layer, variant=variant, unit=unit)
    yield from readings.rows()


@intervention(
    name="logit_attribution", unit="logits", range="any", reading="higher: pushes the next token",
    source="direct logit attribution with the final scale frozen; value paths as in Elhage et al. 2021",
)  # fmt: skip
@torch.no_grad()
def logit_attribution_by_part(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Contribution per part to the next token's logit minus its contribution to the mean logit, averaged over positions.

    Exact: embedding, attention and MLP contributions sum to the logit (checked at each call). Attention is split further
    by where its values come from: `attn.own`, `attn.first`, `attn.source.<j>`, `attn.table`, `attn.cross`. Caution: direct
    effects only; indirect effects through later layers are not included.
    """
    from workbench.models.decomposition import decompose, label_parts

    gain, head = model.ln_final.weight.double(), model.unembed.weight.double()
    direction = head - head.mean(0)  # a logit minus the mean logit
    contributions = ByDocument()
    for ids in batches_of(model, sample, batch):
        parts = decompose(model, ids, to="final", by="value_path")
        rows = direction[ids[:, 1:]] * gain
        sums: dict[tuple[str, int | None], Tensor] = {}
        for label, part in zip(parts.labels, parts.parts, strict=True):
            kind, layer, _, path = label_parts(label)
            if path is None and kind not in ("embed", "mlp"):
                raise WorkbenchError(f"unknown component {label!r}")
            key = f"attn.{path}" if path else kind, layer
            sums[key] = sums.get(key, 0) + (part[:, :-1].double() * rows).sum(-1).mean(1).cpu()
        for (name, layer), values in sums.items():
            contributions.add(values, part=name, layer=layer, unit="logits")
    yield from contributions.rows()
