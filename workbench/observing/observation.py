"""`observe`: recognise a decoder from traced runs on example tokens, which must equal a plain run bitwise."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.data.tokenizer import as_tokenizer, ids_of
from workbench.errors import BadData, WorkbenchError
from workbench.kernels.pytorch_switches import outside_inference_mode
from workbench.models.hooked import id_table
from workbench.observing.interception.function_mode import (
    COMPILED_NOTE,
    FAST_PATH_NOTE,
    Interception,
    PreservedState,
    guarded,
    unwrapped,
)
from workbench.observing.interception.sdpa_and_flex_attention import APPLIED, COMPLETE, IGNORED
from workbench.observing.interception.sharded_weights import has_alike_matrices, refuse_absent_weights
from workbench.observing.interception.tensor_paths import tensors_of_output
from workbench.observing.observed_model import Call, Observed, refuse_dropout
from workbench.observing.recognition.decoder_recognition import recognize_decoder
from workbench.observing.recognition.decoder_structure import UNLIMITED, DecoderStructure, Part
from workbench.observing.recognition.find_blocks import ENCODER_DECODER, is_encoder_decoder
from workbench.observing.recognition.tensor_axes import (
    distinct_length,
    find_axes,
    find_batch_axes,
    find_layout,
    refuse_ambiguous_axes,
)
from workbench.observing.recognition.traced_run import Trace, is_matrix
from workbench.observing.recognition.value_paths import ValuePath, fit_streams, fit_value_paths

MIN_POSITIONS = 8  # with fewer, tensors agree by chance
MIN_IDS = 4  # the same; a smaller vocabulary needs all its ids


def observe(
    module: nn.Module, example_tokens: Any, *, call: Call | None = None, blocks: str | Sequence[str] | None = None,
    tokenizer: Any = None, quiet: bool = False,
) -> Observed:  # fmt: skip
    """Observe a live decoder without editing or subclassing it; no hooks remain on it.

    Args:
        module: A decoder that `module(ids)` runs; DistributedDataParallel and compiled modules are unwrapped.
        example_tokens: Ids [batch, pos] (or [pos]) of at least 8 positions and 4 different ids: real text or random ids, of the
            kind that will be measured. Then no two tensors agree by chance. A tokenizer's output without padding is accepted, and
            text if there is a `tokenizer`. They are cut if another axis of the module is as long.
        call: `call(module, ids)` if the module needs more than ids, for example masks.
        blocks: Name, or names, of the stack of blocks to observe if the module has several.
        tokenizer: For text: a workbench tokenizer, a `tokenizers.Tokenizer`, or a fast tokenizer of transformers. It is copied.
        quiet: If true, no summary is printed.

    Returns:
        The module with our hook points.

    Raises:
        WorkbenchError: No attention that can be read (custom kernels, TorchScript), bidirectional or cross-attention, several stacks
            of blocks, active dropout, outputs without a tensor, with NaN, or changed by the trace. The message names the cause.
        BadData: The example tokens are no token ids, too few, or too few different ones.
    """
    return guarded(PreservedState(), _observe, module, example_tokens, call, blocks, tokenizer, quiet)


def _observe(
    module: nn.Module, example_tokens: Any, call: Call | None, blocks: str | Sequence[str] | None, tokenizer: Any, quiet: bool,
) -> Observed:  # fmt: skip
    if not isinstance(module, nn.Module):
        advice = ": it is a graph without the model's modules, so observe the model that was exported"
        exported = type(module).__name__ == "ExportedProgram"
        kind = f"{type(module).__name__}{advice if exported else ''}"
        raise WorkbenchError(f"observe needs a torch.nn.Module, not a {kind}")
    if isinstance(module, Observed):
        raise WorkbenchError("this module is observed already")
    inner, notes = unwrapped(module)
    refuse_absent_weights(inner)
    tokens = _tokens(inner, ids_of(example_tokens, as_tokenizer(tokenizer, UNLIMITED)))
    refuse_dropout(inner)
    run = call or (lambda module, ids, **more: module(ids, **more))
    plain = _first_run(inner, run, tokens, given=call is not None)
    run_all, more = (run, []) if call else _call_for_all_positions(inner, run, plain, tokens)
    notes += more
    packed = [m for m in inner.modules() if hasattr(m, "_packed_params") and callable(getattr(m, "weight", None))]
    if packed:  # quantised matrices without weight tensors
        kind = f"torch.{type(packed[0]).__module__.partition('torch.')[2]}.{type(packed[0]).__name__}"
        notes.append(
            f"{len(packed)} matrices are {kind}, which packs its int8 weights: own values, value paths, W_O and the head are not "
            "found; for these, observe the module before it is quantised"
        )
    trace = _check_trace_changes_nothing(inner, run, plain, tokens)
    _refuse_few_ids(trace)
    fused = any(isinstance(part, nn.TransformerEncoderLayer) for part in inner.modules())
    if COMPILED_NOTE not in notes and (fused or "torch._dynamo" in sys.modules):  # its usual run may differ
        with outside_inference_mode(), torch.no_grad():
            is_same = same_tensors(run(inner, tokens), plain)
        notes += [] if is_same else [FAST_PATH_NOTE if fused else COMPILED_NOTE]
    outer = module if hasattr(module, "_orig_mod") else inner
    lists = _block_lists(trace, lambda m: run(m, tokens), outer, plain)
    layout = find_layout(trace, lambda ids: run(inner, ids))
    sizes = find_axes(inner, partial(run_all, inner), tokens, layout)
    batch_axes = find_batch_axes(inner, partial(run_all, inner), tokens, layout, sizes)
    if sizes is None:
        refuse_ambiguous_axes(trace)
        notes.append("the module takes inputs of one size only: lengths on the example tokens tell its axes apart")
    else:
        tokens = distinct_length(tokens, sizes.constants)
    axes = None if sizes is None else sizes.axes

    def recognize(
        module: nn.Module, ids: Tensor | None, *, noisy: bool = False
    ) -> tuple[DecoderStructure, list[ValuePath]]:
        ids = tokens if ids is None else ids
        trace = Trace(module, ids, layout, axes, block_lists=lists, noisy=noisy, batch_axes=batch_axes)
        output = trace.run(lambda ids: run_all(module, ids))
        _refuse_few_ids(trace)
        with torch.autocast(tokens.device.type, enabled=False):  # that of the run does not apply to later comparisons
            structure = recognize_decoder(trace, output, blocks)
            structure.block_lists = lists
            paths = fit_value_paths(structure.layers, structure.tables)
            return structure, [*paths, *fit_streams(structure.arriving, structure.layers)]

    structure, paths = _with_matrices_told_apart(inner, recognize)
    observed = Observed(
        inner, structure, paths, outer=outer, call=run, call_all=run_all,
        recognize=recognize, notes=notes, tokenizer=tokenizer,
    )  # fmt: skip
    if not quiet:
        print(observed)
    return observed


def _first_run(module: nn.Module, run: Call, tokens: Tensor, *, given: bool) -> Any:
    """Return the module's output; raises `WorkbenchError` if it cannot run on these ids, or returns no tensor or NaN."""
    name = type(module).__name__
    try:
        with outside_inference_mode(), torch.no_grad():
            output = guarded(Interception(None), run, module, tokens)
    except (TypeError, ValueError) as error:
        if given or (isinstance(error, TypeError) and "argument" not in str(error)):
            raise
        both = is_encoder_decoder(module)
        advice = ENCODER_DECODER if both else "pass observe() a call=, as call=lambda m, ids: m(ids, ...)"
        raise WorkbenchError(f"{name} cannot be called with ids alone ({error}): {advice}") from error
    except IndexError as error:
        shape, least, largest = tuple(tokens.shape), int(tokens.min()), int(tokens.max())
        raise BadData(
            f"{name} cannot run on example tokens {shape} with ids {least} to {largest} ({error}): give ids of its vocabulary, and no "
            "more positions than it reads"
        ) from error
    tensors = tensors_of_output(output).values()
    if not tensors:
        raise WorkbenchError(
            f"{name} returns a {type(output).__name__} without a tensor, so that two runs cannot be compared: pass observe() a call= "
            "that returns the logits"
        )
    if any(bool(x.isnan().any()) for x in tensors if x.is_floating_point()):
        raise WorkbenchError(
            f"{name} gives NaN on the example tokens: a query whose keys are all masked with -inf does so in eager attention. Give rows "
            "without padding, or mask with torch.finfo(dtype).min"
        )
    return output


