"""What observing a foreign decoder costs: idle, reading values, streaming statistics, and memory at long lengths.

    OMP_NUM_THREADS=1 python benchmarks/observing.py [--quick] [--slack 1.3]

Modules that know nothing of the workbench: the hook-free twin of our decoder (`twin.py`), a Llama and a Mixtral of Hugging Face;
8 layers, d 256, vocabulary 2048, float32, one sequence, one thread; variants interleaved in this process. Idle has a limit at
every length, reading and statistics from 256 tokens on. Peak memory: a Llama of 2 layers with 4 heads at T 16,384, in fresh
processes, over a plain run's; its pattern would be 4 GiB a layer. Exits with 1 where a limit is broken.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from _timing import interleave
from torch import Tensor, nn
from twin import twin_of

from workbench.hook_names import STATISTICS
from workbench.models import build
from workbench.observing.observation import observe

CONFIG = {"n_layers": 8, "d_model": 256, "n_heads": 8, "d_mlp": 704, "d_vocab": 2048, "n_ctx": 1024}
LENGTHS = (32, 128, 256, 512, 1024)
IDLE_LIMIT, READ_LIMIT, STATISTICS_LIMIT = 1.05, 1.15, 1.6  # ratios, the second and third from `FROM` on
MEMORY_LIMIT = 200  # MiB
FROM = 256  # tokens
LONG = 16_384

MEMORY_CHILD = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[2])
from observing import llama, tokens_of, LONG
from workbench.observing.observation import observe
module = llama(n_layers=2, n_heads=4, n_ctx=LONG)
observed = observe(module, tokens_of(64), quiet=True)
status = lambda key: next(int(x.split()[1]) for x in Path("/proc/self/status").open() if x.startswith(key)) / 1024
ids = tokens_of(LONG)
names = [n for n in observed.hook_dict if n.endswith(("received", "row_entropy", "row_max", "sink", "lse"))]
with torch.no_grad():
    module(ids[:, :256])
    before = status("VmRSS")
    if sys.argv[1] == "plain":
        module(ids)
    else:
        out, cache = observed.run_with_cache(ids, names_filter=names)
        assert len(cache) == len(names)
print(status("VmHWM") - before)
"""


def llama(n_layers: int = 8, n_heads: int = 8, n_ctx: int = 1024) -> nn.Module:
    """Hugging Face's own decoder at this size."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=704, num_hidden_layers=n_layers, num_attention_heads=n_heads,
        num_key_value_heads=n_heads // 2, max_position_embeddings=n_ctx, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def mixtral() -> nn.Module:
    """Hugging Face's decoder of this width with 8 experts in each layer, of which a token takes 2."""
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=352, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
        num_local_experts=8, max_position_embeddings=1024, use_cache=False,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config).eval()


def tokens_of(length: int) -> Tensor:
    return torch.randint(2048, (1, length), generator=torch.Generator().manual_seed(length))


class Table:
    """Prints each ratio beside its limit and remembers what broke one."""

    def __init__(self, slack: float, seconds: float) -> None:
        self.slack, self.seconds, self.broken = slack, seconds, list[str]()
        print(f"{'what':<28} {'module':<8} {'T':>6} {'plain ms':>9} {'ms':>9} {'ratio':>7} {'limit':>6}")

    def row(
        self, what: str, name: str, T: int, plain: Callable[[], object], mine: Callable[[], object], limit: float | None
    ) -> None:
        variants = {"plain": plain, "mine": mine}
        found = interleave(variants, seconds=self.seconds, rounds=11)["mine"]
        if limit is not None and found.ratio > limit * self.slack:  # a shared machine: measure again, longer
            found = interleave(variants, seconds=2 * self.seconds, rounds=21)["mine"]
        print(
            f"{what:<28} {name:<8} {T:>6} {found.milliseconds / found.ratio:>9.2f} {found.milliseconds:>9.2f} "
            f"{found.ratio:>7.3f} {'' if limit is None else format(limit, '.2f'):>6}",
            flush=True,
        )
        if limit is not None and found.ratio > limit * self.slack:
            self.broken.append(f"{what}, {name}, T {T}: {found.ratio:.3f}, limit {limit}")


def timings(table: Table, name: str, module: nn.Module, lengths: tuple[int, ...]) -> None:
    observed = observe(module, tokens_of(64), quiet=True)
    values = [n for n in observed.hook_dict if n.endswith("attn.hook_v")]
    statistics = [n for n in observed.hook_dict if n.endswith(STATISTICS)]
    routers = [n for n in observed.hook_dict if ".mlp.hook_" in n]
    for T in lengths:
        ids = tokens_of(T)
        with torch.no_grad():
            plain = lambda ids=ids: module(ids)  # noqa: E731
            table.row("idle", name, T, plain, lambda ids=ids: observed(ids), IDLE_LIMIT)
            read = lambda ids=ids: observed.run_with_cache(ids, names_filter=values)  # noqa: E731
            table.row("values of every layer", name, T, plain, read, READ_LIMIT if T >= FROM else None)
            stream = lambda ids=ids: observed.run_with_cache(ids, names_filter=statistics)  # noqa: E731
            table.row("all five statistics", name, T, plain, stream, STATISTICS_LIMIT if T >= FROM else None)
            if routers:
                route = lambda ids=ids: observed.run_with_cache(ids, names_filter=routers)  # noqa: E731
                table.row("routers of every layer", name, T, plain, route, READ_LIMIT if T >= FROM else None)


def memory(table: Table) -> None:
    if not Path("/proc/self/status").exists():
        return
    found = {}
    for what in ("plain", "observed"):
        command = [sys.executable, "-c", MEMORY_CHILD, what, str(Path(__file__).parent)]
        env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_ARENA_MAX": "1"}
        found[what] = float(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)
    extra = found["observed"] - found["plain"]
    print(
        f"peak MiB at T {LONG}: plain {found['plain']:.0f}, with all statistics {found['observed']:.0f} "
        f"({extra:+.0f}, limit {MEMORY_LIMIT}); one layer's pattern: {4 * LONG**2 * 4 / 2**20:.0f}"
    )
    if extra > MEMORY_LIMIT * table.slack:
        table.broken.append(f"memory at T {LONG}: {extra:.0f} MiB extra, limit {MEMORY_LIMIT}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two lengths, no long run")
    parser.add_argument("--slack", type=float, default=1.0, help="factor on the limits, for a noisy machine")
    parser.add_argument("--seconds", type=float, default=3.0, help="CPU seconds per row, at least")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(options.slack, options.seconds)
    lengths = LENGTHS[:2] if options.quick else LENGTHS
    timings(table, "twin", twin_of(build("transformer", CONFIG)), lengths)
    timings(table, "llama", llama(), lengths)
    timings(table, "mixtral", mixtral(), lengths)
    if not options.quick:
        memory(table)
    print("\n".join(["", *table.broken]) if table.broken else "\nall limits hold")
    return bool(table.broken)


if __name__ == "__main__":
    sys.exit(main())
