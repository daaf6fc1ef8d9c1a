"""The base class of hooked models: forward passes, hooks, caches, gradients of activations, generation."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.console import notebook_html
from workbench.errors import BadData, WorkbenchError, refuse_unknown
from workbench.hook_names import (
    QUADRATIC,
    ByHookName,
    NamedHookPoints,
    either_name,
    hook_name,
    is_statistic,
    position_axis,
)
from workbench.kernels.cross_entropy import MIN_LOGITS, refuse_targets, sequence_losses
from workbench.models import generation
from workbench.models.generation import KeyValueCache
from workbench.models.hook_points import (
    IN_A_GRAPH,
    HookedModule,
    HookedRoot,
    HookPoint,
    HookState,
    is_hooked,
    read_only,
)
from workbench.models.options import dtype_option
from workbench.models.patterns_and_gradients import LossFn, NamesFilter, RebuiltPatterns, gradients_at
from workbench.models.transformerlens_attributes import LensTools

if TYPE_CHECKING:
    from transformer_lens.config.transformer_bridge_config import TransformerBridgeConfig

    from workbench.models.activation_cache import Cache

Hooks = Sequence[tuple[str | Callable[[str], bool], Callable[..., Any]]]
RETURN_TYPES = ("auto", "logits", "loss", "both", "output", None)
IGNORED = -100
"""The label of a token without a loss, as in PyTorch and transformers."""


def next_token_loss(logits: Tensor, tokens: Tensor, *, per_token: bool = False) -> Tensor:
    """Return the mean next-token cross-entropy in nats, or one per token [batch, pos - 1], computed in float32 or better.

    Logits [batch, pos, d_vocab], tokens [batch, pos]. Raises `BadData` for sequences of one token.
    """
    if tokens.shape[1] < 2:
        raise BadData("a next-token loss needs sequences of 2 tokens or more, got 1")
    if logits.requires_grad or logits.numel() < MIN_LOGITS:
        wide = logits[:, :-1].float() if logits.dtype in (torch.float16, torch.bfloat16) else logits[:, :-1]
        try:
            how = "none" if per_token else "mean"
            loss = F.cross_entropy(wide.flatten(0, 1), tokens[:, 1:].flatten(), reduction=how)
        except IndexError:  # on a CPU; a GPU raises its own error later
            refuse_targets(tokens[:, 1:], logits.shape[-1])
            raise
        return loss.unflatten(0, (tokens.shape[0], -1)) if per_token else loss
    losses = sequence_losses(logits, tokens)
    return losses if per_token else losses.mean()


def labelled_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean next-token cross-entropy in nats over the labels [batch, pos] that are not -100."""
    losses = next_token_loss(logits, labels, per_token=True)
    return losses.sum() / (labels[:, 1:] != IGNORED).sum()


def id_table(given: Any, what: str) -> Tensor:
    """Return token ids [batch, pos], also from ids [pos]; raise `BadData` for anything else and for none."""
    ids = given
    if not isinstance(ids, Tensor):
        try:
            ids = torch.as_tensor(given)
        except (TypeError, ValueError, RuntimeError) as error:
            needs = "text or whole numbers, a table of token ids [batch, pos] with rows of one length"
            raise BadData(f"{what} must be {needs}: {error}") from error
    ids = ids[None] if ids.ndim == 1 else ids
    if not ids.numel():
        raise BadData(f"{what} must be text or token ids [batch, pos] that are not empty")
    if ids.ndim != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise BadData(f"{what} of shape {tuple(ids.shape)}, {ids.dtype}: needs token ids, whole numbers [batch, pos]")
    return ids


