"""Meta's own Llama files: `consolidated.00.pth` with `params.json`, and llama2.c's `ckpt.pt`: {model, model_args, iter_num, ...}.

Tensors are named `tok_embeddings`, `layers.0.attention.wq`, `layers.0.feed_forward.w1`. Queries and keys rotate neighbouring columns of a
head; our decoder and transformers rotate column i with column i + d_head / 2. `params.json` has no context length: `N_CTX` or the
sliding window is assumed.
Source: meta-llama/llama, llama/model.py; karpathy/llama2.c, model.py and train.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.checkpoints.checkpoint_facts import whole_number
from workbench.checkpoints.format import Format
from workbench.errors import BadCheckpoint, NotCovered
from workbench.file_io import read_json

N_CTX = 2048
DEFAULTS = {"norm_eps": 1e-5, "rope_theta": 10_000.0, "max_seq_len": N_CTX}  # of both code bases
NAMES = ("tok_embeddings.weight", "layers.0.attention.wq.weight", "layers.0.feed_forward.w1.weight")


def settings_of(container: Any, path: Path) -> tuple[int | None, Mapping[str, Any]] | None:
    """Return step and settings of a file with Meta's tensor names, None for any other file."""
    values = container if isinstance(container, dict) else {}
    weights = next((values[key] for key in ("model", "state_dict") if isinstance(values.get(key), dict)), values)
    if not all(any(str(name).endswith(wanted) for name in weights) for wanted in NAMES):
        return None
    parts = sorted(path.parent.glob("consolidated.*.pth")) if path.name.startswith("consolidated.") else []
    if len(parts) > 1:
        raise BadCheckpoint(
            f"{path} is one of {len(parts)} parts of a model (model parallel), which are not joined here: convert the folder with "
            "transformers' convert_llama_weights_to_hf.py and open what it writes"
        )
    beside = path.with_name("params.json")
    written = values.get("model_args") if isinstance(values.get("model_args"), dict) else None
    if written is None:
        written = read_json(beside) if beside.is_file() else {}
        written = written["model"] if isinstance(written.get("model"), dict) else written
    if written.get("use_scaled_rope"):
        raise NotCovered(f"{path}: use_scaled_rope=True is not supported, only the plain rotation")
    config = {key: value for key, value in written.items() if key != "vocab_size" or value != -1}
    if window := whole_number(config.get("sliding_window")):
        config["max_seq_len"] = window  # of texts this long, it sees all
    if (width := config.get("head_dim")) is not None and width * config.get("n_heads", 0) != config.get("dim"):
        raise NotCovered(f"{path}: head_dim={width}, only dim / n_heads is supported")
    return whole_number(values.get("iter_num")), DEFAULTS | config


FORMAT = Format(
    name="Llama", beside=settings_of, rotates_neighbours=True,
    tensors={
        "tok_embeddings.weight": "embed.weight", "norm.weight": "ln_final.weight", "output.weight": "unembed.weight",
        "layers.*.attention_norm.weight": "blocks.*.ln1.weight", "layers.*.ffn_norm.weight": "blocks.*.ln2.weight",
        **{f"layers.*.attention.w{x}.weight": f"blocks.*.attn.{x}_proj.weight" for x in "qkvo"},
        "layers.*.feed_forward.w1.weight": "blocks.*.mlp.gate_proj.weight",
        "layers.*.feed_forward.w2.weight": "blocks.*.mlp.down_proj.weight",
        "layers.*.feed_forward.w3.weight": "blocks.*.mlp.up_proj.weight",
    },
    constants=("rope.freqs", "freqs_cos", "freqs_sin", "freqs_cis"),
)  # fmt: skip
