"""Cost of maps, groups of heads and differences of weights, against the model's plain forward pass on the same tokens.

    OMP_NUM_THREADS=1 python benchmarks/maps.py [--most 1.3]

float32, 6 layers, width 256, 16 documents of 256 tokens, one thread, interleaved in one process. Reading a matrix may cost `--most` forward
passes. A map adds neighbours and silhouettes of 1,000 points, which do not depend on the model's depth. Features of heads need two
passes, and are measured on other tokens each time because records are reused. Depth weights are read out of a DenseFormer's file.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile

import torch
from _timing import interleave
from safetensors.torch import save_file

from workbench.checkpoints.coefficients import read_coefficients
from workbench.models import build
from workbench.reports.diff_of_checkpoints import weight_changes
from workbench.sklearn import as_matrices, as_matrix, head_features, token_map

SHAPE = {"n_layers": 6, "d_model": 256, "n_heads": 8, "d_mlp": 704, "d_vocab": 1024, "n_ctx": 256}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=float, default=1.3, help="largest cost of a matrix, in forward passes")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, other = (build("resformer", SHAPE, seed=seed).eval() for seed in (0, 1))
    ids = torch.randint(200, (16, SHAPE["n_ctx"]), generator=torch.Generator().manual_seed(0))
    shift = itertools.count()
    a, b = (dict(m.named_parameters()) for m in (model, other))
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        save_file(build("denseformer", SHAPE, seed=0).state_dict(), f"{folder}/model.safetensors")
        timings = interleave(
            {
                "plain forward": lambda: [model(part) for part in ids.split(8)],
                "matrix of one layer": lambda: as_matrix(model, "v", ids, layer=5),
                "matrices of all layers": lambda: as_matrices(model, "v", ids),
                "map, PCA": lambda: token_map(model, "v", ids, layer=5),
                "map, LDA": lambda: token_map(model, "v", ids, layer=5, method="lda"),
                "features of all heads": lambda: head_features(model, ids + next(shift)),
                "differences of weights": lambda: weight_changes(a, b),
                "depth weights of a checkpoint": lambda: read_coefficients(folder),
            },
            rounds=options.rounds,
        )
    for name, timing in timings.items():
        print(f"{name:30} {timing.milliseconds:8.1f} ms {timing.ratio:6.2f} forward passes")
    return int(timings["matrix of one layer"].ratio > options.most)


if __name__ == "__main__":
    sys.exit(main())
