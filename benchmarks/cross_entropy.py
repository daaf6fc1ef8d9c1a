"""A training step at a vocabulary of 50,277 with the loss from chunks of logits, against the loss from all of them.

    OMP_NUM_THREADS=1 python benchmarks/cross_entropy.py [--quick] [--slack 1.3]

The same model and tokens: 82M parameters (d 512, 8 layers), 1 x 1024 tokens, float32, one thread; forward and backward,
interleaved in this process, peak memory in a fresh process each. Beside both, on the unembedding alone, PyTorch's own
chunked `linear_cross_entropy` where it has one. Exits with 1 where time, memory, loss or a gradient misses its limit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from _timing import interleave
from instrumentation import AT_ONCE
from torch import Tensor, nn

from workbench.kernels.cross_entropy import cross_entropy, cross_entropy_reference
from workbench.models import build
from workbench.models.hooked import next_token_loss

CONFIG = {"n_layers": 8, "d_model": 512, "n_heads": 8, "d_mlp": 1792, "d_vocab": 50_277, "n_ctx": 1024}
SMALL = CONFIG | {"n_layers": 2, "d_model": 128, "d_mlp": 352}
TIME_LIMIT, MEMORY_LIMIT, LOSS_LIMIT, GRADIENT_LIMIT = 1.0, 0.65, 1e-6, 1e-5

# The high-water mark of a process that did nothing else, over what it held with its weights loaded.
MEMORY_CHILD = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[3])
from cross_entropy import CONFIG, SMALL, STEPS, subject
model, ids = subject(SMALL if sys.argv[2] == "small" else CONFIG)
status = lambda key: next(int(x.split()[1]) for x in Path("/proc/self/status").open() if x.startswith(key)) / 1024
STEPS[sys.argv[1]](model, ids[:, :8])
model.zero_grad()
before = status("VmRSS")
STEPS[sys.argv[1]](model, ids)
print(status("VmHWM") - before)
"""


def subject(config: dict[str, int]) -> tuple[nn.Module, Tensor]:
    ids = torch.randint(config["d_vocab"], (1, config["n_ctx"]), generator=torch.Generator().manual_seed(0))
    return build("resformer", config), ids


def plain(model: nn.Module, ids: Tensor) -> Tensor:
    """As one would write it: every logit, then the loss."""
    model.zero_grad()
    loss = next_token_loss(model(ids), ids)
    loss.backward()
    return loss.detach()


def chunked(model: nn.Module, ids: Tensor) -> Tensor:
    model.zero_grad()
    loss = model(ids, return_type="loss")
    loss.backward()
    return loss.detach()


def per_token(model: nn.Module, ids: Tensor) -> Tensor:
    """As the training loop takes it."""
    model.zero_grad()
    loss = model(ids, return_type="loss", loss_per_token=True).mean()
    loss.backward()
    return loss.detach()


def documents(model: nn.Module, ids: Tensor) -> Tensor:
    """Positions that weigh differently: their logits are formed twice."""
    model.zero_grad()
    losses = model(ids, return_type="loss", loss_per_token=True)
    loss = (losses * torch.linspace(0.5, 1.5, losses.shape[1])).mean()
    loss.backward()
    return loss.detach()


STEPS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "all logits": plain, "chunks, mean": chunked, "chunks, per token": per_token, "chunks, weighted": documents,
}  # fmt: skip


def peak(step: str, size: str) -> float:
    """MiB of one step beside the weights; NaN where the system does not tell."""
    if not Path("/proc/self/status").exists():
        return float("nan")
    command = [sys.executable, "-c", MEMORY_CHILD, step, size, str(Path(__file__).parent)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | AT_ONCE).stdout)


def errors(config: dict[str, int]) -> tuple[float, float]:
    """(of the loss, absolute; of the gradients, relative to each one's largest entry): chunks against all logits."""
    model, ids = subject(config)
    expected = plain(model, ids)
    gradients = [p.grad.clone() for p in model.parameters()]
    loss = abs(float(chunked(model, ids) - expected))
    pairs = zip((p.grad for p in model.parameters()), gradients, strict=True)
    return loss, max(float((mine - true).abs().max() / true.abs().max()) for mine, true in pairs)


def heads(config: dict[str, int]) -> dict[str, Callable[[], None]]:
    """The unembedding and its loss alone, forward and backward."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(config["n_ctx"] - 1, config["d_model"], generator=generator).requires_grad_()
    weight = (0.02 * torch.randn(config["d_vocab"], config["d_model"], generator=generator)).requires_grad_()
    targets = torch.randint(config["d_vocab"], (len(x),), generator=generator)

    def step(how: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            x.grad = weight.grad = None
            how().mean().backward()

        return run

    found = {
        "all logits": step(lambda: cross_entropy_reference(x, weight, targets)),
        "chunks": step(lambda: cross_entropy(x, weight, targets)),
    }
    if hasattr(F, "linear_cross_entropy"):
        options = nn.LinearCrossEntropyOptions()
        found["torch, chunks"] = step(lambda: F.linear_cross_entropy(x, weight, targets, options=options))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model with the same vocabulary")
    parser.add_argument(
        "--slack", type=float, default=1.0, help="factor on the limits of the ratios, for a noisy machine"
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="CPU seconds of steps, at least")
    options = parser.parse_args()
    torch.set_num_threads(1)
    size, config = ("small", SMALL) if options.quick else ("82M", CONFIG)
    failures = []

    loss, gradient = errors(config)
    print(
        f"{size}, 1 x {config['n_ctx']}: loss differs by {loss:.1e} nats, gradients by {gradient:.1e} of their largest entry"
    )
    if loss > LOSS_LIMIT or gradient > GRADIENT_LIMIT:
        failures.append(
            f"loss off by {loss:.1e} (limit {LOSS_LIMIT:.0e}), gradient {gradient:.1e} ({GRADIENT_LIMIT:.0e})"
        )

    model, ids = subject(config)
    timing = interleave({n: (lambda f=f: f(model, ids)) for n, f in STEPS.items()}, seconds=options.seconds, rounds=5)
    memory = {name: peak(name, size) for name in STEPS}
    print(f"\n{'step':<20} {'ms':>9} {'ratio':>7} {'limit':>6} {'peak MiB':>9} {'ratio':>7} {'limit':>6}")
    for name in STEPS:
        ratio, share = timing[name].ratio, memory[name] / memory["all logits"]
        bound = name not in ("all logits", "chunks, weighted")
        limits = (f"{TIME_LIMIT:.2f}", f"{MEMORY_LIMIT:.2f}") if bound else ("", "")
        print(
            f"{name:<20} {timing[name].milliseconds:9.1f} {ratio:7.3f} {limits[0]:>6} "
            f"{memory[name]:9.0f} {share:7.3f} {limits[1]:>6}",
            flush=True,
        )
        if bound and ratio > TIME_LIMIT * options.slack:
            failures.append(f"{name}: {ratio:.3f}x the time of all logits, limit {TIME_LIMIT}")
        if bound and share > MEMORY_LIMIT * options.slack:
            failures.append(f"{name}: {share:.3f}x the memory of all logits, limit {MEMORY_LIMIT}")

    print("\nthe unembedding and its loss alone, forward and backward")
    for name, found in interleave(heads(config), seconds=options.seconds / 2, rounds=5).items():
        print(f"{name:<20} {found.milliseconds:9.1f} {found.ratio:7.3f}")
    print("\n" + ("\n".join(failures) or "all limits hold"))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
