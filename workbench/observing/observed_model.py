"""A foreign decoder with our hook points, caches, gradients and interventions, without rewriting it.

observed = workbench.observe(module, example_tokens)
logits, cache = observed.run_with_cache(tokens, names_filter=["blocks.1.attn.hook_v"])
workbench.measure(observed, ["importance_entropy", "value_drain"], tokens)
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from html import escape
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor, nn

from workbench.data.tokenizer import as_tokenizer
from workbench.errors import BadData, HooksNotCalled, NotMeasured, WorkbenchError, warn_caller
from workbench.hook_names import is_statistic, layer_of, stream_hook
from workbench.kernels.pytorch_switches import COMPILED_CODE
from workbench.models.hook_points import HookPoint, is_hooked, submodules
from workbench.models.hooked import HookedModel, Hooks, refuse_ids
from workbench.models.patterns_and_gradients import LossFn, NamesFilter
from workbench.observing.interception.documents_and_labels import SeenMasks, Segments
from workbench.observing.interception.function_mode import Failed, PreservedState, guarded, remove_module_hooks
from workbench.observing.interception.masks import CAUSAL, PACKED, PADDING, WINDOW
from workbench.observing.interception.position_axes import Positions
from workbench.observing.interception.sharded_weights import is_sharded, offloaded, samples
from workbench.observing.interception.tensor_paths import get_at, ids_among
from workbench.observing.listening.hook_points import BlockPoints, DecoderPoints, HeadPoints
from workbench.observing.listening.module_hooks import CallsListenedTo, HookedRun
from workbench.observing.recognition.architecture import recognize_architecture
from workbench.observing.recognition.decoder_structure import UNLIMITED, DecoderStructure
from workbench.observing.recognition.module_runs import LOOKUP
from workbench.observing.recognition.value_paths import ValuePath, mixture_of, sharing_note, value_path_table
from workbench.observing.stream_and_logit_parts import ObservedAnatomy, holds_some_heads
from workbench.observing.summary import coverage, describe, missing_hooks, site_table

if TYPE_CHECKING:
    from workbench.models.activation_cache import Cache

Call = Callable[..., Any]
"""`call(module, ids)`, with further arguments of the module if it takes them."""
Recognize = Callable[[nn.Module, Tensor | None], tuple[DecoderStructure, list[ValuePath]]]


class Observed(HookedModel):
    """A foreign decoder with our hook points; `workbench.observe` returns it.

    The module itself runs, with its own parameters. Hooks and a function mode are added for runs with hooks alone.
    `sites` lists the recognised parts, `value_paths()` the sources of values.
    """

    def __init__(
        self, foreign: nn.Module, structure: DecoderStructure, paths: list[ValuePath], *, outer: nn.Module, call: Call,
        call_all: Call, recognize: Recognize, notes: list[str], tokenizer: Any,
    ) -> None:  # fmt: skip
        name, options, reason = recognize_architecture(structure, paths)
        super().__init__(structure.config, name)
        self.options = options
        self.tokenizer = tokenizer
        self.source = {"path": f"observed {type(foreign).__name__}"}
        self.structure, self.fitted_paths = structure, paths
        spread = "tensor parallel: heads are those of this process, which all make each run together"
        spread = spread if any(holds_some_heads(foreign, layer) for layer in structure.layers) else ""
        self.notes = [n for n in (*notes, *structure.notes, spread, sharing_note(paths), reason) if n]
        # not registered: nothing of the foreign module is renamed, moved, saved or put into another mode
        self.__dict__["foreign"], self.__dict__["outer"] = foreign, outer
        fused = any(isinstance(m, nn.MultiheadAttention | nn.TransformerEncoderLayer) for m in foreign.modules())
        self.__dict__["embed"], self.__dict__["fused"] = self._embedding(), fused  # layers that call no hooks
        self._call, self._call_all, self._recognize = call, call_all, recognize
        self._recognized: tuple[Any, Any, dict[int, Any]] | None = None  # state of the module, and what was found in it
        self.all_positions = False  # whether a run must return logits of every position
        self._masks: SeenMasks | None = None  # records the masks of a run
        self._segments: Segments | None = None  # documents of the attention statistics
        self._attended: dict[tuple[int, str], Tensor] | None = None  # takes queries and keys of a run
        self._mask_kinds: dict[int, str] = {}  # of the last run, by layer whose attention was read
        if structure.embed is not None:
            self.hook_embed = HookPoint()
        points = (BlockPoints(layer, mixture_of(paths, i)) for i, layer in enumerate(structure.layers))
        self.blocks = nn.ModuleList(points)
        if structure.head is not None:
            self.unembed = HeadPoints(foreign.get_submodule(structure.head.module))  # type: ignore[assignment]
        super().train(False)  # hook points have no mode; TransformerLens refuses them in training mode
        self.absent = missing_hooks(self.sites)
        self.setup()

    @property
    def tokenizer(self) -> Any:
        """Tokenizer for text, or None. Accepts our tokenizers, those in `tokenizers`, and fast ones of transformers."""
        return self.__dict__.get("_tokenizer")

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self.__dict__["_tokenizer"] = given = as_tokenizer(tokenizer, self.config.d_vocab)
        self.start_token = getattr(given, "start_token", None)

    def _embedding(self) -> Any:
        """Return the embedding, or an object with some weight of the module, or with the offloaded weight."""
        weight = next((p for p in self.foreign.parameters() if p.is_floating_point() and not p.is_meta), None)
        if self.structure.embed is None or self.structure.embed.module == LOOKUP:
            return SimpleNamespace(weight=weight)
        table: Any = self.foreign.get_submodule(self.structure.embed.module)
        return SimpleNamespace(weight=offloaded(table, "weight")) if table.weight.is_meta else table

    @property
    def is_sharded(self) -> bool:
        """True if its weights are sharded over processes, which must all make the same runs."""
        return any(is_sharded(p) for p in self.foreign.parameters())

    def is_read_only(self, name: str) -> bool:
        """Return whether a hook point is read-only: statistics, fitted coefficients, copies of earlier layers' values."""
        copy = name.endswith(("hook_v_mix", "hook_v_weights")) or ".attn.source." in name or ".attn.table." in name
        inline = bool(self.structure.layers[0].inline) and ".hook_resid_" in name
        if copy or is_statistic(name) or inline or ".mlp.hook_" in name:
            return True
        # hook points of all attentions of a layer together
        number, together = layer_of(name), re.fullmatch(r"blocks\.\d+\.attn\.(own\.)?hook_(\w+)", name)
        if number is None or together is None or len(self.structure.layers[number].parts) < 2:
            return False
        return together[2] != "z" or self.structure.layers[number].z is None

    def _new_run(self, tokens: Tensor, failed: Failed | None = None) -> HookedRun:
        """Return the state of one run with hooks on ids [batch, pos]."""
        head: Any = self.unembed.hook_in if self.structure.head is not None else None
        points = DecoderPoints(list(self.blocks), getattr(self, "hook_embed", None), head)
        return HookedRun(
            self.foreign, self.structure, points, tokens, fused=self.__dict__["fused"], masks=self._masks,
            segments=self._segments, failed=failed, attended=self._attended, mask_kinds=self._mask_kinds,
        )  # fmt: skip

    def attention_window(self, layer: int | str | None) -> int | None:
        """Return the number of latest keys that a query of the last run sees in a layer; None for all, 0 for a mask of another kind."""
        kind = self._mask_kinds.get(layer, CAUSAL) if isinstance(layer, int) else CAUSAL
        window = re.fullmatch(WINDOW.format(r"(\d+)"), kind)
        return int(window[1]) if window else None if kind in (CAUSAL, PADDING, PACKED) or kind.startswith("adds") else 0

    def listen_to_calls(self, failed: Failed | None = None) -> CallsListenedTo:
        """Fire the hook points in calls of the foreign module, with gradients and in this thread, until `close`.

        The ids [batch, pos] are the first tensor of integers with two axes among a call's inputs; without one nothing fires.

        Args:
            failed: Called with an error of a hook point; the rest of that call runs without hooks. Without it errors are raised.
        """

        def run_of(args: Any, kwargs: Any) -> HookedRun | None:
            ids = ids_among(args, kwargs)
            ours = self.lock._is_owned()  # type: ignore[attr-defined]
            return None if ids is None or ours or not torch.is_grad_enabled() else self._new_run(ids, failed)

        return CallsListenedTo(self.foreign, run_of, failed)

    @contextlib.contextmanager
    def hooks(self, fwd_hooks: Hooks = (), bwd_hooks: Hooks = (), *args: Any, **kwargs: Any) -> Iterator[HookedModel]:
        """TransformerLens' `hooks`. They fire in runs of this model; a direct call of the module warns.

        Warns:
            HooksNotCalled: The foreign module is called, or generates, inside the context: no hook fires there.
        """
        with super().hooks(fwd_hooks, bwd_hooks, *args, **kwargs):
            first = self.structure.layers[0]
            part = first.inline[0] if first.inline else first.block
            watch = _PlainCalls(self.foreign, part, [str(name) for name, _ in (*fwd_hooks, *bwd_hooks)])
            try:
                watch.begin()
                yield self
            finally:
                try:
                    watch.end()
                except BaseException:
                    watch.end()
                    raise

    @contextlib.contextmanager
    def _of_all_positions(self) -> Iterator[None]:
        flags = self.__dict__  # not a method: an interrupt could arrive at its first instruction
        with self.lock:
            before, flags["all_positions"] = self.all_positions, True
            try:
                yield
            finally:
                flags["all_positions"] = before

    def forward(self, tokens: Any = None, return_type: str | None = "auto", **kwargs: Any) -> Any:
        """Run on ids [batch, pos] or text, as our own models do; logits equal the module's bitwise.

        A module may return logits of the last position only (nanoGPT without targets); for a loss it is called with targets. An
        `attention_mask` with padding is passed on to a module that takes one. Raises `WorkbenchError` for a loss of a module without
        logits.
        """
        flags = self.__dict__
        with self.lock:  # no context manager of ours, for the speed of calls without hooks
            before = self.all_positions
            named = not kwargs.keys().isdisjoint(("input_ids", "labels"))
            flags["all_positions"] = before or return_type in ("loss", "both", "output") or named
            try:
                return super().forward(tokens, return_type, **kwargs)
            finally:
                flags["all_positions"] = before

    def everywhere(self, tokens: Any) -> Tensor:
        """Return logits [batch, pos, d_vocab] of every position, also if the module usually returns the last ones only."""
        with self._of_all_positions():
            return self(tokens)

    def everywhere_with_cache(self, tokens: Any, names: NamesFilter) -> tuple[Tensor, Cache]:
        """Return logits of every position and the named activations of the same run."""
        with self._of_all_positions():
            return self.run_with_cache(tokens, names)

    def run_with_segments(self, tokens: Any, *, everywhere: bool = False) -> tuple[Any, Segments]:
        """Return the output of a run, and its padding and documents.

        Args:
            tokens: Ids [batch, pos].
            everywhere: Whether to return logits of every position.

        Raises:
            BadData: A row is padding alone.
            WorkbenchError: A mask hides earlier tokens and is neither padding nor packing.
        """
        ids = self.to_tokens(tokens)
        with self._of_all_positions() if everywhere else self.lock, torch.no_grad():
            self._masks = masks = SeenMasks(ids)
            try:
                return self(ids), masks.segments()
            finally:
                self._masks = None

    def run_with_attended(self, tokens: Tensor, names: NamesFilter) -> tuple[Cache, dict[tuple[int, str], Tensor]]:
        """Return the cache of a run, and the queries and keys whose products are the scores, by layer and `q` or `k`.

        They belong to the attentions with a hooked point, [batch, pos, head, d_head] each, after rotation and norms. Unlike
        `rot_q` and `rot_k` they exist for any mask, soft cap or sink logit, and their scale is not in them.
        """
        with self.lock:
            attended = dict[tuple[int, str], Tensor]()
            self._attended = attended
            try:
                return self.run_with_cache(tokens, names)[1], attended
            finally:
                self._attended = None

    @contextlib.contextmanager
    def by_document(self, segments: Segments | None) -> Iterator[None]:
        """Leave padding out of attention statistics, and use each document's first token as the sink, while open."""
        with self.lock:
            before, self._segments = self._segments, segments
            try:
                yield
            finally:
                self._segments = before

    @property
    def n_logits(self) -> int:
        return self.structure.predicted or self.config.d_vocab

    @property
    def ln_final(self) -> Any:
        """Refused: the final norm of an observed module may be no module; `decompose` applies it."""
        raise WorkbenchError(
            f"{type(self.foreign).__name__} is observed from outside, its final norm is not ours to apply: ask workbench.decompose, "
            "prompts.logit_attribution or prompts.logit_lens"
        )

    def anatomy(self) -> ObservedAnatomy:
        """Return the parts of its stream and logits, recognised on the example tokens, anew if weights, modules or mode changed."""
        with self.lock:
            state = (
                self.foreign.training, [id(module) for module in self.foreign.modules()],
                [(name, sample.tolist() if sample.ndim else int(sample)) for name, sample in samples(self.foreign, fast=True)],
            )  # fmt: skip
            if self._recognized is None or self._recognized[0] != state:
                self._recognized = state, self._recognize(self.foreign, None), {}
            _, (structure, paths), written = self._recognized
            return ObservedAnatomy(self, structure, paths, written)

    def _takes(self, *names: str) -> bool:
        """Return whether a call with ids can pass these further arguments to the module."""
        calls = [inspect.signature(call).parameters.values() for call in (self._call, self._call_all)]
        passes = all(any(p.kind is p.VAR_KEYWORD for p in parameters) for parameters in calls)
        return passes and set(names) <= inspect.signature(self.foreign.forward).parameters.keys()

    @property
    def reads_masks(self) -> bool:  # type: ignore[override]
        """True if the module takes an `attention_mask` beside ids."""
        return self._takes("attention_mask")

    @property
    def decodes_with_cache(self) -> bool:
        """True if generation uses the module's own key-value cache: in transformers' models, while no hook is registered."""
        library = sys.modules.get("transformers")
        ours = library is None or not isinstance(self.foreign, library.PreTrainedModel)
        return not ours and self._takes("past_key_values", "use_cache") and not any(map(is_hooked, self.hook_points()))

    def new_cache(self, batch: int = 1, **_: Any) -> Any:
        """Return a cache that transformers' module fills; refused for other modules, and while hooks are registered."""
        if not self.decodes_with_cache:
            raise WorkbenchError(
                "this observed module runs whole sequences: generate with use_cache=False, which calls the hooks at every token. "
                "Key-value caches are those of transformers' modules without hooks"
            )
        return ModuleCache(self, batch)

    def stream_at(self, tokens: Tensor, layer: int) -> Tensor:
        """Return the stream [batch, pos, d_model] that block `layer` reads, or with layer L the final norm; the module runs to its end."""
        streams: list[Tensor] = []
        with self.hooks([(stream_hook(layer, self.config.n_layers), lambda x, hook: streams.append(x))]):
            self.logits(tokens)
        return streams[-1]

    def save_pretrained(self, folder: str | Path, **options: Any) -> Any:
        """Save the module as its library does; raise `WorkbenchError` if it has no `save_pretrained`."""
        if not hasattr(self.foreign, "save_pretrained"):
            cure = "save the module's weights, torch.save(module.state_dict(), path)"
            raise WorkbenchError(f"{type(self.foreign).__name__} has no save_pretrained: {cure}")
        return self.foreign.save_pretrained(folder, **options)

    def logits(self, tokens: Tensor, cache: Any = None, mask: Tensor | None = None) -> Tensor:
        """Return the module's logits [batch, pos, d_vocab] for ids [batch, pos], or its output if it has none."""
        if self.all_positions and self.structure.logits is None:
            name = type(self.foreign).__name__
            raise WorkbenchError(
                f"{name} gives no logits [batch, pos, d_vocab]: there is no loss. Pass observe() a call= that returns them, as "
                "call=lambda m, ids: m.model(ids), or what a forward hook on its head keeps"
            )
        if self.mixes_positions and self._masks is None:
            self._masks = masks = SeenMasks(tokens)
            try:
                output = self.logits(tokens, cache, mask)
                if not bool((masks.segments().ids == 1).all()):
                    self.refuse_parts()
                return output
            finally:
                self._masks = None
        call = self._call_all if self.all_positions else self._call
        if mask is not None:
            call = partial(call, attention_mask=mask)
        if cache is not None:
            if self.hook_state.enabled:
                raise WorkbenchError("hooks of an observed module see whole sequences: call it without past_kv_cache")
            call = partial(cache.call, call)
        try:
            if not self.hook_state.enabled and self._masks is None:
                return self._logits_in(call(self.outer, tokens), tokens)
            refuse_dropout(self.foreign)
            run = self._new_run(tokens)
            output = self._logits_in(guarded(run, call, self.foreign, tokens), tokens)
            points = self.hook_dict.items()
            silent = [n for n, p in points if (p._forward_hooks or p._backward_hooks) and n not in run.fired]
            if silent:
                layers = sorted({layer for name in silent if (layer := layer_of(name)) is not None})
                named = f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
                where = f"{named} did not run" if layers else "these places were not passed"
                more = f" and {len(silent) - 3} more" if len(silent) > 3 else ""
                what = f"these hooks did nothing: {', '.join(silent[:3])}{more}"
                warn_caller(f"{where} on these tokens as on the example, so {what}", NotMeasured)
            return output
        except (RuntimeError, IndexError, AssertionError) as error:
            refuse_ids(tokens, self.config.d_vocab)
            known = self.config.n_ctx < UNLIMITED
            if not known and self.hook_state.enabled:
                with contextlib.suppress(Exception), torch.no_grad():
                    self._call(self.foreign, tokens)
                    known = True  # it runs without hooks, so the error is a hook's
            if known:
                raise
            raise WorkbenchError(
                f"{type(self.foreign).__name__} cannot read {tokens.shape[1]} tokens, and nothing says how many it can "
                f"({type(error).__name__}: {error}); a builder's run may say so with --config n_ctx=N"
            ) from error

    def _logits_in(self, output: Any, tokens: Tensor) -> Any:
        if self.structure.logits is None:
            return output
        logits = get_at(output, self.structure.logits)
        if (axes := self.structure.logits_axes) is not None:
            shaped = Positions(len(tokens), tokens.shape[1], self.structure.layout).shaped(logits, axes)
            logits = logits if shaped is None else shaped
        if self.all_positions and logits.shape[:2] != tokens.shape:
            raise WorkbenchError(
                f"{type(self.foreign).__name__} gives logits {tuple(logits.shape)} for tokens {tuple(tokens.shape)}: a loss "
                "needs them at every position; pass observe() a call= that makes it return them all"
            )
        return logits

    def run_with_cache(  # the second argument may be given by position
        self, tokens: Any, names: NamesFilter = None, *, names_filter: NamesFilter = None, **kwargs: Any
    ) -> tuple[Any, Cache]:
        """Return (output, cache) of a run at the named hook points, as on our own models; `names_filter` equals `names`."""
        return super().run_with_cache(tokens, names_filter=names if names_filter is None else names_filter, **kwargs)

    def run_with_grads(
        self, tokens: Any, names: NamesFilter, loss_fn: LossFn | None = None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """As on our own models. Read-only hook points carry no gradient: they are refused by name and skipped by a filter."""
        selected = self.hook_names(names)
        read_only = [n for n in selected if self.is_read_only(n)]
        if read_only and names is not None and not callable(names):
            raise WorkbenchError(f"{read_only[0]} carries no gradient: it is computed beside the module")
        if "hook_embed" not in self.hook_dict:
            raise WorkbenchError("gradients start at the token embedding, which was not found in this module")
        run, names = super().run_with_grads, [n for n in selected if n not in read_only]
        with self._of_all_positions():
            return guarded(PreservedState(), run, tokens, names, loss_fn)

    @property
    def training(self) -> bool:
        """True if the module is in training mode."""
        return bool(self.foreign is not None and self.foreign.training)

    @training.setter
    def training(self, mode: bool) -> None:
        """Only `train` and `eval` change the module's mode."""

    def train(self, mode: bool = True) -> Observed:
        """Set the module's mode, as `eval()` does."""
        self.foreign.train(mode)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Observed:
        """Move or cast the module, as `cuda`, `cpu`, `half`, `bfloat16`, `float` and `double` do."""
        return self._moved("to", *args, **kwargs)

    def _moved(self, method: str, *args: Any, **kwargs: Any) -> Observed:
        getattr(self.foreign, method)(*args, **kwargs)
        self.__dict__["embed"] = self._embedding()
        return self

    cuda = partialmethod(_moved, "cuda")
    cpu = partialmethod(_moved, "cpu")
    half = partialmethod(_moved, "half")
    bfloat16 = partialmethod(_moved, "bfloat16")
    float = partialmethod(_moved, "float")
    double = partialmethod(_moved, "double")

    def _of_module(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.foreign, method)(*args, **kwargs)

    parameters = partialmethod(_of_module, "parameters")
    named_parameters = partialmethod(_of_module, "named_parameters")
    named_buffers = partialmethod(_of_module, "named_buffers")
    state_dict = partialmethod(_of_module, "state_dict")
    load_state_dict = partialmethod(_of_module, "load_state_dict")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: hooks and the traced structure belong to this process."""
        raise WorkbenchError(
            f"an observed {type(self.foreign).__name__} cannot be pickled: save the module itself, and observe it again where it is loaded"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Observed:
        memo[id(self)] = made = self.__class__.__new__(self.__class__)
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def value_paths(self, tokens: Any = None) -> pd.DataFrame:
        """Fit the sources of every layer's effective values, and of other mixed tensors, now.

        Columns of the result:

        - `source`: `first` (the first layer's values), `own`, an earlier layer, or `table NAME`, a lookup by token id. For streams
          `embed` (the first block's input), `block.<n>`, `own` (the last block's output), or each output by token (`<n>_attn_out`).
        - `coefficient`, `spread`: mean and standard deviation over tokens of weights that depend on the token
          (`attn.hook_v_weights`); spread is NaN for a constant coefficient.
        - `residual`: relative to the target; about 1e-7 for an exact path in float32. Above 0.1 `source` is `unexplained`.
        - `head`: the head, if heads have different coefficients.
        - `into`: `value`, `query` or `key`. `output` is an addition between attention and W_O. `attn.0`, ... are several attentions
          in W_O's input. `stream` is the input of a block (or of the final norm, layer L) that averages outputs.

        Args:
            tokens: Ids [batch, pos]; the example tokens by default. A precise fit needs a few dozen positions.
        """
        with self.lock:
            ids = None if tokens is None else self.to_tokens(tokens)
            return value_path_table(self._recognize(self.foreign, ids)[1])

    @property
    def sites(self) -> pd.DataFrame:
        """Table of the recognised parts: site, layer, found, where, note."""
        blocks: Any = self.blocks
        return site_table(self.structure, [block.mixture for block in blocks])

    @property
    def coverage(self) -> str:
        """Share of the module's layers, attention and parameters that has hook points, in a line."""
        return coverage(self.foreign, self.structure)

    def __repr__(self) -> str:
        name = f"{type(self.foreign).__name__}: {self.architecture}"
        return describe(name, self.structure, self.sites, self.fitted_paths, [*self.notes, self.coverage])

    def _repr_html_(self) -> str:
        shown = value_path_table(self.fitted_paths)._repr_html_()
        return f"<pre style='white-space: pre-wrap'>{escape(repr(self))}</pre>{shown}"


class ModuleCache:
    """The key-value cache of an observed transformers module; `new_cache` makes it and the module fills it."""

    def __init__(self, model: Observed, batch: int) -> None:
        self.model, self.batch, self.length = model, batch, 0
        self.past: Any = None
        self.ids: list[Tensor] = []

    def check(self, model: Observed, ids: Tensor) -> None:
        """Raise `BadData` if ids [batch, pos] of a model cannot continue this cache."""
        n_ctx = model.config.n_ctx
        if model is not self.model or len(ids) != self.batch or self.length + ids.shape[1] > n_ctx:
            raise BadData(
                f"this cache has {self.length} tokens of {self.batch} sequences of one model, and takes {n_ctx - self.length} more; "
                "make another with model.new_cache(batch)"
            )

    def call(self, call: Call, module: nn.Module, ids: Tensor) -> Any:
        """Run the module on the ids after those in the cache, and on all if their keys were rotated by other frequencies."""
        before = self._frequencies()
        output = call(module, ids, past_key_values=self.past, use_cache=True)
        self.ids.append(ids)
        if self.length and any(not torch.equal(a, b) for a, b in zip(before, self._frequencies(), strict=True)):
            output = call(module, torch.cat(self.ids, 1), use_cache=True)
            output["logits"] = output["logits"][:, -ids.shape[1] :]
        self.past, self.length = getattr(output, "past_key_values", None), self.length + ids.shape[1]
        if self.past is None:
            raise WorkbenchError(f"{type(module).__name__} returns no key-value cache: generate with use_cache=False")
        return output

    def _frequencies(self) -> list[Tensor]:
        """Return copies of the rotary frequencies, which depend on the length in some families (longrope)."""
        buffers = self.model.foreign.named_buffers()
        return [x.clone() for name, x in buffers if name.endswith("inv_freq") and not x.is_meta]


class _PlainCalls:
    """Warns once of a direct call of a foreign module, or of its blocks, in this thread."""

    def __init__(self, module: nn.Module, part: str, names: list[str]) -> None:
        self.module, self.names, self.thread = module, names, get_ident()
        # `part` runs in calls of the model without its head
        self.watched = dict.fromkeys((module, module.get_submodule(part)))

    def begin(self) -> None:
        """Begin to watch, if there are hooks; compiled code of the module runs as plain Python, which calls these hooks."""
        if self.names and "torch._dynamo" in sys.modules:
            COMPILED_CODE.begin(self)
        for module in self.watched if self.names else ():
            module.register_forward_pre_hook(self._warn)

    def end(self) -> None:
        """Stop watching."""
        remove_module_hooks(self, self.watched)
        COMPILED_CODE.end(self)

    def _warn(self, module: nn.Module, args: Any) -> None:
        if not self.names or torch.compiler.is_compiling() or get_ident() != self.thread:
            return
        in_backward = torch._C._current_graph_task_id() != -1  # a checkpoint
        if in_backward or isinstance(self.module.__dict__.get("forward"), CallsListenedTo):
            return
        frame = sys._getframe(1)
        while frame.f_back is not None:
            if frame.f_code in _OWN_CALLS:
                return
            frame = frame.f_back
        what = type(self.module).__name__ if module is self.module else f"a part of {type(self.module).__name__}"
        names, self.names = self.names, []
        warn_caller(
            f"hooks at {', '.join(names[:3])}{', ...' if len(names) > 3 else ''} do not fire: {what} was called itself. Call the observed "
            "model on whole sequences of ids, or its generate(..., use_cache=False).",
            HooksNotCalled,
        )


def refuse_dropout(module: nn.Module) -> None:
    """Raise `WorkbenchError` if dropout is active."""
    for part in submodules(module):
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.training and part.p > 0:
            name = next(name for name, other in module.named_modules() if other is part)
            raise WorkbenchError(f"dropout is active ({name}, p={part.p}): call module.eval() first")


_OWN_CALLS = tuple(f.__code__ for f in (Observed.logits, Observed.anatomy, Observed.value_paths))
"""Methods in which the observed model itself calls the module."""
