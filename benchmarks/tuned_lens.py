"""Cost of a tuned lens against plain forward passes on the same documents.

    OMP_NUM_THREADS=1 python benchmarks/tuned_lens.py

float32, 12 layers, width 512, 4 documents of 256 tokens, one thread, interleaved in one process. The fit streams the moments of 13
streams in float64 and solves 13 systems of 512 equations once; the second line is the moments alone, the cost for each further document.
"""

from __future__ import annotations

import torch
from _timing import interleave

from workbench.models import build
from workbench.prompts import fit_tuned_lens, logit_lens
from workbench.prompts.prompt import streams
from workbench.prompts.tuned_lens import _Moments

SHAPE = {"n_layers": 12, "d_model": 512, "n_heads": 8, "d_mlp": 1408, "d_vocab": 8192, "n_ctx": 256}


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    model = build("resformer", SHAPE, seed=0).eval()
    ids = torch.randint(SHAPE["d_vocab"], (5, SHAPE["n_ctx"]), generator=torch.Generator().manual_seed(0))
    lens = fit_tuned_lens(model, ids)

    def moments() -> None:
        _, cache = model.run_with_cache(ids[:4], names_filter=list(streams(model).values()))
        rows = {n: cache[name].flatten(0, 1) for n, name in streams(model).items()}
        _Moments(SHAPE["n_layers"], SHAPE["d_model"], ids.device).add(rows)

    timings = interleave(
        {
            "plain forward, 4 documents": lambda: model(ids[:4]),
            "moments of 4 documents": moments,
            "fit on 4, measured on 1": lambda: fit_tuned_lens(model, ids),
            "logit lens of 1 document": lambda: logit_lens(model, ids[0]),
            "tuned lens of 1 document": lambda: logit_lens(model, ids[0], tuned=lens),
        },
        rounds=2,
    )
    for name, timing in timings.items():
        print(f"{name:28} {timing.milliseconds:8.1f} ms {timing.ratio:6.2f} forward passes")


if __name__ == "__main__":
    main()
