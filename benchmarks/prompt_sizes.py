"""Compare activations of observed modules on prompts of confusable sizes with those of longer prompts.

    OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 nice -n 19 python benchmarks/prompt_sizes.py [--only NAME ...] [--seconds 240] [--part 0/1]

An axis may be mistaken for another one if a prompt has as many positions as the module has heads, key-value heads, sequences or
numbers in a head. A causal model gives each position the same activation in a longer prompt of one sequence, which is the truth here.
The script names and leaves out families whose own logits depend on the length (attention in chunks or in both directions). A row's
log-sum is compared relative to the score of its own position, since a bias that counts positions from the end (MPT's) shifts a whole
row. It prints one line per family and kind of attention, and exits with 1 if an activation differs by more than 1e-4.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.observing.observed_model import Observed

LIMIT = 1e-4  # relative to the largest entry, at least 1
LONG = 29  # positions of the longer prompt: as many as nothing else
LEFT_OUT = re.compile(r"hook_attn_scores|hook_v_mix|hook_received$")
QUERY_LAST = re.compile(r"hook_(row_\w+|sink|lse|null)$")


def sizes(observed: Observed) -> Iterator[tuple[int, int]]:
    """Yield the numbers of sequences and positions that another axis may share."""
    config = observed.config
    lengths = {1, 2, config.n_heads, config.n_key_value_heads or config.n_heads, config.d_head} - {0}
    for length in sorted(n for n in lengths if n < LONG):
        yield from ((batch, length) for batch in sorted({1, 2, length}))


def off(found: Tensor, truth: Tensor) -> float:
    """Largest difference over the largest entry of the truth, which counts as 1 at least; inf where shapes differ."""
    if found.shape != truth.shape:
        return float("inf")
    found, truth = found.double().nan_to_num(), truth.double().nan_to_num()
    return float((found - truth).abs().max() / truth.abs().max().clamp_min(1.0))


def prefix(name: str, x: Tensor, length: int) -> Tensor:
    """The first positions of an activation [1, ...]."""
    if name.endswith("hook_pattern"):
        return x[..., :length, :length]
    return x[..., :length] if QUERY_LAST.search(name) else x[:, :length]


def compared_to(cache: dict[str, Tensor], name: str) -> Tensor:
    """Return an activation; a row's log-sum minus the score of the query's own position, if that is known."""
    if name.endswith("hook_lse") and (scores := name.replace("hook_lse", "hook_attn_scores")) in cache:
        return cache[name] - cache[scores].diagonal(dim1=-2, dim2=-1)
    return cache[name]


def differences(observed: Observed, ids: Tensor) -> tuple[int, list[str], list[str]]:
    """Return the number of compared activations, a description of each that differs, and of each size that is refused.

    `ids` [batch, LONG] holds as many sequences as the longest prompt of `sizes` has positions.
    """
    names = [n for n in observed.hook_dict if not LEFT_OUT.search(n)]
    read = [*names, *(n for n in observed.hook_dict if n.endswith("hook_attn_scores"))]
    truth = [observed.run_with_cache(row[None], read) for row in ids]
    compared, wrong, refused = 0, list[str](), list[str]()
    for batch, length in sizes(observed):
        try:
            logits, cache = observed.run_with_cache(ids[:batch, :length], read)
        except WorkbenchError as error:
            refused.append(f"{batch} x {length}: {error}")
            continue
        expected: dict[str, tuple[Tensor, list[Tensor]]] = {
            name: (compared_to(cache, name), [prefix(name, compared_to(one, name), length) for _, one in truth[:batch]])
            for name in names
        }
        if isinstance(logits, Tensor) and logits.shape[:2] == (batch, length):
            expected["logits"] = logits, [one[:, :length] for one, _ in truth[:batch]]
        for name, (found, parts) in expected.items():
            compared += 1
            if not (worst := off(found, torch.cat(parts))) <= LIMIT:
                wrong.append(f"{name} of {batch} x {length}: {worst:.1e}")
    return compared, wrong, refused


def is_causal(observed: Observed, ids: Tensor) -> bool:
    """Return whether the module's own logits of a short prompt equal those of a longer one."""
    longer = observed.logits(ids[:2])
    return all(
        off(observed.logits(ids[:2, :n]), longer[:, :n]) <= LIMIT for n in sorted({n for _, n in sizes(observed)})
    )


def line_of(family: str, implementation: str, seconds: int) -> tuple[str, int, int]:
    """Return the result of one family in words, and the numbers of activations compared and different."""
    from families import limited
    from family_configs import LENGTH, VOCABULARY, built, runnable

    from workbench.observing.observation import observe

    example = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    status = "not built"
    try:
        with limited(seconds), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config, module = runnable(family, example)
            if implementation != "eager":
                state = module.state_dict()
                module = built(family, config, implementation)
                module.load_state_dict(state)
            module(example)
            status = "refused"
            observed = observe(module, example, call=lambda m, x: m(x, use_cache=False), quiet=True)
            status = "not run"
            most = max(batch for batch, _ in sizes(observed))
            ids = torch.randint(3, VOCABULARY, (most, LONG), generator=torch.Generator().manual_seed(4))
            if not is_causal(observed, ids):
                return "logits depend on the length of the prompt: left out", 0, 0
            compared, wrong, refused = differences(observed, ids)
            words = f"{compared} compared, {len(wrong)} differ {wrong[:4]}, {len(refused)} sizes refused {refused[:1]}"
            return words, compared, len(wrong)
    except Exception as error:  # a family that cannot be built or is refused has a line, whatever it raises
        failed = "" if isinstance(error, WorkbenchError) or status == "not built" else "FAILED "
        return f"{failed}{status}: {type(error).__name__}: {error}".split("\n")[0][:300], 0, 0


def main() -> int:
    from family_configs import families

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="these families alone")
    parser.add_argument("--seconds", type=int, default=240, help="CPU seconds for a family and kind of attention")
    parser.add_argument("--part", default="0/1", help="every n-th family: 0/2 the even ones, 1/2 the odd ones")
    options = parser.parse_args()
    torch.set_num_threads(1)
    part, parts = map(int, options.part.split("/"))
    totals: list[Any] = []
    for family in (options.only or families())[part::parts]:
        for implementation in ("eager", "sdpa"):
            words, compared, wrong = line_of(family, implementation, options.seconds)
            totals.append((compared, wrong))
            print(family, implementation, words, flush=True)
    observed = [t for t in totals if t[0]]
    print(f"{len(observed)} observed, {sum(t[0] for t in observed):,} compared, {sum(t[1] for t in observed)} differ")
    return int(any(wrong for _, wrong in totals))


if __name__ == "__main__":
    sys.exit(main())
