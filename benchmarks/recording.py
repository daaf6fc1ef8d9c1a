"""What a recorder costs a training loop: between its logging steps, on one, and at its default of one in a hundred.

    OMP_NUM_THREADS=1 python benchmarks/recording.py [--quick] [--slack 1.3]

The same steps (forward, backward, clipping, AdamW) of two models with the same weights, with and without a recorder, float32,
one thread, interleaved in this process: our ResFormer and its plain twin (`twin.py`), which is a foreign module to the recorder.
`one step in 100` is 99 idle steps and one logging step, from the two ratios above it; `100 steps, run` is that, run as it
is, files and all, on the smallest model, where what does not shrink with the model weighs most; `gradient sinks` is the same of
gradients by position alone, of ours, with one logging step in ten. Exits with 1 where a limit
is broken.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from _timing import interleave
from torch import nn
from twin import twin_of

from workbench.models import build
from workbench.models.hooked import next_token_loss
from workbench.runs.run import Run
from workbench.training.recorder import NotRecorded, Recorder
from workbench.training.recorder.quantities import DEFAULT

SIZES = {
    "mini": ({"n_layers": 8, "d_model": 256, "n_heads": 8, "d_mlp": 704, "d_vocab": 2048, "n_ctx": 512}, 2, 256),
    "tiny": ({"n_layers": 8, "d_model": 64, "n_heads": 4, "d_mlp": 176, "d_vocab": 1024, "n_ctx": 128}, 4, 128),
}
KINDS = ("ours", "foreign", "compiled")  # the last: the foreign one under torch.compile, which a logging step leaves
DEFAULT_LIMIT, IDLE_LIMIT, EVERY = 1.03, 1.01, 100
SINKS, SINKS_LIMIT, OFTEN = ("gradient_sink", "gradient_by_position"), 1.05, 10


class Loop:
    """A training loop, with or without a recorder."""

    def __init__(self, model: nn.Module, vocabulary: int, shape: tuple[int, int], recorder: Recorder | None) -> None:
        self.model, self.recorder = model.train(), recorder
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.ids = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = next_token_loss(self.model(self.ids), self.ids)
        loss.backward()
        if self.recorder:
            self.recorder.step(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def steps(self, n: int) -> None:
        for _ in range(n):
            self.step()


class Table:
    def __init__(self, slack: float) -> None:
        self.slack, self.broken = slack, list[str]()
        print(f"{'what':<22} {'model':<20} {'base ms':>9} {'ms':>9} {'ratio':>7} {'limit':>6}")

    def row(self, what: str, model: str, base: float, mine: float, ratio: float, limit: float | None = None) -> None:
        shown = f"{limit:>6.2f}" if limit else f"{'':>6}"
        print(f"{what:<22} {model:<20} {base:>9.2f} {mine:>9.2f} {ratio:>7.3f} {shown}", flush=True)
        if limit and ratio > limit * self.slack:
            self.broken.append(f"{what}, {model}: {ratio:.3f}, limit {limit}")


def loops(size: str, kind: str, folder: Path, quantities: Sequence[str] = DEFAULT) -> Callable[[int | None], Loop]:
    """`make(every)`: a loop with a recorder of that period, None without; models of one seed."""
    config, batch, length = SIZES[size]

    def make(every: int | None) -> Loop:
        ours = build("resformer", config)
        model = ours if kind == "ours" else twin_of(ours)
        model = torch.compile(model) if kind == "compiled" else model
        path = folder / f"{size}-{kind}-{every}"
        recorder = Recorder(model, every, path, quantities=quantities) if every else None
        return Loop(model, config["d_vocab"], (batch, length), recorder)

    return make


def measure(table: Table, size: str, kind: str, folder: Path, seconds: float) -> None:
    name = f"{size}, {kind}"
    make = loops(size, kind, folder)
    # a pair of steps: while a recorder listens, nothing in the process runs compiled, so it must not when others are timed
    plain, idle, second = make(None), make(10**9), make(2)
    idle.steps(2)  # step 0 is recorded, and written in step 1
    second.step()
    pairs = {"plain": plain, "idle": idle, "second": second}
    calls = {what: partial(loop.steps, 2) for what, loop in pairs.items()}
    found = interleave(calls, seconds=seconds, rounds=15)
    if found["idle"].ratio > IDLE_LIMIT * table.slack:  # a shared machine: measure again, longer
        found = interleave(calls, seconds=2 * seconds, rounds=31)
    base, between = found["plain"].milliseconds / 2, found["idle"].ratio
    logging = 2 * found["second"].ratio - between
    table.row("between", name, base, base * between, between, IDLE_LIMIT)
    table.row("on a logging step", name, base, base * logging, logging)
    ratio = ((EVERY - 1) * between + logging) / EVERY
    table.row(f"one step in {EVERY}", name, base, base * ratio, ratio, DEFAULT_LIMIT)


def run(table: Table, size: str, kind: str, folder: Path, seconds: float) -> None:
    name = f"{size}, {kind}"
    plain, default = (loops(size, kind, folder / "run")(every) for every in (None, EVERY))
    timed = {"plain": plain, "default": default}
    if kind == "ours":  # the twin mixes its values inline: what its attention reads is no module's output
        timed["sinks"] = loops(size, kind, folder / "sinks", SINKS)(OFTEN)
    calls = {name: partial(loop.steps, EVERY) for name, loop in timed.items()}
    found = interleave(calls, seconds=seconds, rounds=3)
    base, mine = found["plain"].milliseconds / EVERY, found["default"].milliseconds / EVERY
    table.row(f"{EVERY} steps, run", name, base, mine, found["default"].ratio, DEFAULT_LIMIT)
    if "sinks" in found:
        table.row("gradient sinks", name, base, base * found["sinks"].ratio, found["sinks"].ratio, SINKS_LIMIT)
    assert default.recorder is not None
    default.recorder.close()
    shares = Run.open(default.recorder.folder.path).telemetry("metric == 'recorder_share'")["value"]
    print(f"{'':22} {name:<20} the recorder's own share of the time, as it recorded it: {shares.median():.4f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest model alone, few rounds")
    parser.add_argument("--slack", type=float, default=1.0, help="factor on the limits, for a noisy machine")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", NotRecorded)
    seconds = 2.0 if options.quick else 15.0
    table = Table(options.slack)
    with tempfile.TemporaryDirectory() as folder:
        for size in ("tiny",) if options.quick else SIZES:
            for kind in KINDS[:2] if options.quick else KINDS:
                measure(table, size, kind, Path(folder), seconds)
        for kind in KINDS[:2]:
            run(table, "tiny", kind, Path(folder), seconds)
    print("\n".join(["", *table.broken]) if table.broken else "\nall limits hold")
    return bool(table.broken)


if __name__ == "__main__":
    sys.exit(main())
