"""Mean pairwise cosine of T token vectors: the published T x T matrix against the metric's closed form.

    OMP_NUM_THREADS=1 python benchmarks/token_similarity.py [--slack 1.3]

float32, T 2048 and 8192, width 512, one thread, interleaved in one process. At T 2048 the closed form must be
100 times faster and equal to float64 within 1e-7.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import torch
import torch.nn.functional as F
from _timing import interleave
from torch import Tensor

from workbench.metrics.residual import token_similarity

WIDTH = 512
LENGTHS = 2048, 8192
SPEEDUP_LIMIT, ERROR_LIMIT = 100.0, 1e-7


def naive(x: Tensor) -> Tensor:
    """As published: every pair of tokens, the diagonal left out."""
    unit = F.normalize(x, dim=-1)
    cosine = unit @ unit.T
    others = ~torch.eye(len(x), dtype=torch.bool)
    return cosine[others].mean()


def closed_form(x: Tensor) -> Tensor:
    return token_similarity(x[None])[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--slack", type=float, default=1.0, help="factor by which the speed-up may fall short, for a noisy machine"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)

    failures = []
    for length in LENGTHS:
        generator = torch.Generator().manual_seed(length)
        # a common direction, so that the similarity is that of a hidden stream (about 0.2) rather than 0
        x = torch.randn(length, WIDTH, generator=generator) + 0.5 * torch.randn(WIDTH, generator=generator)
        timing = interleave({"closed": partial(closed_form, x), "naive": partial(naive, x)}, rounds=5)
        true = (naive if length == LENGTHS[0] else closed_form)(x.double()).item()  # the float64 matrix takes 0.5 GiB
        error, naive_error = abs(closed_form(x).item() - true), abs(naive(x).item() - true)
        speedup = timing["naive"].ratio
        print(
            f"T {length:5d}: naive {timing['naive'].milliseconds:8.2f} ms, "
            f"closed form {timing['closed'].milliseconds:6.3f} ms, "
            f"{speedup:.0f}x faster; similarity {true:.4f}, error {error:.1e} (naive {naive_error:.1e})"
        )
        if error > ERROR_LIMIT:
            failures.append(f"T {length}: error {error:.1e}, limit {ERROR_LIMIT:.0e}")
        if length == LENGTHS[0] and speedup * options.slack < SPEEDUP_LIMIT:
            failures.append(f"T {length}: {speedup:.0f}x, limit {SPEEDUP_LIMIT:.0f}x")
    print("\n".join(failures) or "all limits hold")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
