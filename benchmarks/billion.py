"""What measuring a foreign decoder of 1.1 billion weights costs: memory of whole processes and CPU time, over its bare forward pass.

    OMP_NUM_THREADS=1 python benchmarks/billion.py [--only NAME ...]

A Llama of Hugging Face with TinyLlama's sizes, random weights in bfloat16, documents of 512 tokens that come as often as words do
(Zipf), one thread. A peak is of a fresh process with its libraries, divided by the peak of a process that runs the bare module. Times are
CPU seconds of one process in which the bare passes and the others take turns: all statistics of every layer in one run, the measures of
an X-ray but its ablation, and these at every site they know.
Exits with 1 where a limit is broken.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workbench import measure, observe, xray
from workbench.hook_names import STATISTICS
from workbench.reports.xray import METRICS, SITES, TOGETHER

VOCABULARY, T, DOCUMENTS, XRAYED, ROUNDS = 32_000, 512, 2, 8, 3
MEMORY_LIMIT, TIME_LIMIT = 1.3, 2.0
MEASURES = [name for name in METRICS if name != TOGETHER]


def billion() -> nn.Module:
    """The module, made in bfloat16 from the start."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
        num_key_value_heads=4, max_position_embeddings=2048, use_cache=False, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def documents(n: int, seed: int) -> Tensor:
    often = 1 / torch.arange(1, VOCABULARY + 1)
    return often.multinomial(n * T, replacement=True, generator=torch.Generator().manual_seed(seed)).view(n, T)


def bare(module: nn.Module, ids: Tensor) -> None:
    """A pass for each document; its logits are let go."""
    with torch.no_grad():
        for row in ids:
            module(row[None])


def seen(module: nn.Module) -> Any:
    return observe(module, documents(1, 99)[:, :64], quiet=True)


def all_statistics(observed: Any, ids: Tensor) -> None:
    names = [name for name in observed.hook_dict if name.endswith(STATISTICS)]
    with torch.no_grad():
        for row in ids:
            observed.run_with_cache(row[None], names_filter=names)


def measures(observed: Any, ids: Tensor) -> None:
    measure(observed, MEASURES, ids, batch=1, sites=SITES)


def sites(observed: Any, ids: Tensor) -> None:
    measure(observed, MEASURES, ids, batch=1)


WORK: dict[str, Callable[[nn.Module], Any]] = {
    "bare": lambda module: bare(module, documents(DOCUMENTS, 0)),
    "observe": lambda module: seen(module),
    "statistics": lambda module: all_statistics(seen(module), documents(DOCUMENTS, 0)),
    "measures": lambda module: measures(seen(module), documents(DOCUMENTS, 0)),
    "sites": lambda module: sites(seen(module), documents(DOCUMENTS, 0)),
    "xray": lambda module: xray(seen(module), documents(XRAYED, 0)),
}
"""What is done in a fresh process; its peak is that of the whole process."""


def peak(what: str) -> float:
    """MiB that a fresh process held at most."""
    command = [sys.executable, str(Path(__file__)), "--child", what]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def times() -> dict[str, tuple[float, float]]:
    """CPU seconds of each for `DOCUMENTS` documents, and its ratio to the bare passes of the same round; medians."""
    module = billion()
    observed = seen(module)
    bare(module, documents(1, 1))
    others = {"statistics": all_statistics, "measures": measures, "sites": sites}
    rounds: dict[str, list[float]] = {name: [] for name in ("bare", *others)}
    for seed in range(ROUNDS):
        ids = documents(DOCUMENTS, seed)  # new ones: what was measured is not measured again
        rounds["bare"].append(seconds(lambda ids=ids: bare(module, ids)))
        for name, work in others.items():
            rounds[name].append(seconds(lambda ids=ids, work=work: work(observed, ids)))
    first = rounds["bare"]
    return {
        name: (statistics.median(mine), statistics.median(a / b for a, b in zip(mine, first, strict=True)))
        for name, mine in rounds.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[*WORK, "times"], choices=[*WORK, "times"])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        WORK[options.child](billion())
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return 0
    broken = []
    peaks = {what: peak(what) for what in ("bare", *(w for w in options.only if w not in ("bare", "times")))}
    for what, mib in peaks.items():
        ratio = mib / peaks["bare"]
        print(f"peak of {what:<12} {mib:>8.0f} MiB {ratio:>6.3f} (limit {MEMORY_LIMIT})", flush=True)
        broken += [f"memory of {what}: {ratio:.3f}"] if ratio > MEMORY_LIMIT else []
    for what, (taken, ratio) in times().items() if "times" in options.only else ():
        print(f"time of {what:<12} {taken:>8.2f} s   {ratio:>6.3f} (limit {TIME_LIMIT})", flush=True)
        broken += [f"time of {what}: {ratio:.3f}"] if ratio > TIME_LIMIT else []
    print("\n".join(["", *broken]) if broken else "\nall limits hold")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
