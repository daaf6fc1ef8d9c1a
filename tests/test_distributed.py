"""Several processes of one launch measure what one measures, and refuse what one refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from workbench import distributed
from workbench.config import ModelConfig, TrainConfig
from workbench.data.data_sources import RepeatedData
from workbench.errors import WorkbenchError
from workbench.measurement import forward_pass
from workbench.measurement.measuring import measure
from workbench.metrics import METRICS as ALL
from workbench.training.loop import train

MODEL = ModelConfig(n_layers=2, d_model=16, n_heads=2, d_mlp=24, d_vocab=64, n_ctx=64)
RECIPE = TrainConfig(steps=4, batch=4, T=16, warmup=2, lr=1e-2, validate_every=4, save_every=4, validation_sequences=4)
# every form and error bar: per sequence, per head, accumulated with a jackknife, of weights, of gradients, an experiment
METRICS = [
    "loss", "importance_entropy", "sink_mass", "token_identity_share", "gradient_norm", "cache_bytes", "value_ablation",
]  # fmt: skip
CHILD = """
import json, sys
import torch
torch.set_num_threads(1)
import workbench
from workbench import distributed
path, metrics, out = json.loads(sys.argv[1])
frames = [workbench.measure(path, metrics, n=7, T=16, batch=2, device="cpu") for _ in range(2)]
frames[0].to_parquet(f"{out}/{distributed.rank()}.parquet")
assert frames[0].equals(frames[1]), "the second time from what is kept"
try:
    distributed.scatter({"whole": lambda: 1, "broken": lambda: workbench.build("transformer", "tinny")})
except workbench.WorkbenchError as error:
    print(distributed.rank(), error, flush=True)
"""

TWO = str(Path(__file__).with_name("two.py"))
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


@pytest.mark.slow
def test_two_processes_measure_what_one_measures(tmp_path):
    """Seven documents in batches of two: four batches, so the second process ends with a whole one, the first with a half."""
    made = {
        where: train(
            "resformer", RepeatedData(), name="run", runs=tmp_path / where, model=MODEL, train=RECIPE, device="cpu"
        )
        for where in ("one", "two")
    }  # fmt: skip
    (tmp_path / "child.py").write_text(CHILD)
    arguments = json.dumps([str(made["two"].path), METRICS, str(tmp_path)])
    done = subprocess.run(
        [sys.executable, TWO, tmp_path / "child.py", arguments],
        capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    alone = measure(made["one"], METRICS, n=7, T=16, batch=2, device="cpu")
    first, second = (pd.read_parquet(tmp_path / f"{rank}.parquet") for rank in (0, 1))
    pd.testing.assert_frame_equal(first, second)
    assert done.stdout.count("unknown preset 'tinny'") == 2, done.stderr
    plain = [column for column in alone if column not in ("value", "se")]
    pd.testing.assert_frame_equal(first[plain], alone[plain], check_dtype=False, check_frame_type=False)
    for column in ("value", "se"):
        assert first[column].to_numpy() == pytest.approx(alone[column].to_numpy(), rel=1e-6, abs=1e-9, nan_ok=True)
    kept = [sorted(p.name for p in (made[where].path / "records").glob("*.parquet")) for where in ("one", "two")]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("name", ["effective_rank", "value_norm"])
def test_what_two_processes_found_is_what_one_would_have(name, monkeypatch):
    """Sums are merged fold by fold, and numbers of single documents stand in the documents' order, batch by batch in turn."""
    vectors = torch.randn(4, 6, 2, 3, generator=torch.Generator().manual_seed(0))
    sample = SimpleNamespace(ids=torch.zeros(4, 6, dtype=torch.long), documents=range(4))

    def fed(*batches):
        (first, *_) = forward_pass.reductions_of(ALL[name], sample.ids, ["v"])
        for batch in batches:
            first.feed(1, {"v": vectors[batch : batch + 1]}, range(batch, batch + 1))
        return first

    whole, mine, other = fed(0, 1, 2, 3), fed(0, 2), fed(1, 3)
    others = iter([[other.parts], [(other.rows_read, other.windows)]])
    monkeypatch.setattr(distributed, "all_gather", lambda own: [own, next(others)])
    forward_pass.exchange([mine])
    found, alone = (pd.DataFrame(forward_pass.record_rows(of, sample, 2)) for of in (mine, whole))
    pd.testing.assert_frame_equal(found, alone)
    if name == "value_norm":
        assert torch.cat(mine.parts[1]).equal(torch.cat(whole.parts[1]))


def test_alone_nothing_is_shared():
    assert distributed.world_size() == 1
    assert distributed.join("cpu") == "cpu"
    assert list(distributed.shard(range(5))) == [0, 1, 2, 3, 4]
    assert distributed.all_gather("x") == ["x"]
    assert distributed.scatter({"a": lambda: 1, "b": lambda: 2}) == {"a": 1, "b": 2}
    with pytest.raises(WorkbenchError, match="first"):
        distributed.scatter({"a": lambda: (_ for _ in ()).throw(WorkbenchError("first"))})
