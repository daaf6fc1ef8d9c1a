"""What the key-value cache holds and what it saves: bytes of every architecture, speed and memory of decoding.

    OMP_NUM_THREADS=1 python benchmarks/generation.py [--quick] [--least 4]

8 layers, d 256, 8 heads, vocabulary 2048, float32, one sequence, one thread. Bytes per token are counted in 16 bits from
the tensors held and, as traffic, from those that decoding one token reads. Speed: 32 greedy tokens after a prompt of
480, prompt included, variants interleaved in this process; the peer is a transformers Llama of the same shape. Peak memory
of the same in a fresh process each. Exits with 1 where a byte differs from its formula or the cache speeds decoding up
less than `--least` times.
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
from instrumentation import AT_ONCE
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.measurement.measuring import measure
from workbench.models import ARCHITECTURES, build

CONFIG = {"n_layers": 8, "d_model": 256, "n_heads": 8, "d_mlp": 704, "d_vocab": 2048, "n_ctx": 512}
PROMPT, NEW = 480, 32
SHARES = {  # of the vanilla decoder's bytes, by formula: SVFormer (L + 1) / 2 L, CLA ceil(L / 2) / L, one head of eight, ...
    "svformer": 9 / 16, "gqa": 1 / 2, "mqa": 1 / 8, "cla": 1 / 2, "share_k": 3 / 4, "share_v": 3 / 4,
    "svformer+gqa": 9 / 64, "svformer+cla": 5 / 16,
}  # fmt: skip
TIMED = ("transformer", "svformer", "cla", "gqa")
MEMORY_CHILD = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[3])
from generation import CONFIG, continued, prompt_of
from workbench.models import build
model, ids = build(sys.argv[1], CONFIG), prompt_of()
status = lambda key: next(int(x.split()[1]) for x in Path("/proc/self/status").open() if x.startswith(key)) / 1024
model.generate(ids[:, :8], 2, temperature=0)
before = status("VmRSS")
continued(model, sys.argv[2] == "cached")()
print(status("VmHWM") - before)
"""


def prompt_of() -> Tensor:
    return torch.randint(CONFIG["d_vocab"], (1, PROMPT), generator=torch.Generator().manual_seed(0))


def continued(model: torch.nn.Module, use_cache: bool) -> Callable[[], Tensor]:
    ids = prompt_of()
    return lambda: model.generate(ids, NEW, temperature=0, use_cache=use_cache)


def llama() -> Callable[[], Tensor]:
    """transformers, with its own cache."""
    c = CONFIG
    config = LlamaConfig(
        vocab_size=c["d_vocab"], hidden_size=c["d_model"], num_hidden_layers=c["n_layers"], intermediate_size=c["d_mlp"],
        num_attention_heads=c["n_heads"], max_position_embeddings=c["n_ctx"], bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip
    model, ids = LlamaForCausalLM(config).eval(), prompt_of()
    settings = {"do_sample": False, "max_new_tokens": NEW, "attention_mask": torch.ones_like(ids)}
    return lambda: model.generate(ids, **settings)


def bytes_held() -> list[str]:
    """Print capacity and traffic per token; what differs from its formula."""
    print(f"{'architecture':<26} {'B/token':>8} {'of vanilla':>10} {'formula':>8} {'read':>8} {'of vanilla':>10}")
    broken, vanilla = [], 2.0 * 2 * CONFIG["n_layers"] * CONFIG["d_model"]
    for name in (a for a in ARCHITECTURES if a != "first_layer_shuffled"):  # it has no key-value cache
        frame = measure(build(name, CONFIG), ["cache_bytes", "cache_traffic"], prompt_of()[:, :16])
        held, formula, read, _ = frame["value"]
        share = SHARES.get(name, 1.0)
        print(f"{name:<26} {held:>8.0f} {held / vanilla:>10.4f} {share:>8.4f} {read:>8.0f} {read / vanilla:>10.4f}")
        if not held == formula == share * vanilla:
            broken.append(
                f"{name}: {held:.0f} bytes held, {formula:.0f} by the weights, {share * vanilla:.0f} by formula"
            )
    return broken


def speed(name: str, least: float) -> list[str]:
    """Print tokens per second of `NEW` tokens after the prompt, without and with the cache."""
    model = build(name, CONFIG)
    variants = {"uncached": continued(model, False), "cached": continued(model, True), "llama": llama()}
    assert torch.equal(variants["uncached"](), variants["cached"]()), "the cache must not change what is generated"
    timing = interleave(variants, seconds=0, rounds=3)
    per_second = {key: 1e3 * NEW / value.milliseconds for key, value in timing.items()}
    ratio, peaks = 1 / timing["cached"].ratio, [peak(name, how) for how in ("uncached", "cached")]
    print(
        f"{name:<20} {per_second['uncached']:>8.1f} {per_second['cached']:>8.1f} {ratio:>6.1f} {per_second['llama']:>8.1f}"
        f" {peaks[0]:>8.1f} {peaks[1]:>8.1f}",
        flush=True,
    )
    return [] if ratio >= least else [f"{name}: the cache makes decoding {ratio:.1f} times as fast, not {least}"]


def peak(name: str, how: str) -> float:
    """MiB above what the process held before; NaN where the system does not say."""
    if not Path("/proc/self/status").exists():
        return float("nan")
    command = [sys.executable, "-c", MEMORY_CHILD, name, how, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | AT_ONCE)
    return float(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two architectures timed")
    parser.add_argument("--least", type=float, default=4.0, help="speed of cached over uncached decoding, at least")
    options = parser.parse_args()
    torch.set_num_threads(1)
    broken = bytes_held()
    print(f"\n{'tokens/s':<20} {'uncached':>8} {'cached':>8} {'ratio':>6} {'llama':>8} {'MiB unc.':>8} {'MiB c.':>8}")
    for name in TIMED[:2] if options.quick else TIMED:
        broken += speed(name, options.least)
    print("\n".join(["", *broken]) if broken else "\nall bytes are their formulas', all ratios hold")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
