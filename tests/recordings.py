"""Reading what a recorder wrote, and processes that record."""

from __future__ import annotations

import os

import torch
from own_loop import GPT, PLAIN, loop, loss_of, tokens

from workbench import Recorder
from workbench.runs.run import Run


def rows(folder, metric, **axes):
    """Values of a metric by (part or site, layer), or of one place."""
    frame = Run.open(folder).telemetry()
    frame = frame[frame["metric"] == metric]
    for name, value in axes.items():
        frame = frame[frame[name] == value]
    return frame


def value(folder, metric, **axes):
    return rows(folder, metric, **axes)["value"].item()


def by_place(frame):
    """Means over positions by everything that tells two rows of a step apart."""
    axes = ["metric", "site", "layer", "head", "unit", "n", "T"]
    named = frame[frame["T"].notna()].assign(**{axis: frame[axis].astype("str").fillna("") for axis in axes})
    return named.groupby(axes)["value"].mean().to_dict()


def record_for_ever(folder):
    """What a process does that is killed."""
    model = GPT()
    loop(model, Recorder(model, 1, folder / "r", quantities=PLAIN), 1_000_000)


def recorded_steps(model, recorder, rank=0, world=1):
    """Three steps on every `world`-th sequence of a batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = loss_of(model, tokens(step, batch=4)[rank::world])
        optimizer.zero_grad()
        loss.backward()
        recorder.step(loss)
        optimizer.step()
    recorder.close()


def shard(model, world):
    """FSDP2 over each block and the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    for part in (*model.h, model):
        fully_shard(part, mesh=mesh)
    return model


def record_in_parallel(folder, rank, world, sharded=False):
    """One process of a data-parallel loop, whose parameters each process has whole or in part."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = shard(GPT(), world) if sharded else torch.nn.parallel.DistributedDataParallel(GPT())
    recorded_steps(model, Recorder(model, 2, folder / "r", quantities=PLAIN), rank, world)
    # freeing the model joins gloo's thread with the interpreter's lock held, which that thread may be waiting for
    os._exit(0)
