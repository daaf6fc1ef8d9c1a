"""Everything that waits for a GPU, in one command whose results are on disk as they come; the same command goes on.

    python benchmarks/gpu.py --minutes 9 --out gpu-results       # or: make gpu
    python benchmarks/gpu.py --rehearse --out /tmp/rehearsal     # the same path on a CPU, tiny

In this order:

- facts of the device, and the tests marked `cuda` (where pytest is)
- attention statistics against one fused attention forward
- training steps of each architecture against the vanilla decoder's, and as a share of a large matrix product's speed
- `STUDIES`, for the claims that no shipped run decides (docs/evidence.md), ordered by seed: any cut leaves complete comparisons

`workbench analyze OUT/runs` judges the claims on what is there. A failed part is named in the
summary, the others go on, and the exit code is 1.
Leaves `facts.json`, `tests.txt`, `kernels.parquet`, `training.parquet`, `losses.parquet` and `summary.md`. Without a device it says so
and exits with 2. Neither the dashboard's libraries nor transformer-lens' extras are needed beyond what `workbench` itself imports.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.config import PRESETS, ModelConfig
from workbench.errors import WorkbenchError
from workbench.file_io import write_json, write_text
from workbench.kernels import attention_reference, attention_statistics
from workbench.models import ARCHITECTURES, build
from workbench.models.hooked import next_token_loss
from workbench.runs.records import write_parquet
from workbench.runs.run import Run
from workbench.studies.study_file import find_study

ROOT = Path(__file__).parent.parent
CUDA_TESTS = ("devices", "kernels", "null_kernels", "generation", "training_processes")
ROUNDS, FLUSH_S, STOPPING_S = 9, 60, 60
STUDIES = ("gpu_rates", "gpu", "sizes", "gpu_relatives", "mini")
REHEARSAL = """
question = "Does the path to a finished study hold?"
seeds = {seeds}
{rates}
baseline = "transformer"
data = {{ kind = "repeated", vocabulary = 16 }}
model = {{ n_layers = 2, d_model = 16, n_heads = 1, d_mlp = 4, n_ctx = 16 }}
recipe = {{ steps = 4, batch = 2, T = 16, warmup = 1, validate_every = 2, validation_sequences = 2 }}

