"""Memory of each of eight devices that hold and observe a Llama of 70 billion weights, from its shapes; docs/decisions/017 quotes it.

    OMP_NUM_THREADS=1 python benchmarks/seventy.py

Weights: the module itself on the meta device, split as FSDP2 does (each block a unit) and as transformers' `tp_plan` says. Activations:
decoders of one and two such blocks with a small vocabulary run here in bfloat16. They run bare, observed, and with all statistics or
all values. Their storages are counted as `workbench estimate` counts them, and each further block is taken to add what the second adds.
Wants 6 GiB. Nothing here runs on eight devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from workbench import observe
from workbench.hook_names import STATISTICS
from workbench.models.tensor_memory import LiveBytes

DEVICES, T, LAYERS, VOCABULARY, SMALL, BYTES = 8, 512, 80, 128_256, 1024, 2
EXAMPLE = 64  # tokens that a module is observed on


def llama(layers: int, vocabulary: int) -> nn.Module:
    """Llama 3 70B's sizes in bfloat16, of so many blocks."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=layers, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def split(module: nn.Module) -> dict[str, int]:
    """Bytes of weights a device holds under either, and what FSDP2 gathers of the whole beside them."""
    sizes = {name: p.numel() * BYTES for name, p in module.named_parameters()}
    plan: dict[str, str] = module.tp_plan  # type: ignore[assignment]
    whole = ("replicated", "gather", "none")

    def held(name: str) -> int:
        how = next((h for pattern, h in plan.items() if fnmatchcase(name, f"*{pattern}.weight")), "none")
        return sizes[name] if how.startswith(whole) else math.ceil(sizes[name] / DEVICES)

    block = sum(n for name, n in sizes.items() if ".layers.0." in name)
    ends = sum(n for name, n in sizes.items() if ".layers." not in name)
    return {
        "all": sum(sizes.values()), "fsdp2": math.ceil(sum(sizes.values()) / DEVICES),
        "gathered": ends + 2 * block,  # the root unit stays, the next block is fetched while one runs
        "tensor parallel": sum(map(held, sizes)),
    }  # fmt: skip


def peaks(layers: int) -> dict[str, int]:
    """Bytes beside the weights at the peak of a bare pass, of observing, of a run with all statistics and with all values."""
    module = llama(layers, SMALL)
    ids = torch.randint(SMALL, (1, T), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = {"bare": counted(module, lambda: module(ids))}
        kept: list[Any] = []
        found["observe"] = counted(module, lambda: kept.append(observe(module, ids[:, :EXAMPLE], quiet=True)))
        observed = kept[0]
        for what, ends in (("statistics", STATISTICS), ("values", ("attn.hook_v",))):
            names = [name for name in observed.hook_dict if name.endswith(ends)]
            found[what] = counted(module, lambda names=names: observed.run_with_cache(ids, names_filter=names))
    return found


def counted(module: nn.Module, run: Callable[[], object]) -> int:
    held: list[Tensor] = list(module.parameters())
    with LiveBytes(held) as live:
        start = live.now
        run()
    return live.peak - start


def main() -> None:
    torch.set_num_threads(1)
    with torch.device("meta"):
        weights = split(llama(LAYERS, VOCABULARY))
    gib = {name: size / 2**30 for name, size in weights.items()}
    print(f"{gib['all']:.1f} GiB of weights; GiB for each of {DEVICES} devices:")
    print(f"  FSDP2            {gib['fsdp2']:6.2f}, gathered beside them at most {gib['gathered']:.2f}")
    print(f"  tensor parallel  {gib['tensor parallel']:6.2f}")
    one, two = peaks(1), peaks(2)
    logits = T * (VOCABULARY - SMALL) * BYTES
    print(
        f"MiB beside weights, one document of {T} tokens: one block, each further, all {LAYERS} and {VOCABULARY:,} logits"
    )
    for what in one:
        each = two[what] - one[what]
        whole = one[what] + (LAYERS - 1) * each + (logits if what != "observe" else logits * EXAMPLE // T)
        print(f"  {what:<11} {one[what] / 2**20:8.1f} {each / 2**20:8.2f} {whole / 2**20:9.1f}")


if __name__ == "__main__":
    main()