def _block_lists(trace: Trace, run: Callable[[nn.Module], Any], outer: nn.Module, plain: Any) -> str:
    """Return the effect of FlexAttention's block lists in the module's own runs, by comparison with eager runs with and without them."""
    if not trace.leaves_out:
        return COMPLETE if trace.leaves_out is False else ""
    with outside_inference_mode(), torch.no_grad():
        own = run(outer)
    applied = Trace(trace.module, trace.tokens, block_lists=APPLIED).run(lambda _: run(trace.module))

    def distance(other: Any) -> float:
        """Return the largest difference between tensors of two outputs, relative to the larger norm."""
        pairs = zip(tensors_of_output(own).values(), tensors_of_output(other).values(), strict=True)
        doubles = [(x.double(), y.double()) for x, y in pairs if x.is_floating_point()]
        norms = [float((x - y).norm() / torch.maximum(x.norm(), y.norm()).clamp_min(1e-30)) for x, y in doubles]
        return max(norms, default=0.0)

    far, near = distance(plain), distance(applied)
    if min(far, near) * 4 > max(far, near):
        raise WorkbenchError(
            f"a BlockMask of FlexAttention leaves out blocks that its mask_mod allows. The module's own output is {near:.1e} (relative) "
            f"from a run without these blocks and {far:.1e} from one with them, so which one it computes is not known: make mask_mod "
            "leave out the same blocks"
        )
    return APPLIED if near < far else IGNORED


