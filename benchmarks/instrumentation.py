"""What hooks cost where nobody listens, and what caching values and gradient norms cost where somebody does.

    OMP_NUM_THREADS=1 python benchmarks/instrumentation.py [ARCHITECTURE ...] [--quick] [--slack 1.3]

Each registered architecture against its hook-free twin with the same weights (`twin.py`), 8 layers, d 256, vocabulary
2048, float32, one sequence, one thread; variants interleaved in this process. A ratio above its limit is measured again,
twice as long, up to three times; peak memory in a fresh process each. Ends with one line of ratios for each architecture
and exits with 1 where a limit is broken.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from _timing import Timing, interleave
from torch import Tensor
from twin import Twin, twin_of

from workbench.models import ARCHITECTURES, build
from workbench.models.hooked import next_token_loss

LENGTHS = (32, 128, 512, 1024)
CACHED = (256, 1024)
CONFIG = {"n_layers": 8, "d_model": 256, "n_heads": 8, "d_mlp": 704, "d_vocab": 2048, "n_ctx": 1024}
FORWARD_LIMIT = {32: 1.05, 128: 1.03, 512: 1.03, 1024: 1.03}
TRAINING_LIMIT, MEMORY_LIMIT, CACHE_LIMIT, NORMS_LIMIT = 1.03, 1.01, 1.05, 1.02

# The high-water mark of a process that did nothing else, over what it held before. glibc must hand every tensor back at
# once, or the mark depends on how earlier ones happened to be reused.
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_ARENA_MAX": "1"}
MEMORY_CHILD = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[3])
from instrumentation import pair, train, tokens_of
model, twin = pair(sys.argv[1])
subject, ids = (twin if sys.argv[2] == "twin" else model), tokens_of(1024)
status = lambda key: next(int(x.split()[1]) for x in Path("/proc/self/status").open() if x.startswith(key)) / 1024
train(subject, ids[:, :8])
subject.zero_grad()
before = status("VmRSS")
train(subject, ids)
print(status("VmHWM") - before)
"""


def pair(architecture: str) -> tuple[torch.nn.Module, Twin]:
    model = build(architecture, CONFIG)
    return model, twin_of(model)


def tokens_of(length: int) -> Tensor:
    return torch.randint(CONFIG["d_vocab"], (1, length), generator=torch.Generator().manual_seed(length))


def train(model: torch.nn.Module, ids: Tensor) -> None:
    """Forward and backward of the mean next-token loss."""
    model.zero_grad()
    next_token_loss(model(ids), ids).backward()


class Table:
    """Prints each ratio beside its limit and remembers what broke one."""

    def __init__(self, slack: float, seconds: float) -> None:
        self.slack, self.seconds, self.broken = slack, seconds, list[str]()
        self.ratios: dict[str, dict[str, float]] = {}
        print(f"{'what':<30} {'architecture':<24} {'T':>5} {'base ms':>9} {'ms':>9} {'ratio':>7} {'limit':>6}")

    def row(
        self, what: str, architecture: str, T: int, limit: float, variants: Mapping[str, Callable[[], object]]
    ) -> None:
        timing = self.best(variants, limit)
        (base, *_), (*_, mine) = timing.values(), timing.values()
        self.note(what, architecture, T, limit, mine.ratio, base.milliseconds, mine.milliseconds)

    def best(self, variants: Mapping[str, Callable[[], object]], limit: float) -> dict[str, Timing]:
        timing = interleave(variants, seconds=self.seconds, rounds=11)
        for _ in range(3):
            if list(timing.values())[-1].ratio <= limit * self.slack:
                break
            timing = interleave(variants, seconds=2 * self.seconds, rounds=21)  # a shared machine: look again, longer
        return timing

    def note(self, what: str, architecture: str, T: int, limit: float, ratio: float, base: float, mine: float) -> None:
        self.ratios.setdefault(architecture, {})[f"{what} {T}"] = ratio
        print(f"{what:<30} {architecture:<24} {T:>5} {base:>9.2f} {mine:>9.2f} {ratio:>7.3f} {limit:>6.2f}", flush=True)
        if ratio > limit * self.slack:
            self.broken.append(f"{what}, {architecture}, T {T}: {ratio:.3f}, limit {limit}")

    def summary(self) -> str:
        """One line of ratios for each architecture, in Markdown."""
        columns = list(dict.fromkeys(column for found in self.ratios.values() for column in found))
        rows = [["ratio", *columns], ["---"] * (1 + len(columns))]
        rows += [[n, *(f"{found[c]:.3f}" if c in found else "" for c in columns)] for n, found in self.ratios.items()]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def forward(table: Table, architecture: str, lengths: tuple[int, ...]) -> None:
    model, twin = pair(architecture)
    for T in lengths:
        ids = tokens_of(T)
        with torch.no_grad():
            torch.testing.assert_close(model(ids), twin(ids), atol=1e-4, rtol=1e-4)
            variants = {"twin": lambda ids=ids: twin(ids), "model": lambda ids=ids: model(ids)}
            table.row("forward, no hooks", architecture, T, FORWARD_LIMIT[T], variants)


