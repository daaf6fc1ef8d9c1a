"""What telemetry costs a training: the loop of `workbench.training.loop` against one written by hand, with the same everything.

    OMP_NUM_THREADS=1 python benchmarks/training.py [--quick] [--slack 1.3]

Same weights, batches, schedule, clipping and fused AdamW, float32, one thread, blocks of steps interleaved in this process.
The loop notes losses, rates, every matrix's gradient norm and every coefficient in every step, and writes a part of its
telemetry after each block, which a real training does every two seconds. `norms`: the loop by hand with `gradient_norm`
in every step. Exits with 1 where throughput is below 0.98 of the loop by hand, norms cost over 1.02, or a loss differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from _timing import interleave
from torch import Tensor, nn

from workbench.config import ModelConfig, TrainConfig
from workbench.data.data_sources import RepeatedData
from workbench.metrics.weights import gradient_norm
from workbench.models import build
from workbench.models.hooked import next_token_loss
from workbench.training.loop import _Loop, create, create_accelerator, learning_rate, optimiser

SIZES = {  # of the demo's text models and of the preset `mini`, whose steps take longer and hide more
    "d 64": (ModelConfig(n_layers=4, d_model=64, n_heads=4, d_mlp=176, d_vocab=1024, n_ctx=128), 8, 10),
    "d 256": (ModelConfig(n_layers=8, d_model=256, n_heads=8, d_mlp=704, d_vocab=2048, n_ctx=128), 8, 2),
}
ARCHITECTURES = ("transformer", "resformer_learnable", "denseformer")
THROUGHPUT_LIMIT, NORMS_LIMIT = 0.98, 1.02


class ByHand:
    """A loop as one would write it; with `norms` it takes every matrix's gradient norm in every step."""

    def __init__(
        self, architecture: str, model: ModelConfig, train: TrainConfig, data: RepeatedData, norms: bool
    ) -> None:
        self.config, self.data, self.norms, self.number = train, data, norms, 0
        self.model = build(architecture, model, seed=0).train()
        self.optimiser = optimiser(self.model, train)

    def step(self) -> Tensor:
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.number, self.config)
        ids = self.data.batch(self.number, self.config.batch, self.config.T, 0)
        loss = next_token_loss(self.model(ids), ids)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        if self.norms:
            gradient_norm({n: p.grad for n, p in self.model.named_parameters()}, {})
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimiser.step()
        self.number += 1
        return loss.detach()


class Ours:
    """The product's loop, with a part of telemetry written at each `flush`."""

    def __init__(
        self, architecture: str, model: ModelConfig, train: TrainConfig, data: RepeatedData, runs: Path
    ) -> None:
        run = create(
            architecture, runs, architecture=architecture, model=model, train=train, data=data, seed=0, options={}
        )
        self.loop = _Loop(run, data, create_accelerator("cpu", train), [0], None, {})

    def step(self) -> Tensor:
        loss = self.loop._update()
        self.loop.step += 1
        return loss

    def flush(self, loss: Tensor) -> None:
        self.loop._note(float(loss), 1.0, due=False)


def measure(architecture: str, size: str, seconds: float, folder: Path) -> tuple[float, float, float, float]:
    """(ms of a step by hand, throughput of ours over it, cost of norms, largest difference of a loss)."""
    model, batch, block = SIZES[size]
    train = TrainConfig(
        steps=10**6, batch=batch, T=128, warmup=50, lr=1e-3, log_every=1, validate_every=10**6, save_every=10**6,
        validation_sequences=4,
    )  # fmt: skip
    data = RepeatedData(model.d_vocab)
    plain, norms = (ByHand(architecture, model, train, data, on) for on in (False, True))
    ours = Ours(architecture, model, train, data, folder / size)
    differs = max(abs(float(plain.step() - ours.step())) for _ in range(3))

    def steps(loop: ByHand) -> Callable[[], None]:
        def run() -> None:
            for _ in range(block):
                loop.step()

        return run

    def ours_steps() -> None:
        for _ in range(block):
            loss = ours.step()
        ours.flush(loss)

    timing = interleave({"plain": steps(plain), "ours": ours_steps, "norms": steps(norms)}, seconds=seconds, rounds=9)
    return timing["plain"].milliseconds / block, 1 / timing["ours"].ratio, timing["norms"].ratio, differs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smaller size, one architecture")
    parser.add_argument("--slack", type=float, default=1.0, help="factor on the limits, for a noisy machine")
    parser.add_argument("--seconds", type=float, default=15.0, help="CPU seconds per row, at least")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    failures = []
    print(
        f"{'size':<7} {'architecture':<20} {'by hand ms':>10} {'throughput':>10} {'limit':>6} {'norms':>6} {'limit':>6}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for size in list(SIZES)[:1] if options.quick else SIZES:
            for name in ARCHITECTURES[:1] if options.quick else ARCHITECTURES:
                for attempt in range(3):  # a shared machine: look again, longer
                    seconds = options.seconds * (1 + attempt)
                    ms, throughput, norms, differs = measure(name, size, seconds, Path(folder) / str(attempt))
                    held = throughput * options.slack >= THROUGHPUT_LIMIT and norms <= NORMS_LIMIT * options.slack
                    if held:
                        break
                print(
                    f"{size:<7} {name:<20} {ms:10.1f} {throughput:10.3f} {THROUGHPUT_LIMIT:6.2f} {norms:6.3f} {NORMS_LIMIT:6.2f}",
                    flush=True,
                )
                if not held:
                    failures.append(
                        f"{size}, {name}: throughput {throughput:.3f} (limit {THROUGHPUT_LIMIT}), norms {norms:.3f} ({NORMS_LIMIT})"
                    )
                if differs > 1e-5:
                    failures.append(f"{size}, {name}: the losses of the first steps differ by {differs:.1e}")
    print("\n" + ("\n".join(failures) or "all limits hold"))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