[[models]]
architecture = "transformer"
[[models]]
architecture = "resformer"
"""


def facts(device: torch.device) -> dict[str, Any]:
    """What this was measured on."""
    found: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0], "device": str(device)}
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        found |= {"name": about.name, "memory_gib": round(about.total_memory / 2**30, 1), "cuda": torch.version.cuda}
    return found


def tests(out: Path) -> str:
    """The tests that need a device, and how they ended in a line."""
    if importlib.util.find_spec("pytest") is None:
        return "pytest is not installed: not run"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider"]
    command += ["-n", "8"] if importlib.util.find_spec("xdist") else []
    command += [f"tests/test_{name}.py" for name in CUDA_TESTS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    write_text(out / "tests.txt", done.stdout + done.stderr)
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def medians(variants: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, tuple[float, float]]:
    """(milliseconds, ratio to the first variant) of each, medians of interleaved rounds by the clock, the device's queue empty."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS + 1):  # the first warms up
        for name, run in variants.items():
            _wait(device)
            begin = time.perf_counter()
            run()
            _wait(device)
            times[name].append(time.perf_counter() - begin)
    kept = {name: t[1:] for name, t in times.items()}
    first = next(iter(kept.values()))
    return {
        name: (1e3 * statistics.median(t), statistics.median(a / b for a, b in zip(t, first, strict=True)))
        for name, t in kept.items()
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernels(device: torch.device, lengths: tuple[int, ...]) -> pd.DataFrame:
    """Statistics of attention beside one fused forward pass: time, peak memory, and the largest error against float64."""
    rows = []
    for length in lengths:
        for dtype in (torch.float32, torch.bfloat16):
            draw = torch.Generator().manual_seed(length)
            q, k, v = (torch.randn(1, length, 8, 64, generator=draw).to(device, dtype) for _ in range(3))
            fused = lambda q=q, k=k, v=v: F.scaled_dot_product_attention(  # noqa: E731
                *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
            )
            with torch.no_grad():
                found = medians(
                    {"fused forward": fused, "statistics": lambda q=q, k=k, v=v: attention_statistics(q, k, v)}, device
                )
                error = _error(q, k, v) if length <= 2048 else float("nan")
                memory = _peak(lambda q=q, k=k, v=v: attention_statistics(q, k, v), device)
            for name, (ms, ratio) in found.items():
                rows.append({
                    "T": length, "dtype": str(dtype).removeprefix("torch."), "form": name, "ms": ms, "ratio": ratio,
                    "peak_mib": memory if name == "statistics" else float("nan"),
                    "error": error if name == "statistics" else float("nan"),
                })  # fmt: skip
    return pd.DataFrame(rows)


def _error(q: Tensor, k: Tensor, v: Tensor) -> float:
    mine, true = attention_statistics(q, k, v)[1], attention_reference(*(x.double() for x in (q, k, v)))[2]
    return max(
        float(((a.double() - b).abs() / b.abs().clamp(min=1)).max())
        for a, b in ((mine.received, true.received), (mine.row_entropy, true.row_entropy), (mine.lse, true.lse))
    )


def _peak(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        return float("nan")
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def training(device: torch.device, config: ModelConfig, names: Sequence[str], batch: int, T: int) -> pd.DataFrame:
    """Tokens a second of training steps in bfloat16, beside the vanilla decoder's, and as a share of a matrix product's speed."""
    size = 8192 if device.type == "cuda" else 256
    square = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    fastest = 2 * size**3 / (medians({"product": lambda: square @ square}, device)["product"][0] / 1e3)
    ids, rows = torch.randint(config.d_vocab, (batch, T), device=device), []
    for name in names:  # the vanilla decoder first
        try:
            model = build(name, config).to(device).train()
        except WorkbenchError as error:
            rows.append({"architecture": name, "refused": str(error)})
            continue
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device.type == "cuda")

        def step(model: Any = model, optimiser: torch.optim.Optimizer = optimiser) -> None:
            with torch.autocast(device.type, torch.bfloat16):
                loss = next_token_loss(model(ids), ids)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()

        ms = medians({"step": step}, device)["step"][0]
        pace, weights = batch * T / (ms / 1e3), sum(p.numel() for p in model.parameters())
        weights -= sum(
            m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)
        )  # looked up, not multiplied
        per_token = 6 * weights + 6 * config.n_layers * config.d_model * T  # causal: half of the scores
        rows.append({
            "architecture": name, "tokens_per_second": pace, "share_of_matmul": pace * per_token / fastest,
            "over_transformer": rows[0]["tokens_per_second"] / pace if rows else 1.0,
        })  # fmt: skip
    return pd.DataFrame(rows)


