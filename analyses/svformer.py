"""Does SVFormer's half cache raise the loss, and is sharing values the cheapest way to it?

Claims (Zhou et al. 2024): the cache is (L + 1) / (2 L) of the decoder's for a small penalty; SVFormer leads at first and is
overtaken later, the later the longer the sequences; at length it beats grouped heads; sharing values hurts less than sharing
keys or queries. Refuted where other ways to the same cache end lower, or where it never leads.

A tiny model flatters SVFormer: a reviewer of the first version notes that it wins at 2M parameters only. The claims at 64,000
tokens cannot be checked small.
"""

from .common import Script
from .tables import losses_and_cache

SCRIPT = Script(
    file=__file__,
    question=__doc__,
    questions=("sharing",),
    table=losses_and_cache,
    quick=("transformer", "svformer", "gqa", "cla", "share_q", "share_k", "share_v"),
)

if __name__ == "__main__":
    SCRIPT.main()
