"""Runs for the benchmark of the dashboard: many architectures and seeds, their weights and tables hard links."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from workbench.checkpoints.saving import save
from workbench.data.tokenizer import train_tokenizer
from workbench.file_io import write_json
from workbench.models import ARCHITECTURES, build
from workbench.runs.records import provenance, records, write_parquet

SHAPE = {"n_layers": 4, "d_model": 64, "n_heads": 4, "d_mlp": 176, "d_vocab": 1024, "n_ctx": 2048}
STEPS = 1000


def generate(folder: Path, series: int, seeds: int, checkpoints: int) -> None:
    """Runs of `series` architectures; the tables of a seed are written once and linked into every architecture's run."""
    names = ["transformer", "resformer", *sorted(set(ARCHITECTURES) - {"transformer", "resformer"})][:series]
    steps = sorted({round(i * STEPS / (checkpoints - 1)) for i in range(checkpoints)})
    weights = {name: folder / ".weights" / name for name in names}
    for name, path in weights.items():
        save(build(name, SHAPE, seed=0), path, seed=0, step=0, run=name)
    tokenizer = train_tokenizer([prose(40_000)], SHAPE["d_vocab"])
    for seed in range(seeds):
        first = folder / f"text-{names[0]}-s{seed}"
        for name in names:
            path = folder / f"text-{name}-s{seed}"
            _run(path, name, seed)
            _checkpoints(path, weights[name], steps)
            tokenizer.save(path / "tokenizer.json")
            if path == first:
                _telemetry(path, seed, steps)
                _records(path, seed, steps)
            else:
                for table in (*first.glob("telemetry/*.parquet"), *first.glob("records/*.parquet")):
                    (path / table.parent.name).mkdir(exist_ok=True)
                    os.link(table, path / table.parent.name / table.name)


def prose(words: int, seed: int = 0) -> str:
    """Invented words, some much more often than others."""
    draw = np.random.default_rng(seed)
    known = ["".join(draw.choice(list("abcdefghijklmnoprstuvw"), draw.integers(2, 9))) for _ in range(2000)]
    return " ".join(known[min(i, 1999)] for i in draw.zipf(1.3, words))


def _run(path: Path, name: str, seed: int) -> None:
    write_json(path / "run.json", {
        "format": 1, "architecture": name, "options": {}, "seed": seed, "model": SHAPE,
        "train": {"steps": STEPS, "batch": 8, "T": 128, "lr": 4e-3, "warmup": 30},
        "data": {"kind": "text", "hash": "0" * 16, "bos": None, "domains": ["prose", "python"]},
    })  # fmt: skip


def _checkpoints(path: Path, weights: Path, steps: list[int]) -> None:
    config = json.loads((weights / "config.json").read_text())
    for step in steps:
        folder = path / f"step_{step:06d}"
        folder.mkdir()
        config["workbench"] |= {"step": step, "run": path.name}
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        os.link(weights / "model.safetensors", folder / "model.safetensors")


def _telemetry(path: Path, seed: int, steps: list[int]) -> None:
    """One part, as training leaves it."""
    draw, rows = np.random.default_rng(seed), list[dict[str, Any]]()
    for step in range(steps[-1] + 1):
        loss = 3 + 4 * np.exp(-step / 200) + 0.1 * draw.standard_normal()
        rows.append({"step": step, "metric": "train_loss", "value": loss, "unit": "nats"})
        if step % 50 == 0:
            rows += [{"step": step, "metric": "validation_loss", "data": d, "value": loss, "n": 32, "T": 128, "unit": "nats"}
                     for d in ("prose", "python")]  # fmt: skip
        if step % 10 == 0:
            rows.append({"step": step, "metric": "learning_rate", "value": 4e-3 * (1 - step / STEPS)})
            rows += [{"step": step, "metric": "gradient_norm", "part": part, "layer": n, "value": float(draw.random())}
                     for n in range(4) for part in ("W_Q", "W_K", "W_V", "W_O", "W_gate", "W_in", "W_out")]  # fmt: skip
        if step + 1 in steps:
            rows.append({"step": step, "metric": "tokens_per_second", "value": 4e4, "unit": "tokens/s"})
    common = {"run": path.name, "architecture": "transformer", "seed": seed}
    part = path / "telemetry" / f"{0:06d}-{steps[-1]:06d}.parquet"
    write_parquet(records([common | row for row in rows]), part)


def _records(path: Path, seed: int, steps: list[int]) -> None:
    """Much at the first and the last step, a few measures at every sixth, one file a step, as measuring writes them."""
    draw = np.random.default_rng(1000 + seed)
    for step in sorted({*steps[::6], steps[-1]}):
        rows = []
        for metric, sites, heads, positions in MEASURED:
            if positions and step not in (steps[0], steps[-1]):
                continue
            facts = {"key": metric, "metric": metric, "data": "0" * 16, "weights": f"{seed}-{step}"}
            axes = {
                "step": step, "metric": metric, "data": "validation", "T": 128, "n": 64, "unit": "share",
                "provenance": provenance(assumed=False, reading="higher: more", **facts),
            }  # fmt: skip
            rows += [
                axes | {"site": site, "layer": n, "head": h, "position": p, "value": float(draw.random()), "se": 0.01}
                for site in sites for n in range(4) for h in (range(4) if heads else [None])
                for p in (range(128) if positions else [None])
            ]  # fmt: skip
        common = {"run": path.name, "architecture": "transformer", "seed": seed}
        write_parquet(records([common | row for row in rows]), path / "records" / f"{seed:08x}{step:08x}-aa.parquet")


V = ("v", "own_v")
MEASURED = (
    ("token_identity_share", (*V, "stream"), False, False), ("importance_entropy", (None,), False, False),
    ("sink_mass", (None,), True, False), ("row_entropy", (None,), True, False), ("value_drain", V, False, False),
    ("token_similarity", (*V, "stream"), False, False), ("hidden_peak", ("stream",), False, False),
    ("concentration_parts", (None,), False, False), ("token_importance", (None,), False, True),
    ("value_norm", V, False, True), ("hidden_norm", ("stream",), False, True),
)  # fmt: skip
"""Measure, sites, whether for each head, whether for each position."""
