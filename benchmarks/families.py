"""Every decoder family of transformers that can be built small, observed and held against what the module itself gives.

    OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 nice -n 19 python benchmarks/families.py [--only NAME ...] [--seconds 120]

The list is made by code: all causal language models that the installed transformers maps, eager and fused attention each, at
width 64 and random weights. Every number is compared with another source:

- logits: a plain run, bit for bit
- entropy, first column and column sums of each row, and the pattern times our values: `output_attentions` of the eager module
- streams: hooks on its blocks, and `output_hidden_states`
- own values: hooks on its value projections, where they are named so
- z: hooks on its output projections
- weights of experts: hooks on its experts
- parts of its logits: their sum

A number is wrong where it is off by more than 1e-4. Writes `benchmarks/families.csv`, one row per family and kind of attention;
exits with 1 where a number is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from family_configs import ATTENTION, LENGTH, VOCABULARY, TooSlow, built, families, runnable
from torch import Tensor, nn

from workbench.errors import WorkbenchError
from workbench.models.decomposition import decompose
from workbench.observing.observation import observe
from workbench.observing.observed_model import Observed
from workbench.observing.recognition.routers import Router

TABLE = Path(__file__).with_suffix(".csv")
LIMIT = 1e-4  # relative to the largest entry, at least 1
OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense", "wo", "output_proj", "o")
STATISTICS = ("row_entropy", "sink", "received", "null")


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise `TooSlow` after so many CPU seconds of this process, which other work on the machine does not change."""

    def stop(*_: Any) -> None:
        raise TooSlow(f"more than {seconds} CPU s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def off(found: Tensor, truth: Tensor) -> float:
    """Largest difference over the largest entry of the truth, which counts as 1 at least; inf where shapes differ."""
    if found.shape != truth.shape:
        return float("inf")
    size = float(truth.double().abs().max().clamp_min(1.0))
    return float((found.double() - truth.double()).abs().max()) / size


def tensor_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else next(x for x in output if isinstance(x, Tensor))


def attentions_of(module: nn.Module, ids: Tensor) -> list[Tensor]:
    """The module's own patterns [batch, head, query, key], those of layers that return none left out."""
    given = getattr(module(ids, output_attentions=True), "attentions", None) or ()
    return [p.double() for p in given if isinstance(p, Tensor) and p.ndim == 4 and p.shape[-2:] == (LENGTH, LENGTH)]


def hooked(module: nn.Module, ids: Tensor, names: list[str]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Inputs and outputs of the named modules in a plain run, where they run once, and (experts, weights) among the inputs."""
    inputs: dict[str, list[Any]] = {}
    outputs: dict[str, list[Any]] = {}
    taken: dict[str, list[Any]] = {}

    def keep(part: Any, args: Any, options: Any, output: Any, name: str) -> None:
        tensors = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
        for experts in (x for x in tensors if x.dtype in (torch.int64, torch.int32)):
            weights = (x for x in tensors if x.is_floating_point() and x.shape == experts.shape)
            taken.setdefault(name, []).extend((experts.clone(), x.clone()) for x in weights)
        with contextlib.suppress(StopIteration):  # a module that passes no tensor
            outputs.setdefault(name, []).append(tensor_of(output).clone())
            inputs.setdefault(name, []).append(tensor_of(args).clone())

    handles = [
        module.get_submodule(n).register_forward_hook(lambda m, a, k, o, n=n: keep(m, a, k, o, n), with_kwargs=True)
        for n in names
    ]
    module(ids)
    for handle in handles:
        handle.remove()
    once = lambda kept: {name: tensors[0] for name, tensors in kept.items() if len(tensors) == 1}  # noqa: E731
    return once(inputs), once(outputs), once(taken)


def compared(observed: Observed, module: nn.Module, eager: nn.Module, ids: Tensor) -> dict[str, float]:
    """Largest differences from the truth by what is compared; what cannot be compared is not in it."""
    wanted = [n for n in observed.hook_dict if not n.endswith(("attn_scores", "hook_pattern", "hook_v_mix"))]
    plain = tensor_of(tuple(module(ids).values()))
    logits, cache = observed.run_with_cache(ids, names_filter=wanted)
    worst: dict[str, float] = {"logits": 0.0 if torch.equal(plain, logits) else off(logits, plain) or 1e-30}

    def note(what: str, value: float) -> None:
        worst[what] = max(worst.get(what, 0.0), value)

    layers = [(i, layer) for i, layer in enumerate(observed.structure.layers) if layer.is_read]
    patterns = attentions_of(eager, ids)
    if len(patterns) == len(layers):
        each = [  # where a block calls several attentions, transformers gives the pattern that they share
            (f"blocks.{i}.attn{n}", layer, pattern) for (i, layer), pattern in zip(layers, patterns, strict=True)
            for n in ([f".{n}" for n in range(len(layer.parts))] if len(layer.parts) > 1 else [""])
        ]  # fmt: skip
        for attn, layer, pattern in each:
            if layer.z is not None and not layer.changed:
                v = cache[f"{attn}.hook_v"].double()
                v = v.repeat_interleave(pattern.shape[1] // v.shape[2], dim=2)
                note("v", off(cache[f"{attn}.hook_z"], torch.einsum("bhij,bjhd->bihd", pattern, v)))
            truth = {
                "row_entropy": torch.special.entr(pattern).sum(-1), "sink": pattern[..., 0], "received": pattern.sum(-2),
            }  # fmt: skip
            if layer.attention.has_null:
                truth["null"] = (1 - pattern.sum(-1)).clamp_min(0)
                truth["row_entropy"] += torch.special.entr(truth["null"])
            for name in truth:
                if (point := f"{attn}.hook_{name}") in cache:
                    note(name, off(cache[point], truth[name]))
    names = dict(module.named_modules())
    inputs, outputs, taken = hooked(module, ids, [n for n in names if n])
    states = getattr(module(ids, output_hidden_states=True), "hidden_states", None) or ()
    start = outputs.get(observed.structure.layers[0].block)
    after = (
        len(states) and start is not None and torch.equal(states[0], start)
    )  # state spaces count from the first block's output
    if len(states) == len(observed.structure.layers) + 1:
        for i, state in enumerate(states[:-1]):  # the last one is normed in most families
            if (point := f"blocks.{i}.hook_resid_{'post' if after else 'pre'}") in cache:
                note("stream", off(cache[point], state))
    final = observed.structure.final  # what the final norm reads, where that is no block's output
    for i, layer in enumerate(observed.structure.layers):
        is_last = final is not None and i == len(observed.structure.layers) - 1
        made = inputs.get(final.module) if is_last else outputs.get(layer.block)
        if (point := f"blocks.{i}.hook_resid_post") in cache and made is not None:
            note("stream", off(cache[point], made))
        inside = [n for n in names if n.startswith(f"{layer.block}.")]
        for name in inside:
            last = name.rpartition(".")[2]
            if last == "v_proj" and (point := f"blocks.{i}.attn.own.hook_v") in cache and name in outputs:
                normed = next((n for n in inside if n.endswith("v_norm") and n in outputs), name)
                note("own_v", off(cache[point].flatten(2), outputs[normed].reshape(*ids.shape, -1)))
            if last in OUTPUTS and ATTENTION.search(name) and name in inputs:
                point = f"blocks.{i}.attn.hook_z"
                if point in cache and observed.structure.layers[i].z is not None:
                    note("z", off(cache[point].flatten(2), inputs[name].reshape(*ids.shape, -1)))
    for i, layer in enumerate(observed.structure.layers):  # what the module of the experts is given
        if isinstance(layer.router, Router) and (
            given := taken.get(f"{layer.router.module.rpartition('.')[0]}.experts")
        ):
            experts, weights = (x.reshape(ids.numel(), -1) for x in given)
            seen = cache[f"blocks.{i}.mlp.hook_expert_weights"].flatten(0, 1)
            note("experts", off(seen, torch.zeros_like(seen).scatter_add(-1, experts.long(), weights.to(seen))))
    return worst


def row_of(family: str, implementation: str, seconds: int) -> dict[str, Any]:
    """What became of one family: not built, refused, or observed with its differences."""
    row: dict[str, Any] = {"family": family, "attention": implementation, "status": "", "why": ""}
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    try:
        with limited(seconds), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config, eager = runnable(family, ids)
            module = eager if implementation == "eager" else built(family, config, implementation)
            if module is not eager:
                module.load_state_dict(eager.state_dict())
            module(ids)
            row["status"] = "refused"
            observed = observe(module, ids, call=lambda m, x: m(x, use_cache=False), quiet=True)
            row |= {"status": "observed", "layers": observed.config.n_layers, "architecture": observed.architecture}
            row["read"] = sum(layer.is_read for layer in observed.structure.layers)
            row["streams"] = observed.structure.layers[0].has_stream
            row["why"] = "; ".join(observed.notes)
            row |= compared(observed, module, eager, ids)
            row |= taken_apart(observed, ids)
    except TooSlow as slow:
        row |= {"status": "too slow", "why": str(slow)}
    except Exception as error:  # a family that cannot be built or is refused is a row of the table, whatever it raises
        row |= {"status": row["status"] or "not built", "why": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
        if row["status"] in ("refused", "observed") and not isinstance(error, WorkbenchError):
            row["status"] = "failed"
    return row


def taken_apart(observed: Observed, ids: Tensor) -> dict[str, Any]:
    """The finest level at which its logits are taken apart, how far those parts are from their sum, and why not finer."""
    row: dict[str, Any] = {"parts_by": "", "parts": None, "parts_why": ""}
    for by in ("layer", "head", "value_path"):
        try:
            found = decompose(observed, ids, "logits", by, tokens=5)
        except WorkbenchError as reason:
            return row | {"parts_why": str(reason)[:160]}
        row |= {"parts_by": by, "parts": found.error / float(found.parts.abs().sum(0).max())}
    return row


def is_wrong(row: dict[str, Any]) -> bool:
    measured = {name: row.get(name) for name in (*STATISTICS, "v", "own_v", "z", "stream", "experts", "parts")}
    return row["status"] == "failed" or bool(row.get("logits")) or any(
        value is not None and not value <= LIMIT for value in measured.values()
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="these families alone; writes no table")
    parser.add_argument("--seconds", type=int, default=120, help="CPU seconds for a family and kind of attention")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for family in options.only or families():
        for implementation in ("eager", "sdpa"):
            row = row_of(family, implementation, options.seconds)
            row["wrong"] = is_wrong(row)
            rows.append(row)
            numbers = {
                n: f"{row[n]:.1e}" for n in ("logits", *STATISTICS, "v", "own_v", "z", "stream", "experts") if n in row
            }
            print(
                family,
                implementation,
                row["status"],
                "WRONG" if row["wrong"] else "",
                numbers,
                row["why"][:160],
                flush=True,
            )
            if not options.only:
                pd.DataFrame(rows).to_csv(TABLE, index=False, float_format="%.2g")
    table = pd.DataFrame(rows)
    print(table.groupby("attention")["status"].value_counts().to_string())
    wrong = table[table["wrong"]]
    print(f"{len(wrong)} wrong: {', '.join(wrong['family'] + ' ' + wrong['attention'])}")
    return int(len(wrong) > 0)


if __name__ == "__main__":
    sys.exit(main())
