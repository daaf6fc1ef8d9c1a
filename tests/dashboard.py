"""A small folder of runs for the tests of figures, dashboard and browser: real tiny checkpoints, invented numbers."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from workbench.checkpoints.saving import save
from workbench.claims import stored_verdicts
from workbench.data.tokenizer import train_tokenizer
from workbench.file_io import write_json
from workbench.models import build
from workbench.runs.records import provenance, records, write_parquet
from workbench.runs.sqlite_index import INDEX
from workbench.views import Source
from workbench.views.source import Kind, SourceCache

MAIN = Path(__file__).parent.parent / "app" / "main.py"
MODEL = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_mlp": 24, "d_vocab": 64, "n_ctx": 128}
TRAIN = {"steps": 20, "batch": 2, "T": 16, "lr": 1e-3, "warmup": 5}
STEPS = (0, 8, 20)
LONG = 60  # checkpoints of one run, for work that takes long enough to be cancelled
FORMED = {"svformer": 5, "transformer": 12}  # where the copy loss crosses the line, plus the seed
TEXT = ("transformer", "resformer", "svformer", "denseformer")
PROSE = "def mean(values):\n    return sum(values) / len(values)\n" * 20


OF_OBSERVED = [
    ("attention", {}, 0), ("prompt", {"show": "next"}, 2), ("prompt", {"show": "layers"}, 1), ("prompt", {"show": "carries"}, 2),
    ("intervene", {"edits": "values:layer=1,how=zero"}, 2), ("intervene", {"show": "sweep"}, 1),
]  # fmt: skip
"""Page, address and number of figures of what is drawn of a model that is observed from outside."""


class Memory(SourceCache):
    """Keeps models and results, as the dashboard does."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[Any, Any] = {}

    def get(self, kind: Kind, key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        if kind not in ("model", "result"):
            return super().get(kind, key, compute)
        if (kind, key) not in self.kept:
            self.kept[kind, key] = compute()
        return self.kept[kind, key]


def kept(folder: Path) -> Source:
    """Numbers for the views as the dashboard has them: a model is opened once, and results are computed once."""
    return Source(folder, cache=Memory())


def known(**facts):
    return provenance(assumed=False, reading="higher: more", key="k", **facts)


def run(folder: Path, name: str, architecture: str, seed: int, kind: str, *, steps=STEPS) -> dict:
    """A run folder without numbers; returns the columns its records share."""
    path = folder / name
    text = kind == "text"
    tokenizer = train_tokenizer([PROSE], 270) if text else None
    model = MODEL | ({"d_vocab": 270} if text else {})
    data = {"kind": "text", "hash": "0" * 16, "bos": None, "domains": ["prose"]} if text else {
        "kind": "repeated", "hash": "1" * 16, "vocabulary": 64, "domains": ["repeated"]}  # fmt: skip
    info = {"format": 1, "architecture": architecture, "options": {}, "seed": seed}
    write_json(path / "run.json", info | {"model": model, "train": TRAIN, "data": data})
    if tokenizer is not None:
        tokenizer.save(path / "tokenizer.json")
    for step in steps:
        save(build(architecture, model, seed=seed + step), path / f"step_{step:06d}", seed=seed, step=step, run=name)
    return {"run": name, "architecture": architecture, "seed": seed}


def telemetry(common: dict, kind: str) -> list[dict]:
    seed, rows = common["seed"], []
    fast = FORMED.get(common["architecture"], 8) + seed

    def row(metric: str, value: float, **axes: Any) -> None:
        rows.append(common | {"step": step, "metric": metric, "value": value} | axes)

    for step in range(20):
        row("train_loss", 4.0 - 0.1 * step - 0.01 * seed, unit="nats")
        if kind == "repeated":
            row("copy_loss", 4.0 if step < fast else 1.0, unit="nats")
        if step % 10 == 0:
            row("learning_rate", 1e-3)
            for domain in ("prose", "python") if kind == "text" else ("repeated",):
                value = 4.0 - 0.1 * step - 0.05 * fast + 0.01 * seed
                row("validation_loss", value, data=domain, n=4, T=16, unit="nats", se=0.05)
            for layer in range(2):
                for part in ("W_Q", "W_V"):
                    row("gradient_norm", 0.01 * (layer + 1), part=part, layer=layer)
            if common["architecture"] == "denseformer":
                for j in range(2):
                    row("coefficient", 0.1 * j + 0.01 * step, part=f"alpha_{j}", layer=0)
    row("tokens_per_second", 1000.0 + seed, unit="tokens/s")
    return rows


def measured(common: dict, kind: str) -> list[dict]:
    seed, rows = common["seed"], []

    def row(metric: str, value: float, unit: str, **axes: Any) -> None:
        axes = {"data": "validation", "T": 16, "n": 4, "provenance": known(), "step": step} | axes
        rows.append(common | axes | {"metric": metric, "value": value, "unit": unit})

    own = range(1 if common["architecture"] == "svformer" else 2)  # layers with values of their own
    fast = FORMED.get(common["architecture"], 8)
    for step in STEPS if kind == "repeated" else (0, 20):
        if kind == "repeated":
            for layer in range(2):
                for head in range(2):
                    row("induction_score", 0.1 * layer + 0.2 * head, "share", layer=layer, head=head, se=0.01)
            continue
        for layer in range(2):
            sites = ("v", "own_v") if layer in own else ("v",)
            for site in sites:
                value = 1.0 - 0.2 * layer - 0.01 * seed - 0.001 * step
                row("token_identity_share", value, "share", site=site, layer=layer, se=0.02)
            row("importance_entropy", 2.3 + 0.1 * layer, "nats", layer=layer, se=0.02)
            row("importance_entropy", 2.4, "nats", layer=layer, control="uniform_causal")
            row("sink_rate", 0.0, "share of heads", layer=layer)
            row("sink_mass", 0.05, "share", layer=layer, control="uniform_causal")
            for head in range(2):
                row("sink_mass", 0.03 + 0.01 * head, "share", layer=layer, head=head)
            for position in range(16):
                row("token_importance", 1 / 16, "share", layer=layer, position=position)
        for layer in range(2):
            for site in ("v", "own_v") if layer in own else ("v",):
                row("value_drain", 0.9, "ratio", layer=layer, se=0.02, site=site)
            for variant, value in ((None, 0.4), ("first_position", 0.1), ("profile", 0.1), ("content", 0.2)):
                row("concentration_parts", value * step / 20, "nats", layer=layer, variant=variant, se=0.01)
        row("loss", 4.0 - 0.01 * step * (20 - fast) + 0.01 * seed, "nats", se=0.1)
    if kind == "text":
        for where in [{"layer": layer} for layer in own] + ([{}] if len(own) == 2 else []):
            for variant, value in (("zero", 0.2), ("token_mean", 0.01), ("mean", 0.1)):
                row("value_ablation", value + 0.01 * seed, "nats", **where, site="own_v", variant=variant, se=0.03)
    return rows


def populate(folder: Path) -> Path:
    """All runs with their numbers, and a demo that has finished."""
    plan = [("race", a, s, "repeated") for a in FORMED for s in range(3)] + [
        ("text", a, s, "text") for a in TEXT for s in range(2)
    ]
    for experiment, architecture, seed, kind in plan:
        name = f"{experiment}-{architecture}-s{seed}"
        common = run(folder, name, architecture, seed, kind)
        write_parquet(records(telemetry(common, kind)), folder / name / "telemetry" / "000000-000020.parquet")
        write_parquet(records(measured(common, kind)), folder / name / "records" / "aa-bb.parquet")
    names = [f"{e}-{a}-s{s}" for e, a, s, _ in plan]
    status = {"finished": True, "elapsed_s": 1.0, "left_s": 0.0, "models": names, "ready": names, "failed": {}}
    write_json(folder / ".demo.json", status)
    return folder


def damage(folder: Path) -> Path:
    """Cut files short: some telemetry, some records, a checkpoint, a run description, the demo's status."""
    for name in (
        "text-transformer-s0/telemetry/000000-000020.parquet",
        "race-transformer-s0/telemetry/000000-000020.parquet",
        "text-svformer-s0/records/aa-bb.parquet",
        "race-svformer-s0/step_000020/model.safetensors",
        "race-svformer-s0/step_000008/model.safetensors",
        "text-transformer-s1/step_000020/model.safetensors",
        "text-resformer-s0/tokenizer.json",
        "race-svformer-s1/run.json",
        ".demo.json",
    ):
        path = folder / name
        path.write_bytes(path.read_bytes()[:60])
    return folder


def half_write(folder: Path) -> Path:
    """What a folder looks like moments after training began, or after a kill."""
    run(folder, "race-svformer-s0", "svformer", 0, "repeated", steps=())
    common = run(folder, "race-transformer-s0", "transformer", 0, "repeated", steps=(0,))
    path = folder / "race-transformer-s0"
    write_parquet(records(telemetry(common, "repeated")[:1]), path / "telemetry" / "000000-000001.parquet")
    (path / "telemetry" / ".000001-000002.parquet.x.part").write_bytes(b"PAR1")
    (path / "step_000008").mkdir()
    (folder / "text-resformer-s0").mkdir()
    run(folder, "text-svformer-s0", "svformer", 0, "text", steps=(0,))
    (folder / "text-svformer-s0" / "tokenizer.json").unlink()
    status = {"finished": False, "elapsed_s": 3.0, "left_s": None, "ready": [], "failed": {"x": "boom"}}
    status |= {"models": ["race-svformer-s0"]}
    write_json(folder / ".demo.json", status)
    return folder


def foreign(folder: Path) -> Path:
    """Other people's files among ours."""
    run(folder, "race-transformer-s0", "transformer", 0, "repeated")
    (folder / "race-transformer-s0" / "records").mkdir()
    import pandas as pd

    pd.DataFrame({"colour": ["red"], "metric": [3]}).to_parquet(
        folder / "race-transformer-s0" / "records" / "theirs.parquet"
    )
    (folder / "notes.txt").write_text("hello")
    (folder / "pictures **bold** :red[x] $y$ <b>").mkdir()
    for name, content in (
        ("list", []),
        ("other", {"name": "wandb"}),
        ("odd", {"architecture": "x", "seed": "y", "model": [], "train": 3}),
    ):
        (folder / name).mkdir()
        (folder / name / "run.json").write_text(json.dumps(content))
    (folder / "loop").symlink_to(folder)
    (folder / "gone").symlink_to(folder / "nowhere")
    (folder / ".demo.json").write_text("[1, 2]")
    return folder


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(f"{INDEX}*"))
    return target


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file of a folder of runs but its index and its verdicts, which whoever reads it keeps: size, and when it was written."""
    found = ((p.relative_to(folder).as_posix(), p.stat()) for p in sorted(folder.rglob("*")) if p.is_file())
    return {name: (told.st_size, told.st_mtime_ns) for name, told in found if name not in (INDEX, stored_verdicts.FILE)}


def pattern(n: int) -> np.ndarray:
    """Uniform causal attention [n, n]."""
    return np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]


def settled(at):
    """A page of AppTest once its long work is done."""
    for _ in range(240):
        assert not at.exception, [e.message for e in at.exception]
        if not any(str(b.key).startswith("cancel_") for b in at.button):
            return at
        time.sleep(0.1)
        at.run()
    raise AssertionError("the work never ended")