def training(table: Table, architecture: str) -> None:
    model, twin = pair(architecture)
    ids = tokens_of(512)
    variants = {"twin": lambda: train(twin, ids), "model": lambda: train(model, ids)}
    table.row("forward + backward, no hooks", architecture, 512, TRAINING_LIMIT, variants)


def memory(table: Table, architecture: str) -> None:
    if not Path("/proc/self/status").exists():
        return
    found = {}
    for subject in ("twin", "model"):
        command = [sys.executable, "-c", MEMORY_CHILD, architecture, subject, str(Path(__file__).parent)]
        found[subject] = float(
            subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | AT_ONCE).stdout
        )
    ratio = found["model"] / found["twin"]
    table.note("peak MiB, forward + backward", architecture, 1024, MEMORY_LIMIT, ratio, found["twin"], found["model"])


def caching(table: Table, architecture: str) -> None:
    model, _ = pair(architecture)
    names = [name for name in model.hook_dict if name.endswith("attn.hook_v")]
    for T in CACHED:
        ids = tokens_of(T)
        with torch.no_grad():
            variants = {
                "plain": lambda ids=ids: model(ids),
                "cached": lambda ids=ids: model.run_with_cache(ids, names_filter=names),
            }
            table.row("values of every layer cached", architecture, T, CACHE_LIMIT, variants)


def norms(table: Table, architecture: str) -> None:
    """A training step (loss, clipping, AdamW) with and without the norm of every gradient."""
    model, _ = pair(architecture)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = tokens_of(512)

    def step(listening: bool) -> None:
        train(model, ids)
        if listening:
            torch.stack(torch._foreach_norm([p.grad for p in model.parameters() if p.grad is not None])).tolist()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

    variants = {"plain": lambda: step(False), "norms": lambda: step(True)}
    table.row("all gradient norms, each step", architecture, 512, NORMS_LIMIT, variants)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "architectures",
        nargs="*",
        default=[a for a in ARCHITECTURES if a != "first_layer_shuffled"],
        help="by default all that run one sequence",
    )
    parser.add_argument("--quick", action="store_true", help="two architectures, two lengths")
    parser.add_argument("--slack", type=float, default=1.0, help="factor on the limits, for a noisy machine")
    parser.add_argument("--seconds", type=float, default=3.0, help="CPU seconds per row, at least")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.architectures[:2] if options.quick else options.architectures
    table = Table(options.slack, options.seconds)
    for name in names:
        forward(table, name, LENGTHS[:2] if options.quick else LENGTHS)
        training(table, name)
        memory(table, name)
        caching(table, name)
    norms(table, names[0])
    print("\n" + table.summary())
    print("\n".join(["", *table.broken]) if table.broken else "\nall limits hold")
    return bool(table.broken)


if __name__ == "__main__":
    sys.exit(main())
