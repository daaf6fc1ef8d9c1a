"""What does SVFormer's half cache cost, and is sharing values the cheapest way to it?

Claims (Zhou et al. 2024): the cache is (L + 1) / (2 L) of the decoder's for a small penalty; SVFormer leads at first and is
overtaken later, the later the longer the sequences; at length it beats grouped heads; sharing values hurts less than sharing
keys or queries. Refuted where other ways to the same cache end lower, or where it never leads.

A tiny model flatters SVFormer: a reviewer of the first version notes that it wins at 2M parameters only. The claims at 64,000
tokens cannot be checked small.
"""

import pandas as pd

from analyses.common import answer, final_losses
from workbench.claims import Evidence

CLAIMS = (
    "half_the_cache_for_a_small_penalty", "fast_at_first_then_overtaken", "better_than_grouped_heads_at_length",
    "sharing_values_hurts_least",
)  # fmt: skip
QUICK = ("transformer", "svformer", "gqa", "cla", "share_q", "share_k", "share_v")


def ours(evidence: Evidence) -> pd.DataFrame:
    """Bytes of cache per token and final losses, domains averaged."""
    text = evidence.on("text")
    losses = final_losses(text).groupby("model", as_index=False)[["mean", "min", "max"]].mean()
    cache = text.rows("cache_bytes").groupby("architecture")["value"].mean().rename("cache bytes per token")
    return losses.merge(cache, left_on="model", right_index=True, how="left").sort_values("mean").assign(unit="nats")


def main() -> None:
    """Cache, penalty, crossing and controls."""
    answer("svformer", __doc__ or "", CLAIMS, ours, quick=QUICK)


if __name__ == "__main__":
    main()
