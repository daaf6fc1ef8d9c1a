"""`observe`: one traced run on example tokens, compared bit by bit with a plain one, becomes an `Observed`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import BadData, WorkbenchError
from workbench.observing.anatomy import Anatomy, anatomy
from workbench.observing.layouts import tensors
from workbench.observing.observed import Observed, refuse_dropout
from workbench.observing.paths import Path, paths_of
from workbench.observing.tracing import Trace
from workbench.observing.watching import COMPILED, eagerly, unwrapped

Call = Callable[[nn.Module, Tensor], Any]
_TARGETS = ("targets", "labels")
_FEWEST = 8  # positions; with fewer, coincidences decide


def observe(
    module: nn.Module,
    example_tokens: Any,
    *,
    call: Call | None = None,
    blocks: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    quiet: bool = False,
) -> Observed:
    """Observe a live decoder; nothing of it is edited, subclassed or left hooked.

    Args:
        module: anything whose `module(ids)` runs a decoder; DistributedDataParallel and compiled modules are taken apart.
        example_tokens: ids [batch, pos] (or [pos]) it can read, 8 positions at least, of the kind it will be used on: no two
            parts should agree by chance, so real text or random ids rather than zeros.
        call: `call(module, ids)` where the module wants more than ids, for example masks.
        blocks: where the module holds several stacks of blocks: the name, or names, of the one to observe.
        tokenizer: as of our own models, for text. quiet: do not print what was found and what not.

    Raises `WorkbenchError` naming the cause and what to do: no attention seen (custom kernels, TorchScript), bidirectional or
    cross-attention, several attentions in a block, several stacks, active dropout, outputs that change when watched;
    `BadData` for tokens that are none.
    """
    if not isinstance(module, nn.Module):
        raise WorkbenchError(f"observe needs a torch.nn.Module, not a {type(module).__name__}")
    if isinstance(module, Observed):
        raise WorkbenchError("this module is observed already")
    inner, notes = unwrapped(module)
    tokens = _tokens(inner, example_tokens)
    refuse_dropout(inner)
    with torch.inference_mode(False), torch.no_grad(), eagerly():
        plain = call(inner, tokens) if call else inner(tokens)
    every, word = _every(inner, call, plain, tokens)
    notes += [word] if word else []
    run = call or (lambda m, ids: m(ids))

    def again(part: nn.Module, others: Tensor | None = None) -> tuple[Anatomy, list[Path]]:
        trace = Trace(part, tokens if others is None else others)
        output = trace.run(lambda ids: every(part, ids))
        found = anatomy(trace, output, blocks)
        return found, paths_of(found.layers)

    _refuse_changed(inner, run, plain, tokens)
    if "torch._dynamo" in sys.modules and COMPILED not in notes:
        with torch.inference_mode(False), torch.no_grad():
            usual = run(inner, tokens)
        notes += [] if same(usual, plain) else [COMPILED]
    found, paths = again(inner)
    outer = module if hasattr(module, "_orig_mod") else inner
    observed = Observed(
        inner, found, paths, outer=outer, usual=run, every=every, again=again, notes=notes, tokenizer=tokenizer
    )
    if not quiet:
        print(observed)
    return observed


def _tokens(module: nn.Module, given: Any) -> Tensor:
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadData(f"example_tokens are no table of token ids [batch, pos]: {error}") from error
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise BadData(f"example_tokens of shape {tuple(ids.shape)}, {ids.dtype}: needs token ids [batch, pos]")
    if ids.numel() < _FEWEST or ids.shape[1] < 2:
        raise BadData(f"example_tokens of shape {tuple(ids.shape)}: {_FEWEST} positions or more tell parts apart")
    device = next((p.device for p in module.parameters()), ids.device)
    with torch.inference_mode(False):
        return ids.to(device, torch.long).clone()


def _every(module: nn.Module, call: Call | None, plain: Any, tokens: Tensor) -> tuple[Call, str]:
    """How to call the module for logits of every position, and a word on it where that is not as it is called otherwise."""
    usual: Call = call or (lambda m, ids: m(ids))
    last = any(x.ndim == 3 and x.shape[:2] == (len(tokens), 1) for _, x in tensors(plain) if x.is_floating_point())
    if not last or call is not None or tokens.shape[1] == 1:
        return usual, ""
    known = inspect.signature(module.forward).parameters
    name = next((n for n in _TARGETS if n in known), None)
    if name is None:
        return usual, "logits are of the last position only: no loss (give observe() a call= that returns them all)"
    return (lambda m, ids: m(ids, **{name: ids})), f"logits of every position come from calling it with {name}="


def _refuse_changed(module: nn.Module, run: Call, plain: Any, tokens: Tensor) -> None:
    """Raise where watching would change the output, or where it is random anyway."""
    trace = Trace(module, tokens)
    heard = trace.run(lambda ids: run(module, ids))
    random = next((a for a in trace.attentions if a.refusal.startswith("dropout")), None)
    if random is not None:
        raise WorkbenchError(f"attention in {random.within.name} cannot be read: {random.refusal}")
    if same(plain, heard):
        return
    with torch.inference_mode(False), torch.no_grad(), eagerly():
        again = run(module, tokens)
    if not same(plain, again):
        raise WorkbenchError(
            f"two runs of {type(module).__name__} on the same tokens differ (dropout, a cache or other state): call "
            "module.eval(), or give observe() a call= that starts afresh"
        )
    raise WorkbenchError(
        f"{type(module).__name__} takes another path when it is watched: its output changes. PyTorch's fused encoder layers do "
        "so: torch.backends.mha.set_fastpath_enabled(False)"
    )


def same(a: Any, b: Any) -> bool:
    """Whether two outputs hold bitwise equal tensors at the same places; NaN equals NaN."""
    left, right = dict(tensors(a)), dict(tensors(b))
    return left.keys() == right.keys() and all(
        x.shape == right[p].shape and torch.equal(x.nan_to_num(), right[p].nan_to_num()) for p, x in left.items()
    )
