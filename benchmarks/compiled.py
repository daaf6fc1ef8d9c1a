"""What `torch.compile` saves, of forward passes and of training steps, and that hooks which come later are heard.

    OMP_NUM_THREADS=1 python benchmarks/compiled.py [--quick] [--slack 1.3]

The compiled model against the same model uncompiled, as in `instrumentation.py` but for the size; float32, one thread,
interleaved in this process. Compilation takes 20 to 60 seconds an architecture. Exits with 1 where a limit is broken,
with 0 and a reason where there is no C++ compiler.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from functools import partial

import torch
from instrumentation import Table, tokens_of, train
from torch._dynamo.utils import counters

from workbench.models import build

ARCHITECTURES = ("transformer", "resformer", "denseformer", "cross_layer")
CONFIG = {"n_layers": 4, "d_model": 128, "n_heads": 4, "d_mlp": 352, "d_vocab": 2048, "n_ctx": 1024}
LENGTH, LIMIT = 64, 0.9


def measure(table: Table, architecture: str) -> None:
    model, ids = build(architecture, CONFIG), tokens_of(LENGTH)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        start = time.perf_counter()
        torch.testing.assert_close(compiled(ids), model(ids), atol=1e-4, rtol=1e-4)
        print(f"{architecture}: compiled in {time.perf_counter() - start:.0f} s")
        variants = {"eager": partial(model, ids), "compiled": partial(compiled, ids)}
        table.row("forward, compiled", architecture, LENGTH, LIMIT, variants)
        check_hooks(model, compiled, ids)
    if breaks := sum(counters["graph_break"].values()):
        table.broken.append(f"{architecture}: {breaks} graph breaks")
    variants = {"eager": partial(train, model, ids), "compiled": partial(train, compiled, ids)}
    table.row("forward + backward, compiled", architecture, LENGTH, LIMIT, variants)


def check_hooks(model: torch.nn.Module, compiled: torch.nn.Module, ids: torch.Tensor) -> None:
    """Values erased by a hook added after compilation change the compiled model's logits as they change the model's."""
    plain = compiled(ids)
    with model.hooks([("blocks.1.attn.hook_v", lambda v, hook: torch.zeros_like(v))]):
        erased = compiled(ids)
        torch.testing.assert_close(erased, model(ids))
    assert (erased - plain).abs().max() > 1e-3, "the compiled model took no notice of a hook"
    compiled(ids)  # the first pass without hooks looks whether any is left
    torch.testing.assert_close(compiled(ids), plain, atol=0, rtol=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one architecture")
    parser.add_argument("--slack", type=float, default=1.0, help="factor on the limits, for a noisy machine")
    parser.add_argument("--seconds", type=float, default=3.0, help="CPU seconds per row, at least")
    options = parser.parse_args()
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        print("no C++ compiler: nothing measured")
        return 0
    torch.set_num_threads(1)
    table = Table(options.slack, options.seconds)
    for architecture in ARCHITECTURES[:1] if options.quick else ARCHITECTURES:
        torch._dynamo.reset()
        counters.clear()
        measure(table, architecture)
    print("\n".join(["", *table.broken]) if table.broken else "\nall limits hold")
    return bool(table.broken)


if __name__ == "__main__":
    sys.exit(main())
