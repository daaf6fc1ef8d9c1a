"""What one of two processes observes of a module whose weights are spread over both; imported by these processes."""

from __future__ import annotations

import os

import torch
import transformers
from recordings import shard
from strangers import GPT, large

import workbench
from workbench import distributed
from workbench.models.decomposition import decompose

IDS = torch.randint(61, (3, 24), generator=torch.Generator().manual_seed(0))
METRICS = ["row_entropy", "value_drain", "loss"]


def measured(model):
    """Numbers of three sequences, one at a time: an odd number of runs, which two processes cannot share."""
    return workbench.measure(model, METRICS, IDS, batch=1)["value"].to_numpy()


def observe_spread(folder, rank, world):
    """FSDP2 and transformers' tensor parallel plan, one after the other: imports take longer than either."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    observe_shards(world)
    observe_tensor_parallel(folder, rank)
    os._exit(0)


def observe_shards(world):
    """FSDP2: the same bits as from a whole module, in every process."""
    module = large(GPT())
    whole = workbench.observe(module, IDS, quiet=True)
    logits, cache = whole.run_with_cache(IDS)
    parts = decompose(whole, IDS, "logits", "value_path", tokens=5).parts
    with distributed.alone():
        numbers = measured(whole)
    module.h = module.transformer.h
    observed = workbench.observe(shard(module, world), IDS, quiet=True)
    again, spread = observed.run_with_cache(IDS)
    assert torch.equal(again, logits)
    assert all(torch.equal(spread[name], tensor) for name, tensor in cache.items())
    assert torch.equal(decompose(observed, IDS, "logits", "value_path", tokens=5).parts, parts)
    assert (measured(observed) == numbers).all()


def observe_tensor_parallel(folder, rank):
    """transformers' tensor parallel plan: each process shows its heads, and both the same streams."""
    plain = transformers.LlamaForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32).eval()
    module = transformers.LlamaForCausalLM.from_pretrained(folder / "llama", tp_plan="auto", dtype=torch.float32).eval()
    whole, observed = (workbench.observe(m, IDS, quiet=True) for m in (plain, module))
    (_, cache), (_, mine) = (m.run_with_cache(IDS) for m in (whole, observed))
    heads, groups = slice(2 * rank, 2 * rank + 2), slice(rank, rank + 1)
    for name, kept in (("v", groups), ("z", heads)):
        torch.testing.assert_close(mine[f"blocks.1.attn.hook_{name}"], cache[f"blocks.1.attn.hook_{name}"][:, :, kept])
    entropies = "blocks.1.attn.hook_row_entropy"
    torch.testing.assert_close(mine[entropies], cache[entropies][:, heads])
    torch.testing.assert_close(mine["blocks.1.hook_mlp_out"], cache["blocks.1.hook_mlp_out"])
    assert "tensor parallel: heads are those of this process" in repr(observed)
    assert decompose(observed, IDS, "logits", "layer", tokens=5).error < 1e-4