def refuse_ids(ids: Tensor, d_vocab: int) -> None:
    """Raise `BadData` for token ids outside a vocabulary."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= d_vocab:
        raise BadData(f"token ids {low}..{high} leave the vocabulary 0..{d_vocab - 1}")


def refuse_token(model: HookedModel, token: object) -> None:
    """Raise `BadData` for anything but the id of a token with a logit."""
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < model.n_logits:
        raise BadData(f"token id {token!r} leaves the vocabulary of the logits, 0..{model.n_logits - 1}")


def slice_positions(tensor: Tensor, positions: Any, axis: int) -> Tensor:
    """Return the positions of a tensor that one of TransformerLens' slices selects."""
    from transformer_lens.utilities import Slice

    return Slice.unwrap(positions).apply(tensor, dim=axis)


class HookedModel(NamedHookPoints, LensTools, HookedModule, HookedRoot):
    """A hooked decoder on token ids or text. A lock lets one thread run it at a time, since hooks are state of the module.

    Subclasses define `logits(tokens)` and call `setup()` last.
    """

    embed: nn.Embedding
    unembed: nn.Linear
    ln_final: Any
    blocks: Any
    caches = False  # whether `logits` takes a key-value cache
    start_token: int | None = None  # the id that begins every text
    reads_masks = False  # whether `logits` takes a mask of the tokens [batch, pos] as its third argument
    mixes_positions = ""  # an edit that is set and mixes or counts the positions of a prompt, as text

    def __init__(self, config: ModelConfig, architecture: str) -> None:
        super().__init__()
        self.config, self.architecture = config, architecture
        self.options: dict[str, Any] = {}
        self.assumed = False  # whether the architecture was assumed on loading
        self.source: dict[str, Any] = {}  # where the weights come from, set on loading
        self.tokenizer: Any = None
        self.absent: dict[str, str] = {}  # hook points that other models have -> why this one lacks them
        self.lock = threading.RLock()
        self.hook_state = HookState(self)

    def attention_window(self, layer: int | str | None) -> int | None:
        """Return the number of latest keys that a query of the last run sees in a layer; None for all, 0 for a mask of another kind."""
        return None

    def _repr_html_(self) -> str:
        shape, weight = self.config, self.embed.weight
        facts = {
            "options": ", ".join(f"{key} = {value}" for key, value in self.options.items()),
            "parameters": f"{sum(p.numel() for p in self.parameters()):,}, {str(weight.dtype).removeprefix('torch.')} on {weight.device}",
            "shape": f"{shape.n_layers} layers of width {shape.d_model}, {shape.n_heads} heads, {shape.n_key_value_heads} of values",
            "reads": f"{shape.d_vocab} tokens, up to {shape.n_ctx} at a time" + ("" if self.tokenizer else ", without a tokenizer"),
            "from": " ".join(f"{self.source[key]}" for key in ("run", "path") if key in self.source),
            "step": self.source.get("step"),
            "seed": self.source.get("seed"),
            "architecture": "assumed: the files do not say" if self.assumed else None,
        }  # fmt: skip
        return notebook_html(f"{type(self).__name__}: {self.architecture}", facts)

    def logits(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Map token ids [batch, pos] to logits [batch, pos, d_vocab]; with a cache the ids continue its tokens."""
        raise NotImplementedError

    def losses(self, tokens: Tensor) -> Tensor | None:
        """Return the loss of every next token [batch, pos - 1] from chunks of logits; None if chunks have no advantage."""
        return None

    @property
    def cfg(self) -> TransformerBridgeConfig:
        """TransformerLens' config of this shape, with the present device and dtype of the weights."""
        from transformer_lens.config.transformer_bridge_config import TransformerBridgeConfig

        if "_cfg" not in self.__dict__:
            shape = self.config
            self._cfg = TransformerBridgeConfig(
                d_model=shape.d_model, d_head=shape.d_head, n_layers=shape.n_layers, n_ctx=shape.n_ctx, n_heads=shape.n_heads,
                n_key_value_heads=shape.n_key_value_heads, d_mlp=shape.d_mlp, d_vocab=shape.d_vocab, act_fn="silu",
                gated_mlp=True, normalization_type="RMS", final_rms=True, eps=shape.rms_norm_eps, rotary_base=shape.rope_theta,
                default_prepend_bos=self.start_token is not None,
            )  # fmt: skip
        weight = self.embed.weight
        self._cfg.device, self._cfg.dtype = str(weight.device), weight.dtype
        return self._cfg

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @property
    def n_logits(self) -> int:
        """Number of tokens with a logit, which in observed models may differ from the number of token ids."""
        return self.config.d_vocab

    def stream_paths(
        self, layer: int, *, mid: bool = False, cache: Mapping[str, Tensor] | None = None
    ) -> dict[str, float | Tensor]:
        """Return the coefficients of outputs in a stream that are not 1; see `Transformer.stream_paths`."""
        return {}

    def recipes(self) -> Sequence[Any]:
        """Return the recipes that rebuild patterns from a cache, for layers whose attention a shortcut defines."""
        return ()

    def forward(
        self,
        tokens: Any = None,
        return_type: str | None = "auto",
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        stop_at_layer: int | None = None,
        loss_per_token: bool = False,
        past_kv_cache: Any = None,
    ) -> Any:
        """Run the model.

        Args:
            tokens: Ids [batch, pos] or [pos], or text.
            return_type: `logits`, `loss` (the mean, in nats), `both`, `output` (transformers' `CausalLMOutput` with `.logits` and
                `.loss`), or None. By default `output` after `input_ids` or `labels`, else `logits`.
            input_ids: The tokens under transformers' name, as in `model(**tokenizer(text, return_tensors="pt"))`.
            attention_mask: 0 at padding [batch, pos]. Padding after the tokens changes nothing before it, so that it is only left out of
                the loss. An observed module reads the mask if it takes one.
            labels: Ids [batch, pos] for the loss, -100 where none counts, as in transformers. By default the tokens.
            stop_at_layer: Return the residual stream [batch, pos, d_model] that this block reads, as in TransformerLens, without running
                it; negative layers count from the end.
            loss_per_token: Whether to return one loss per token.
            past_kv_cache: A cache of `new_cache`. The tokens continue those in the cache and are added to it, without gradients.

        Raises:
            BadData: The input is empty or too long, an id is outside the vocabulary, padding comes first, or labels do not fit.
            UnknownName: Another `return_type`.
        """
        refuse_unknown("return_type", return_type, RETURN_TYPES)
        if (tokens is None) == (input_ids is None):
            raise BadData("give tokens or input_ids=, one of them")
        if return_type == "auto":
            return_type = "logits" if input_ids is None and labels is None else "output"
        ids = self.to_tokens(input_ids if tokens is None else tokens)
        mask = self._padding(ids, attention_mask)
        if self.mixes_positions and (mask is not None or (past_kv_cache is not None and past_kv_cache.length)):
            self.refuse_parts()
        if labels is not None or mask is not None:
            if loss_per_token or past_kv_cache is not None:
                raise WorkbenchError("loss_per_token and past_kv_cache take neither labels nor padding")
            labels = self._labels(ids, labels, mask)
        if stop_at_layer is not None:
            layers = self.config.n_layers
            if past_kv_cache is not None or not -layers <= stop_at_layer <= layers:
                raise BadData(f"stop_at_layer={stop_at_layer}: a layer -{layers}..{layers}, without a past_kv_cache")
            with self.lock:
                return self._run(self.stream_at, ids, stop_at_layer % layers if stop_at_layer < 0 else stop_at_layer)
        more = () if mask is None or not self.reads_masks else (None, mask)
        if torch.compiler.is_compiling():
            if self.hook_state.enabled:
                raise WorkbenchError(IN_A_GRAPH)  # without fullgraph PyTorch then runs it outside the graph
            if past_kv_cache is None:
                logits = self.logits(ids, *more)
            else:
                with torch.no_grad():
                    past_kv_cache.check(self, ids)
                    logits = self.logits(ids, past_kv_cache)
        elif past_kv_cache is not None:
            with self.lock, torch.no_grad():
                past_kv_cache.check(self, ids)
                logits = self._run(self.logits, ids, past_kv_cache)
        else:
            with self.lock:
                losses = self._run(self.losses, ids) if return_type == "loss" and labels is None else None
                if losses is not None:
                    return losses if loss_per_token else losses.mean()
                logits = self._run(self.logits, ids, *more)
        if return_type in ("logits", None):
            return logits if return_type else None
        if return_type == "output":
            from transformers.modeling_outputs import CausalLMOutput

            return CausalLMOutput(loss=None if labels is None else labelled_loss(logits, labels), logits=logits)
        loss = (
            next_token_loss(logits, ids, per_token=loss_per_token) if labels is None else labelled_loss(logits, labels)
        )
        return loss if return_type == "loss" else (logits, loss)

    def refuse_parts(self) -> None:
        """Raise `BadData`: the edit that is set would mix padding, or the new tokens of a cached run alone."""
        raise BadData(
            f"{self.mixes_positions} mixes or counts the positions of a prompt: run complete prompts without padding and past_kv_cache"
        )

    def _padding(self, ids: Tensor, attention_mask: Any) -> Tensor | None:
        """Return which ids are tokens [batch, pos], None if all are; raise `BadData` for padding that would change the logits."""
        if attention_mask is None:
            return None
        mask = torch.as_tensor(attention_mask, device=ids.device) != 0
        mask = mask[None] if mask.ndim == 1 else mask
        if mask.shape != ids.shape:
            raise BadData(f"attention_mask of shape {tuple(mask.shape)} for tokens of shape {tuple(ids.shape)}")
        if bool(mask.all()):
            return None
        if not self.reads_masks and bool((mask[:, 1:] & ~mask[:, :-1]).any()):
            raise BadData(
                "attention_mask hides tokens before others, and this model reads every earlier token: pad on the right "
                "(tokenizer.padding_side = 'right'), or run the rows one by one"
            )
        return mask

    def _labels(self, ids: Tensor, labels: Any, mask: Tensor | None) -> Tensor:
        """Return the labels [batch, pos], by default the tokens after a token; raise `BadData` if they do not fit."""
        if labels is None:
            assert mask is not None
            follows = torch.cat((mask[:, :1], mask[:, :-1]), 1)
            return ids.masked_fill(~(mask & follows), IGNORED)
        labels = torch.as_tensor(labels, device=ids.device)
        labels = labels[None] if labels.ndim == 1 else labels
        if labels.shape != ids.shape or labels.is_floating_point():
            needed = f"token ids {tuple(ids.shape)} or -100"
            raise BadData(f"labels of shape {tuple(labels.shape)}, {labels.dtype}: {needed}")
        counted = labels[:, 1:][labels[:, 1:] != IGNORED]
        if not len(counted) or int(counted.min()) < 0:
            raise BadData("labels after the first position are all -100, or negative: give token ids, -100 for no loss")
        if mask is not None and bool((labels[~mask] != IGNORED).any()):
            raise BadData("labels count padding in the loss: give labels.masked_fill(attention_mask == 0, -100)")
        return labels.long()

    def stream_at(self, tokens: Tensor, layer: int) -> Tensor:
        """Return the stream [batch, pos, d_model] that block `layer` reads, or with layer L the final norm, for ids [batch, pos]."""
        raise NotImplementedError

    def loss_fn(self, logits: Tensor, tokens: Tensor, *, per_token: bool = False) -> Tensor:
        """Return TransformerLens' loss: the mean next-token cross-entropy in nats, or one per token [batch, pos - 1]."""
        return next_token_loss(logits, tokens, per_token=per_token)

    def everywhere(self, tokens: Any) -> Tensor:
        """Return the logits [batch, pos, d_vocab] of every position."""
        return self(tokens)

    def setup(self) -> None:
        """Name the hook points and share the hook state among all modules with hook points."""
        super().setup()
        self.mod_dict, self.hook_dict = ByHookName(self.mod_dict), ByHookName(self.hook_dict)
        for module in self.modules():
            if isinstance(module, HookedModule | HookPoint):
                module.hook_state = self.hook_state
            if isinstance(module, HookedModule):
                # lookups of children get three times faster without `nn.Module.__getattr__`; `setattr` of a child removes such an entry
                children = {name: child for name, child in module._modules.items() if child is not None}
                module.__dict__.update(children)

    def new_cache(self, batch: int = 1, *, reserve: int = 0, dtype: torch.dtype | str | None = None) -> KeyValueCache:
        """Return an empty key-value cache for `batch` sequences, with memory for `reserve` tokens, in `dtype`."""
        if not self.caches:
            raise WorkbenchError(f"{self.architecture} has no key-value cache: generate with use_cache=False")
        if batch < 1 or not 0 <= reserve <= self.config.n_ctx:
            raise BadData(f"batch={batch}, reserve={reserve}: a batch from 1, room for 0..{self.config.n_ctx} tokens")
        return KeyValueCache(self, batch, self.config.n_ctx, reserve=reserve, dtype=dtype_option(dtype))

    @property
    def decodes_with_cache(self) -> bool:
        """True if generation uses a key-value cache by default."""
        return self.caches and not self.mixes_positions

    def generate(
        self,
        prompt: Any = None,
        max_new_tokens: int = 64,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        do_sample: bool | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Any = None,
        use_cache: bool | None = None,
    ) -> Any:
        """Continue a prompt, without gradients.

        Args:
            prompt: Text, a list of texts, or ids [pos] or [batch, pos].
            max_new_tokens: Largest number of new tokens.
            input_ids: The prompt's ids under transformers' name, as in `model.generate(**tokenizer(text, return_tensors="pt"))`.
            attention_mask: Must be 1 everywhere: run prompts of different lengths one by one.
            do_sample: False takes the likeliest token, as temperature 0 does. The default samples, unlike transformers.
            temperature: 0 takes the likeliest token.
            top_k: Sample from the k likeliest tokens, as in transformers; applied before `top_p`.
            top_p: Sample from the smallest set with this probability, as in transformers.
            seed: Equal seeds give equal tokens, with or without a cache and in any batch. None draws a seed from PyTorch's generator.
            stop: Token ids or texts that end a row, in addition to the tokenizer's end of a document; () for none at all.
            use_cache: False runs the complete sequence for each token, so hooks see all of it. With a cache they see the prompt,
                then one token at a time. By default True if the model has a cache; observed modules with hooks use none.

        Returns:
            Prompt and continuation in the form of the prompt. Text excludes the stop. Ids include it and are padded with the
            tokenizer's end id, or with the row's last token. `generation.generate` also returns lengths and ends.

        Raises:
            BadData: The tokens would exceed the context; checked before the model runs.
            WorkbenchError: An option is out of range.
        """
        if (prompt is None) == (input_ids is None):
            raise BadData("give a prompt or input_ids=, one of them")
        prompt = input_ids if prompt is None else prompt
        if attention_mask is not None and not bool(torch.as_tensor(attention_mask).all()):
            raise BadData("attention_mask has padding: generate from prompts of different lengths one by one")
        result = generation.generate(
            self, prompt, max_new_tokens, do_sample=do_sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
            stop=stop, use_cache=use_cache,
        )  # fmt: skip
        rows = result.texts if generation.is_text(prompt) else result.ids
        return rows[0] if generation.is_single(prompt) else rows

    def stream(self, prompt: Any, max_new_tokens: int = 64, **options: Any) -> Iterator[Any]:
        """Yield the continuation of `generate`, one item per token: text, texts, an id, or ids [batch].

        A piece of text may be empty, as incomplete characters and possible starts of a stop are held back.
        """
        return generation.stream(self, prompt, max_new_tokens, **options)

    def _logits(self, ids: Tensor) -> Tensor:
        return self._run(self.logits, ids)

    def _run(self, how: Callable[..., Any], ids: Tensor, *more: Any) -> Any:
        if self.hook_state.enabled:
            self.hook_state.disable()  # before the check, so that a hook registered meanwhile enables them again
            if any(map(is_hooked, self.hook_points())):
                self.hook_state.enable()
        try:
            return how(ids, *more)
        except IndexError:  # from the embedding
            refuse_ids(ids, self.config.d_vocab)
            raise

    def to_tokens(self, text: Any, prepend_bos: bool | None = None) -> Tensor:
        """Return token ids [batch, pos] on the model's device from text, texts of equal length in tokens, or ids.

        By default a text begins with a start token where every sequence of the model's training did, or where the tokenizer of another
        library puts one.
        """
        ids = text
        if generation.is_text(text):
            if self.tokenizer is None:
                raise BadData("this model came without a tokenizer: give token ids instead of text")
            rows = [self.tokenizer.encode(t) for t in ([text] if isinstance(text, str) else text)]
            start = self.start_token if prepend_bos is None else self.tokenizer.bos_id if prepend_bos else None
            rows = rows if start is None else [[start, *row] for row in rows]
            if len(lengths := sorted({len(row) for row in rows})) > 1:
                raise BadData(f"texts of unequal length {lengths} in tokens: run them one by one")
            ids = torch.tensor(rows, dtype=torch.long)
        if isinstance(ids, Mapping):  # with padding in another entry
            raise BadData('tokens are a tokenizer\'s encoding: give its ids, encoding["input_ids"]')
        ids = id_table(ids, "tokens")
        if (length := ids.shape[1]) > (n_ctx := self.config.n_ctx):
            raise BadData(f"{length} tokens exceed the model's context of n_ctx={n_ctx}: shorten the text")
        device = self.embed.weight.device
        if device != ids.device and ids.device.type == "cpu":  # on a GPU a wrong id would end the CUDA context
            refuse_ids(ids, self.config.d_vocab)
        return ids.to(device, torch.long)

    @contextlib.contextmanager
    def hooks(self, fwd_hooks: Hooks = (), bwd_hooks: Hooks = (), *args: Any, **kwargs: Any) -> Iterator[HookedModel]:
        """Register hooks as in TransformerLens, under the model's lock; unknown names are refused."""
        self.hook_names([name for name, _ in (*fwd_hooks, *bwd_hooks) if isinstance(name, str)])
        forward, backward = (
            [(name if isinstance(name, str) else either_name(name), hook) for name, hook in hooks]
            for hooks in (fwd_hooks, bwd_hooks)
        )
        with self.lock:
            level = self.context_level
            try:
                with super().hooks(forward, backward, *args, **kwargs):
                    yield self
            except BaseException:  # an interrupt while hooks are registered or removed would leave some
                self.context_level = level
                for point in self.hook_points():
                    point.remove_hooks("both", level=level + 1)
                    point.remove_orphans()
                raise

    def hook_names(self, names: NamesFilter) -> list[str]:
        """Return the hook points of a filter (a name, names, a function, None for all); unknown names are refused.

        Names and functions may use the alias `attn.first` for `attn.source.0`; the result has resolved names.
        """
        if callable(names):
            return list(filter(either_name(names), self.hook_dict))
        if names is None:
            return list(self.hook_dict)
        resolved = list(map(hook_name, [names] if isinstance(names, str) else names))
        for name in resolved:
            if name in self.absent:
                raise WorkbenchError(f"{name} does not exist: {self.absent[name]}")
            refuse_unknown("hook", name, self.hook_dict)
        return resolved

    def run_with_cache(
        self, tokens: Any, *, names_filter: NamesFilter = None, device: Any = None, remove_batch_dim: bool = False,
        incl_bwd: bool = False, reset_hooks_end: bool = True, clear_contexts: bool = False, pos_slice: Any = None, **kwargs: Any,
    ) -> tuple[Any, Cache]:  # fmt: skip
        """Run the model and return (output, ActivationCache); options as in TransformerLens and in `forward`.

        Without a filter everything is cached, but scores and patterns are rebuilt when they are read; with a `pos_slice`
        they are cached too. Raises `UnknownName` for a hook point that does not exist.
        """
        from workbench.models.activation_cache import Cache

        if kwargs.get("past_kv_cache") is not None:
            raise WorkbenchError("run_with_cache takes whole sequences: read cached decoding through model.hooks(...)")
        ids = self.to_tokens(tokens)
        if remove_batch_dim and len(ids) > 1:
            raise WorkbenchError(f"remove_batch_dim: the batch has {len(ids)} sequences, not 1")
        with self.lock:
            names = self.hook_names(names_filter)
            if names_filter is None and pos_slice is None:
                names = [n for n in names if not n.endswith(QUADRATIC) or is_hooked(self.hook_dict[n])]
            settings = (incl_bwd, device, remove_batch_dim, None, pos_slice)
            cache, forward, backward = self.get_caching_hooks(names, *settings)
            with self.hooks(forward, backward, reset_hooks_end, clear_contexts):
                out = self(ids, **kwargs)
                if incl_bwd:
                    out.backward()
        if isinstance(cache, RebuiltPatterns):
            cache.recipes = self.recipes()
        return out, Cache(cache, self, has_batch_dim=not remove_batch_dim)

    def get_caching_hooks(
        self,
        names_filter: Any = None,
        incl_bwd: bool = False,
        device: Any = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: Any = None,
    ) -> tuple[dict[str, Tensor], list[Any], list[Any]]:
        """Return caching hooks as in TransformerLens, with the position axis from `names.position_axis`."""
        cache = RebuiltPatterns() if cache is None else cache

        @read_only
        def save(tensor: Tensor, hook: HookPoint, suffix: str = "") -> None:
            axis = position_axis(str(hook.name))
            value = tensor.detach() if device is None else tensor.detach().to(device)
            if axis is not None:
                value = value[0] if remove_batch_dim else value
                value = value if pos_slice is None else slice_positions(value, pos_slice, axis)
            cache[f"{hook.name}{suffix}"] = value

        names = self.hook_names(names_filter)
        backward = [(n, partial(save, suffix="_grad")) for n in names if incl_bwd and not is_statistic(n)]
        return cache, [(name, save) for name in names], backward

    def add_caching_hooks(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Register the hooks of `get_caching_hooks` until `reset_hooks`, and return the dictionary that they fill."""
        cache, forward, backward = self.get_caching_hooks(*args, **kwargs)
        for direction, hooks in (("fwd", forward), ("bwd", backward)):
            for name, hook in hooks:
                self.add_hook(name, hook, direction)
        return cache

    def run_with_grads(
        self, tokens: Any, names: NamesFilter, loss_fn: LossFn | None = None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Return the loss, the activations and the loss's gradients at the named hook points.

        A gradient covers the readers of one hook point only: at `source.0.hook_v` it covers one layer's branch. Parameter gradients stay
        unchanged, and parameters may be frozen.

        Args:
            tokens: Ids or text.
            names: Hook points, or `<module>.hook_in` for the input of any module. Its gradient covers that module only:
                `blocks.2.attn.v_proj.hook_in` is the value path's part of the gradient at `blocks.2.attn.hook_in`.
            loss_fn: `loss_fn(logits, tokens)`, by default the mean next-token loss in nats.

        Returns:
            (loss, activations, gradients). Streamed statistics have no gradient: their names are refused, filters skip them.
        """
        return gradients_at(self, tokens, names, loss_fn or next_token_loss)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write a folder that `workbench.load` opens again, with the tokenizer, and return it.

        A vanilla Transformer opens in transformers too, as after `workbench export`. Raises `WorkbenchError` for a folder that is not
        empty.
        """
        saving: Any = importlib.import_module("workbench.checkpoints.saving")  # a package above this one
        return saving.save_pretrained(self, folder)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("lock", "forward")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock = threading.RLock()