def study(out: Path, file: Path, device: torch.device, deadline: float, processes: int) -> str:
    """Train a study until its end or the deadline, with its losses so far on disk every minute; return how it ended."""
    command = [
        sys.executable, "-c", "from workbench.cli import main; main()", "study", str(file), "--runs", str(out / "runs"), "--out",
        str(out / "study"), "--device", device.type, "--workers", str(processes),
    ]  # fmt: skip
    with (out / f"{file.stem}.txt").open("w", encoding="utf-8") as said:
        child = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, cwd=ROOT)
        while child.poll() is None and time.monotonic() < deadline:
            try:
                child.wait(timeout=max(0.1, min(FLUSH_S, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                write_parquet(losses(out / "runs"), out / "losses.parquet")
        ended = child.poll()
        for ask in (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGKILL,
        ):  # the next where one is not heard: the rest waits for it
            if child.poll() is None:
                child.send_signal(ask)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=STOPPING_S)
    return "out of time" if ended is None else "done" if ended == 0 else f"failed, see {file.stem}.txt"


def files(out: Path, *, rehearse: bool) -> list[Path]:
    """The studies in their order; for a rehearsal two tiny ones, of which the second takes its learning rates from the first."""
    if not rehearse:
        return [find_study(name) for name in STUDIES]
    rates, file = out / "rehearsal_rates.toml", out / "rehearsal.toml"
    write_text(rates, REHEARSAL.format(seeds=[2], rates='tuned = "lr"\ngrid.recipe.lr = [1e-3, 2e-3]'))
    write_text(file, REHEARSAL.format(seeds=[0, 1], rates=f"rates_from = {json.dumps(str(rates))}"))
    return [rates, file]


def losses(runs: Path) -> pd.DataFrame:
    """Validation loss in nats, mean of the domains, of every run at every step that was written down."""
    rows = []
    for path in sorted(runs.glob("*/run.json")):
        run = Run.open(path.parent)
        curve = run.telemetry("metric == 'validation_loss' and variant.isnull()").groupby("step")["value"].mean()
        rows += [
            {
                "run": run.name,
                "architecture": run.architecture,
                "seed": run.seed,
                "step": int(s),
                "validation_loss": float(x),
            }
            for s, x in curve.items()
        ]
    return pd.DataFrame(rows, columns=["run", "architecture", "seed", "step", "validation_loss"])


def summarised(
    about: dict[str, Any], tested: str, made: Mapping[str, pd.DataFrame], failed: Mapping[str, str], studies: str
) -> str:
    """The table for the README, and how far everything came."""
    on = f"{about.get('name', about['device'])}, torch {about['torch']}"
    lines = ["| date | device | what | ratio |\n|---|---|---|---|\n"]
    lines += [
        f"| {time.strftime('%Y-%m-%d')} | {on} | attention statistics over one fused forward, T {r.T}, {r.dtype} | {r.ratio:.2f} |\n"
        for r in (made["kernels"].query("form == 'statistics'").itertuples() if "kernels" in made else ())
    ]
    for r in made["training"].dropna(subset="share_of_matmul").itertuples() if "training" in made else ():
        lines.append(
            f"| {time.strftime('%Y-%m-%d')} | {on} | a training step of {r.architecture} over the Transformer's "
            f"(share of a matrix product's speed: {r.share_of_matmul:.0%}) | {r.over_transformer:.2f} |\n"
        )
    lines += [f"\n{name} failed: {error}\n" for name, error in failed.items()]
    lines.append(f"\ntests: {tested}\n\nstudies: {studies}; {made['losses']['run'].nunique()} runs are begun.\n")
    return "".join(lines)


def main() -> int:
    processes = max(1, min(14, (os.cpu_count() or 1) - 2))  # small models wait for their process, not for the device
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call, in all (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--processes", type=int, default=processes, help="trainings of the study at once (%(default)s)")
    parser.add_argument(
        "--rehearse", action="store_true", help="on a CPU, tiny: to see that the way to the end is free"
    )
    asked = parser.parse_args()
    if not (asked.rehearse or torch.cuda.is_available()):
        print("no CUDA device here; --rehearse goes the same way on a CPU", file=sys.stderr)
        return 2
    begin, device = time.monotonic(), torch.device("cpu" if asked.rehearse else "cuda")
    asked.out.mkdir(parents=True, exist_ok=True)
    about = facts(device)
    write_json(asked.out / "facts.json", about)
    told = asked.out / "told.json"  # what an earlier call has done already
    tested = json.loads(told.read_text()) if told.exists() else tests(asked.out)
    write_json(told, tested)
    preset, made, failed = PRESETS["tiny" if asked.rehearse else "mini"], dict[str, pd.DataFrame](), dict[str, str]()
    names = ["transformer", "resformer"] if asked.rehearse else sorted(ARCHITECTURES, key=lambda a: a != "transformer")
    parts: dict[str, Callable[[], pd.DataFrame]] = {
        "kernels": lambda: kernels(device, (64,) if asked.rehearse else (512, 2048, 8192, 16384)),
        "training": lambda: training(device, preset.model, names, *((1, 16) if asked.rehearse else (64, 512))),
    }
    for name, part in parts.items():
        path = asked.out / f"{name}.parquet"
        try:
            if not path.exists():
                write_parquet(part(), path)
        except Exception as error:  # the device's minutes are few: told, and the next part goes on
            failed[name] = f"{type(error).__name__}: {error}"
            write_text(path.with_suffix(".error.txt"), traceback.format_exc())
            continue
        made[name] = pd.read_parquet(path)
        print(f"{name}: {len(made[name])} rows after {time.monotonic() - begin:.0f} s", flush=True)
    left, ends = begin + 60 * asked.minutes - STOPPING_S * (not asked.rehearse), dict[str, str]()
    for file in files(asked.out, rehearse=asked.rehearse):
        if time.monotonic() > left:
            ends[file.stem] = "not begun"
            break
        ends[file.stem] = study(asked.out, file, device, left, 1 if asked.rehearse else asked.processes)
    made["losses"] = losses(asked.out / "runs")
    write_parquet(made["losses"], asked.out / "losses.parquet")
    studies = ", ".join(f"{name} {end}" for name, end in ends.items())
    write_text(asked.out / "summary.md", summarised(about, tested, made, failed, studies))
    print((asked.out / "summary.md").read_text())
    return int(bool(failed) or any("failed" in ended for ended in (tested, studies)) or "error" in tested)


if __name__ == "__main__":
    sys.exit(main())
