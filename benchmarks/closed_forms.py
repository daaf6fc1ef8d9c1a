"""Linear CKA and spectra of heads from second moments, against what one would write first.

    OMP_NUM_THREADS=1 python benchmarks/closed_forms.py [--slack 1.3]

One thread, float32, variants interleaved in this process, ratios of process CPU time. CKA: two layers of 2,048 tokens,
width 512, against HKH of the tokens' products. Spectra: 8 heads of width 64 over 2,048 and 8,192 tokens, against a singular
value decomposition of each head, and, without a limit, against the singular values alone.
Exits with 1 where a speed-up or an error misses its limit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from _timing import interleave
from torch import Tensor

from workbench.interventions.similarity import CrossMoments
from workbench.metrics.spectrum import head_rank

TOKENS, WIDTH = 2048, 512
HEADS, HEAD_WIDTH = 8, 64
CKA_LIMIT, SPECTRA_LIMIT = 15.0, 5.0
ERROR_LIMIT = 1e-5


class Table:
    """Prints each speed-up beside its limit and remembers what fell short."""

    def __init__(self, slack: float, seconds: float) -> None:
        self.slack, self.seconds, self.broken = slack, seconds, list[str]()
        print(f"{'what':<34} {'peer':<28} {'peer ms':>9} {'ms':>8} {'faster':>7} {'limit':>6} {'error':>8}")

    def rows(
        self, what: str, ours: Callable[[], object], peers: dict[str, Callable[[], object]], limit: float, error: float
    ) -> None:
        """The limit is for the first peer."""
        timing = interleave({"ours": ours, **peers}, seconds=self.seconds, rounds=7)
        for number, name in enumerate(peers):
            faster, bound = timing[name].ratio, f"{limit:6.1f}" if number == 0 else ""
            print(
                f"{what:<34} {name:<28} {timing[name].milliseconds:9.2f} {timing['ours'].milliseconds:8.2f} "
                f"{faster:7.1f} {bound:>6} {error:8.1e}",
                flush=True,
            )
            if number == 0 and faster * self.slack < limit:
                self.broken.append(f"{what}: {faster:.1f}x faster than {name}, limit {limit}")
        if error > ERROR_LIMIT:
            self.broken.append(f"{what}: error {error:.1e}, limit {ERROR_LIMIT:.0e}")


def cka(table: Table) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, generator=generator) + torch.randn(WIDTH, generator=generator)
    turn = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    y = x @ turn + torch.randn(TOKENS, WIDTH, generator=generator)

    def streamed() -> float:
        moments = CrossMoments()
        moments.add({0: x, 1: y})
        return moments.cka()[1, 0]

    def hkh(x: Tensor = x, y: Tensor = y) -> float:
        h = torch.eye(len(x), dtype=x.dtype) - 1 / len(x)
        k, m = h @ (x @ x.T) @ h, h @ (y @ y.T) @ h
        return float((k * m).sum() / (k.norm() * m.norm()))

    error = abs(streamed() - hkh(x.double(), y.double()))
    table.rows(f"linear CKA, {TOKENS} x {WIDTH}", streamed, {"HKH": hkh}, CKA_LIMIT, error)


def spectra(table: Table, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    v = torch.randn(1, tokens, HEADS, HEAD_WIDTH, generator=generator) @ torch.randn(HEAD_WIDTH, HEAD_WIDTH)

    def rank(values: Tensor) -> Tensor:
        q = values.square() / values.square().sum(-1, keepdim=True)
        return torch.special.entr(q).sum(-1).exp()

    def decomposed() -> Tensor:
        return rank(torch.linalg.svd(v.transpose(1, 2), full_matrices=False).S)

    def alone() -> Tensor:
        return rank(torch.linalg.svdvals(v.transpose(1, 2)))

    exact = rank(torch.linalg.svdvals(v.transpose(1, 2).double()))
    error = float(((head_rank(v) - exact) / exact).abs().max())
    peers: dict[str, Callable[[], object]] = {"SVD of each head": decomposed, "singular values alone": alone}
    table.rows(f"spectra, {HEADS} heads, {tokens} x {HEAD_WIDTH}", lambda: head_rank(v), peers, SPECTRA_LIMIT, error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slack", type=float, default=1.0, help="factor by which a speed-up may fall short")
    parser.add_argument("--seconds", type=float, default=3.0, help="CPU seconds per row, at least")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(options.slack, options.seconds)
    with torch.no_grad():
        cka(table)
        spectra(table, 2048)
        spectra(table, 8192)
    print("\n" + ("\n".join(table.broken) or "all limits hold"))
    return bool(table.broken)


if __name__ == "__main__":
    sys.exit(main())
