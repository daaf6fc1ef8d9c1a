"""What tests of generation and of the key-value cache share: architectures and combinations, ids, a cached pass."""

from __future__ import annotations

import torch
from seams import TOGETHER

WRITTEN = 280  # ids of the tokenizer; the model that writes with it has a few more
FOUR = {"n_layers": 4}
FIVE = {"n_layers": 5}
COMBINED = [
    ("svformer", {"refresh_every": 2}, FIVE), ("cla", {"group": "all", "share": "k"}, {}),
    ("svformer+cla", {"anchors": (0, 3), "group": 3}, FIVE), ("cla+cross_layer_all", {}, FOUR),
    ("residual_attention", {"attn_mix": "logit"}, {}), ("resformer+bank_of_values", {}, {}), ("mhc+dyt", {"streams": 2}, {}),
]  # fmt: skip
EVERY = [(name, {}, {} if "qa" in name else {"n_key_value_heads": 2}) for name in TOGETHER] + COMBINED
NAMES = [f"{name}-{index}" if options else name for index, (name, options, _) in enumerate(EVERY)]


def in_chunks(model, ids, sizes, cache=None):
    """Logits of a cached pass over chunks of these sizes, the rest one by one."""
    cache = cache or model.new_cache(len(ids))
    sizes = [*sizes, *[1] * (ids.shape[1] - sum(sizes))]
    return torch.cat([model(part, past_kv_cache=cache) for part in ids.split(sizes, 1)], 1)
