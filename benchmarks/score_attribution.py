"""Cost of a score's attribution on a prompt, against the model's plain forward pass.

    OMP_NUM_THREADS=1 python benchmarks/score_attribution.py [--most 2.0]

float32, 12 layers, width 768, 12 heads, 256 tokens, one thread, interleaved in one process. The selected head is in the last layer.
By layer and by head an attribution may cost two forward passes. By value path it adds each earlier layer's attention once more for each
path, and the sink of a layer the products of all parts at every position. "minus others" subtracts the mean score of the other keys,
whose parts are needed at every position. The path of a token is an attribution and the parts of a logit by value path, of one key and
of all. The observed model is GPT-2 of that size in transformers, observed on 2 x 32 tokens.
"""

from __future__ import annotations

import argparse
import sys

import torch
from _timing import interleave
from transformers import GPT2Config, GPT2LMHeadModel

import workbench
from workbench.models import build
from workbench.prompts import score_attribution, sink_attribution, token_path

SHAPE = {"n_layers": 12, "d_model": 768, "n_heads": 12, "d_mlp": 2048, "d_vocab": 8192, "n_ctx": 256}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--most", type=float, default=2.0, help="largest cost by layer, and by head of one score, in passes"
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build("resformer", SHAPE, seed=0).eval()
    ids = torch.randint(SHAPE["d_vocab"], (1, SHAPE["n_ctx"]), generator=torch.Generator().manual_seed(0))
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=8192, n_positions=256)).eval()
    observed = workbench.observe(gpt2, ids.reshape(8, 32)[:2], quiet=True)
    observed.anatomy()
    with torch.no_grad():
        timings = interleave(
            {
                "plain forward": lambda: model(ids),
                "by layer": lambda: score_attribution(model, ids, 11, 3, -1, 0),
                "by head": lambda: score_attribution(model, ids, 11, 3, -1, 0, by="head"),
                "by value path": lambda: score_attribution(model, ids, 11, 3, -1, 0, by="value_path"),
                "by layer, minus others": lambda: score_attribution(model, ids, 11, 3, -1, 0, against="others"),
                "by head, minus others": lambda: score_attribution(
                    model, ids, 11, 3, -1, 0, against="others", by="head"
                ),
                "path of a token": lambda: token_path(model, ids, 11, 3, -1, 0, 5),
                "sink of a layer, all heads": lambda: sink_attribution(model, ids, 11),
            },
            rounds=options.rounds,
        )
        foreign = interleave(
            {
                "observed GPT-2, plain forward": lambda: observed(ids),
                "observed GPT-2, by layer": lambda: score_attribution(observed, ids, 11, 3, -1, 0),
                "observed GPT-2, by head": lambda: score_attribution(observed, ids, 11, 3, -1, 0, by="head"),
                "observed GPT-2, by layer, minus others": lambda: score_attribution(
                    observed, ids, 11, 3, -1, 0, against="others"
                ),
                "observed GPT-2, by head, minus others": lambda: score_attribution(
                    observed, ids, 11, 3, -1, 0, against="others", by="head"
                ),
                "observed GPT-2, path of a token": lambda: token_path(observed, ids, 11, 3, -1, 0, 5),
            },
            rounds=options.rounds,
        )
    for name, timing in (*timings.items(), *foreign.items()):
        print(f"{name:40} {timing.milliseconds:8.1f} ms {timing.ratio:6.2f} forward passes")
    limited = [t.ratio for name, t in (*timings.items(), *foreign.items()) if "by layer" in name or "by head" in name]
    return int(max(limited) > options.most)


if __name__ == "__main__":
    sys.exit(main())
