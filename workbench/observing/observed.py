"""Somebody else's decoder under our names: hook points, caches, gradients and interventions, and nothing of it rewritten.

observed = workbench.observe(module, example_tokens)
logits, cache = observed.run_with_cache(tokens, names_filter=["blocks.1.attn.hook_v"])
workbench.measure(observed, ["importance_entropy", "value_drain"], tokens)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pandas as pd
from torch import Tensor, nn

from workbench.errors import WorkbenchError
from workbench.models.activations import Cache
from workbench.models.hooked import HookedModel, LossFn, NamesFilter
from workbench.models.points import Part, Point
from workbench.names import STATISTICS, is_statistic
from workbench.observing.anatomy import UNLIMITED, Anatomy, Layer
from workbench.observing.layouts import get
from workbench.observing.listening import Listening
from workbench.observing.paths import SEEN, Path, architecture_of, frame
from workbench.observing.reporting import absences, sites, summary


class Table(Part):
    """The head: what it reads, and its matrix."""

    def __init__(self, owner: nn.Module | None) -> None:
        super().__init__()
        self.hook_in = Point()
        self.__dict__["owner"] = owner

    @property
    def weight(self) -> Tensor:
        """[d_vocab, d_model]."""
        return self.__dict__["owner"].weight


class Observed(HookedModel):
    """A foreign decoder with our hook points; made by `workbench.observe`.

    Its parameters stay where they are and it is called as it is: without listeners a run is the module's own. With some,
    hooks and a function mode stand around that one run. `sites` says what was found, `value_paths()` where values come from.
    """

    def __init__(
        self,
        foreign: nn.Module,
        anatomy: Anatomy,
        paths: list[Path],
        *,
        outer: nn.Module,
        usual: Callable[[nn.Module, Tensor], Any],
        every: Callable[[nn.Module, Tensor], Any],
        again: Callable[[nn.Module, Tensor | None], tuple[Anatomy, list[Path]]],
        notes: list[str],
        tokenizer: Any,
    ) -> None:
        name, options, why = architecture_of(anatomy.layers, paths)
        super().__init__(anatomy.config, name)
        self.options, self.tokenizer = options, tokenizer
        self.source = {"path": f"observed {type(foreign).__name__}"}
        self.anatomy, self.fits, self.notes = anatomy, paths, [*notes, *anatomy.notes, *([why] if why else [])]
        # beside the registered modules: nothing of the foreign one is renamed, moved, saved or put into another mode
        self.__dict__["foreign"], self.__dict__["outer"] = foreign, outer
        self.__dict__["embed"] = self._embedding()
        self._usual, self._every, self._again = usual, every, again
        self.full = False  # whether logits of every position are needed
        self._points()
        self.absent = absences(self)
        self.setup()

    def _embedding(self) -> Any:
        if self.anatomy.embed is not None:
            return self.foreign.get_submodule(self.anatomy.embed.module)
        return SimpleNamespace(weight=next(p for p in self.foreign.parameters() if p.is_floating_point()))

    # ---- hook points -------------------------------------------------------------------------------------------------

    def _points(self) -> None:
        if self.anatomy.embed is not None:
            self.hook_embed = Point()
        self.blocks = nn.ModuleList(self._block(i, layer) for i, layer in enumerate(self.anatomy.layers))
        if self.anatomy.head is not None:
            self.unembed = Table(self.foreign.get_submodule(self.anatomy.head.module))  # type: ignore[assignment]

    def _block(self, i: int, layer: Layer) -> Part:
        part = Part()
        part.attn = attn = Part()
        names = [
            *(("resid_pre", "resid_post") if layer.streams else ()),
            *(n for n in ("attn_out", "mlp_out") if getattr(layer, n) is not None),
        ]
        for name in names:
            setattr(part, f"hook_{name}", Point())
        shown = ["v", "z", *(n for n in ("q", "k") if getattr(layer, n) is not None)]
        shown += ["rot_q", "rot_k"] if layer.bilinear else []
        shown += [*STATISTICS, "attn_scores", "pattern"] if layer.statistics else []
        mixed = any(p.layer == i and p.into == "value" and set(p.coefficients) - {"own"} for p in self.fits)
        shown += ["v_mix"] if mixed and self.mixing(i) else []
        for name in shown:
            setattr(attn, f"hook_{name}", Point())
        if layer.v is not None:
            attn.own = Part()
            attn.own.hook_v = Point()
        for j in self.mixing(i):
            if self.mixing(i) == (0,):
                attn.first = Part()
                attn.first.hook_v = Point()
            else:
                attn.source = getattr(attn, "source", None) or nn.ModuleDict()
                attn.source[str(j)] = Part()
                attn.source[str(j)].hook_v = Point()
        return part

    def mixing(self, i: int) -> tuple[int, ...]:
        """Layers whose own values are in the effective values of layer i, itself aside."""
        sources = [
            p.coefficients for p in self.fits if p.layer == i and p.into == "value" and p.exact and p.head is None
        ]
        found = {0 if s == "first" else s for c in sources for s, x in c.items() if s != "own" and abs(x) > SEEN}
        pulls = [p for p in self.fits if p.layer == i and p.into == "output" and p.exact]
        found |= {0 for p in pulls if abs(p.coefficients.get("first", 0.0)) > SEEN}
        return tuple(sorted(j for j in found if isinstance(j, int)))

    def own_point(self, i: int) -> Any:
        """Hook point of a layer's own values, None where it projects none."""
        own = getattr(self.blocks[i].attn, "own", None)
        return None if own is None else own.hook_v

    def sources_of(self, i: int) -> dict[int, Any]:
        """Hook points of the earlier layers' values that are mixed into a layer's."""
        attn = self.blocks[i].attn
        layers = self.mixing(i)
        return {j: attn.first.hook_v if layers == (0,) else attn.source[str(j)].hook_v for j in layers}

    def inert(self, name: str) -> bool:
        """Whether a hook point can only be read: statistics, fitted coefficients, copies of earlier layers' values."""
        copy = name.endswith("hook_v_mix") or ".attn.first." in name or ".attn.source." in name
        return copy or is_statistic(name) or (bool(self.anatomy.layers[0].loose) and ".hook_resid_" in name)

    # ---- running -----------------------------------------------------------------------------------------------------

    def forward(self, tokens: Any, return_type: str | None = "logits", **kwargs: Any) -> Any:
        """Run on ids [batch, pos] or text, as our own models do; logits are the module's own, bit for bit.

        A module that gives logits of the last position only (nanoGPT without targets) gives just these; for a loss it is
        called with targets. Raises `WorkbenchError` where it gives no logits at all.
        """
        with self.lock:
            before, self.full = self.full, return_type in ("loss", "both")
            try:
                return super().forward(tokens, return_type, **kwargs)
            finally:
                self.full = before

    def everywhere(self, tokens: Any) -> Tensor:
        """Logits [batch, pos, d_vocab] of every position, also where the module gives the last ones only."""
        with self.lock:
            before, self.full = self.full, True
            try:
                return super().forward(tokens)
            finally:
                self.full = before

    def new_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a foreign module keeps its own cache."""
        raise WorkbenchError("an observed module runs whole sequences; for generation call the module itself")

    def logits(self, tokens: Tensor, cache: Any = None) -> Tensor:
        """Token ids [batch, pos] -> the module's logits [batch, pos, d_vocab], or its first output where it has none."""
        if self.full and self.anatomy.logits is None:
            raise WorkbenchError(
                f"{type(self.foreign).__name__} gives no logits [batch, pos, d_vocab]: there is no loss"
            )
        run = self._every if self.full else self._usual
        try:
            if not self.switch.on:
                return self._logits_in(run(self.outer, tokens), tokens)
            refuse_dropout(self.foreign)
            with Listening(self, tokens).open():
                return self._logits_in(run(self.foreign, tokens), tokens)
        except (RuntimeError, IndexError, AssertionError) as error:
            if self.config.n_ctx < UNLIMITED:
                raise
            raise WorkbenchError(
                f"{type(self.foreign).__name__} cannot read {tokens.shape[1]} tokens, and nothing says how many it can "
                f"({type(error).__name__}: {error}); a builder's run may say so with --config n_ctx=N"
            ) from error

    def _logits_in(self, output: Any, tokens: Tensor) -> Any:
        if self.anatomy.logits is None:
            return output
        found = get(output, self.anatomy.logits)
        if found.ndim == 2 and len(found) == tokens.numel():
            found = found.view(*tokens.shape, -1)
        if self.full and found.shape[:2] != tokens.shape:
            raise WorkbenchError(
                f"{type(self.foreign).__name__} gives logits {tuple(found.shape)} for tokens {tuple(tokens.shape)}: a loss "
                "needs them at every position; give observe() a call= that makes it return them all"
            )
        return found

    def run_with_cache(  # type: ignore[override]  # the second argument may be given by position
        self, tokens: Any, names: NamesFilter = None, *, names_filter: NamesFilter = None, **kwargs: Any
    ) -> tuple[Any, Cache]:
        """(output, cache) of a run at the named hook points, as on our own models; `names_filter` is `names`."""
        return super().run_with_cache(tokens, names_filter=names if names_filter is None else names_filter, **kwargs)

    def run_with_grads(
        self, tokens: Any, names: NamesFilter, loss_fn: LossFn | None = None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """As on our own models; what can only be read carries no gradient and is refused, or passed over by a filter."""
        chosen = self.hook_names(names)
        if (inert := [n for n in chosen if self.inert(n)]) and names is not None and not callable(names):
            raise WorkbenchError(f"{inert[0]} carries no gradient: it is computed beside the module")
        if "hook_embed" not in self.hook_dict:
            raise WorkbenchError("gradients start at the token embedding, which was not found in this module")
        with self.lock:
            before, self.full = self.full, True
            try:
                return super().run_with_grads(tokens, [n for n in chosen if n not in inert], loss_fn)
            finally:
                self.full = before

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's own."""
        return self.foreign.named_parameters(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The module's own."""
        return self.foreign.parameters(recurse)

    # ---- what was found ----------------------------------------------------------------------------------------------

    def value_paths(self, tokens: Any = None) -> pd.DataFrame:
        """Where each layer's effective values come from, fitted now: layer, source, coefficient, residual, head, into.

        `source`: `first` (the first layer's values), `own`, or an earlier layer. `residual`: what the fit leaves, relative
        to the target; about 1e-7 where a path is exact in float32. `head`: where heads have coefficients of their own.
        `into`: `value`, or `output` for what is added between attention and W_O. On the example tokens unless others are
        given; at least a few dozen positions make a sharp fit.
        """
        with self.lock:
            return frame(self._again(self.foreign, None if tokens is None else self.to_tokens(tokens))[1])

    @property
    def sites(self) -> pd.DataFrame:
        """What was found, where, and what not: site, layer, found, where, note."""
        return sites(self)

    def __repr__(self) -> str:
        return summary(self)


def refuse_dropout(module: nn.Module) -> None:
    """Raise `WorkbenchError` where dropout is active, so that numbers would be random."""
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.training and part.p > 0:
            raise WorkbenchError(f"dropout is active ({name}, p={part.p}): call module.eval() first")