def _with_matrices_told_apart(
    module: nn.Module, recognize: Callable[..., tuple[DecoderStructure, list[ValuePath]]]
) -> tuple[DecoderStructure, list[ValuePath]]:
    """Recognise a module, a second time with noise on all products if matrices or heads are equal now and may not stay so."""

    def shares_columns(part: Part) -> bool:
        """Return whether two of an attention's projections are some of the same columns of an output."""
        columns: Counter[Any] = Counter()
        for place in (place for place in (part.q, part.k, part.v) if place is not None):
            numbers = range(place.columns.stop)[place.columns] if isinstance(place.columns, slice) else place.columns
            columns.update((place.module, place.run, place.path, number) for number in numbers)
        return max(columns.values(), default=0) > 1

    structure, paths = recognize(module, None)
    parts = [part for layer in structure.layers for part in layer.parts]
    alike = has_alike_matrices(module) or any(map(shares_columns, parts))
    if not alike and not any(part.attention.repeats > 1 for part in parts):
        return structure, paths
    noisy, noisy_paths = recognize(module, None, noisy=True)
    if [layer.attention.kv_heads for layer in noisy.layers] != [layer.attention.kv_heads for layer in structure.layers]:
        return replace(structure, layers=noisy.layers, config=noisy.config), noisy_paths
    for layer, other in zip(structure.layers, noisy.layers, strict=True):
        for part, told_apart in zip(layer.parts, other.parts, strict=True):
            part.q, part.k, part.v = told_apart.q, told_apart.k, told_apart.v
            part.latent = told_apart.latent
    return structure, noisy_paths if alike and len(parts) == len(structure.layers) else paths


def _refuse_few_ids(trace: Trace) -> None:
    """Raise `BadData` if the tokens have too few different ids to tell tensors apart."""
    tables = [e for e in trace.executions if e.reads_tokens and is_matrix(trace, e)]
    vocabularies = [int(trace.module.get_submodule(e.name).weight.shape[0]) for e in tables]  # type: ignore[index]
    least, ids, shape = min([MIN_IDS, *vocabularies]), trace.tokens.unique().tolist(), tuple(trace.tokens.shape)
    if len(ids) < least:
        raise BadData(
            f"example tokens {shape} hold {len(ids)} different ids ({', '.join(map(str, ids))}), too few to tell tensors apart: "
            f"give text, or random ids as torch.randint(vocabulary, {shape})"
        )


def _tokens(module: nn.Module, example_tokens: Any) -> Tensor:
    ids = id_table(example_tokens, "example_tokens")
    if ids.numel() < MIN_POSITIONS or ids.shape[1] < 2:
        raise BadData(f"example_tokens of shape {tuple(ids.shape)}: {MIN_POSITIONS} positions or more tell parts apart")
    device = next((p.device for p in module.parameters() if not p.is_meta), ids.device)
    if ids.shape[0] == ids.shape[1]:  # sequences and positions differ by their numbers
        ids = ids[:-1]
    with outside_inference_mode():
        return ids.to(device, torch.long).clone()


def _call_for_all_positions(module: nn.Module, usual: Call, plain: Any, tokens: Tensor) -> tuple[Call, list[str]]:
    """Return a call of the module for logits of every position, and a note if it differs from the usual call."""
    seen = [x for x in tensors_of_output(plain).values() if x.is_floating_point()]
    last = any(x.ndim == 3 and x.shape[:2] == (len(tokens), 1) for x in seen)
    if not last or tokens.shape[1] == 1:
        return usual, []
    name = next((n for n in ("targets", "labels") if n in inspect.signature(module.forward).parameters), None)
    if name is None:
        return usual, ["logits are of the last position only: no loss (pass observe() a call= that returns them all)"]
    note = f"logits of every position come from calling it with {name}="
    return (lambda m, ids, **more: m(ids, **{name: ids}, **more)), [note]


def _check_trace_changes_nothing(module: nn.Module, run: Call, plain: Any, tokens: Tensor) -> Trace:
    """Return a traced run; raises `WorkbenchError` if the trace changes the output, or two plain runs differ."""
    trace = Trace(module, tokens)
    traced = trace.run(lambda ids: run(module, ids))
    random = next((a for a in trace.attentions if a.refusal.startswith("dropout")), None)
    if random is not None:
        raise WorkbenchError(f"attention in {random.within.name} cannot be read: {random.refusal}")
    if same_tensors(plain, traced):
        return trace
    with outside_inference_mode(), torch.no_grad():
        second = guarded(Interception(None), run, module, tokens)
    if not same_tensors(plain, second):
        raise WorkbenchError(
            f"two runs of {type(module).__name__} on the same tokens differ (dropout, a cache or other state): call "
            "module.eval(), or pass observe() a call= that starts afresh"
        )
    raise WorkbenchError(
        f"{type(module).__name__} takes another path when it is traced: its output changes. Have it run alike with hooks on its parts"
    )


def same_tensors(a: Any, b: Any) -> bool:
    """Return whether two outputs have bitwise equal tensors at the same paths; NaN equals NaN."""
    left, right = tensors_of_output(a), tensors_of_output(b)
    return left.keys() == right.keys() and all(
        x.shape == right[p].shape and torch.equal(x.nan_to_num(), right[p].nan_to_num()) for p, x in left.items()
    )
