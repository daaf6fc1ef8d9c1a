"""Hooks on a foreign decoder's own modules for one run: each fires one of our hook points, and may replace its tensor.

Hooks and function mode exist for this run alone and act in its thread alone. A tensor that no hook changes stays the same object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial, update_wrapper
from threading import get_ident
from types import MethodType
from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from workbench.errors import WorkbenchError
from workbench.observing.interception.call_sites import caller_frame
from workbench.observing.interception.function_mode import (
    Interception,
    InterceptionMode,
    attention_functions,
    guarded,
    remove_module_hooks,
)
from workbench.observing.interception.position_axes import Axes
from workbench.observing.interception.tensor_paths import TensorPath, get_at, replaced_at
from workbench.observing.listening.attention_hooks import AttentionRun
from workbench.observing.listening.gradient_checkpoints import follow_checkpoints
from workbench.observing.listening.one_hooked_run import CountedCalls, HookedAttention
from workbench.observing.recognition.decoder_structure import TensorLocation
from workbench.observing.recognition.module_runs import LOOKUP, MATRIX
from workbench.observing.recognition.routers import Router


class _ReadTensor(NamedTuple):
    """A tensor that fires hook points: its location, whether it is an input, its layer (None: an end of the decoder)."""

    location: TensorLocation
    is_input: bool
    fire: Callable[[Any], Any]
    layer: int | None


class HookedRun(AttentionRun):
    """One run with its hooks in one thread, on just the modules whose tensors are needed, and its function mode.

    The function mode sees every torch function. It is on only within a layer's attention calls, unless a call outside them is needed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prepare()

    def copy(self) -> Self:
        """Return the same run with its own state and hooks, to continue from here more than once."""
        run = super().copy()
        run._prepare()
        return run

    def _prepare(self) -> None:
        self.thread, self.mode = get_ident(), InterceptionMode(self, self.failed)
        self.hooked_modules: dict[nn.Module, None] = {}
        self.mask_kinds = {}
        mode = self.mode if self.intercepted or self.everywhere else None
        names = () if mode is None else attention_functions(self.module)
        self.interception = Interception(mode, names, everywhere=self.everywhere, fused=self.has_fused_layers)

    def begin(self) -> None:
        """Register all hooks."""
        self.interception.begin()
        for module, register, hook, options in self._hooks():
            self.hooked_modules[module] = None
            getattr(module, register)(partial(self._call, hook), **options)
        if not self.everywhere and any(scope.layer >= 0 for scope in self.scopes[-1:]):
            self.mode.__enter__()  # a checkpoint inside an attention runs again

    def end(self) -> None:
        """Remove all hooks and the mode, also after an interrupted `begin` or `end`; may be called twice."""
        remove_module_hooks(self, self.hooked_modules)
        self.interception.end()

    def _call(self, hook: Callable[..., Any], *args: Any) -> Any:
        """Call a hook, unless the module runs in another thread or in a call that a hook makes."""
        if self.mode.silent or get_ident() != self.thread:
            return None
        try:
            if self.may_checkpoint:
                follow_checkpoints(self)
            return hook(*args)
        except Exception as error:
            self.mode.take(error)
            return None

    def _hooks(self) -> Iterator[tuple[nn.Module, str, Callable[..., Any], dict[str, bool]]]:
        """Yield all hooks: module, its method that registers, hook, options. Those of blocks come first: others need the running layer."""
        module = self.module.get_submodule
        before, after, with_kwargs = "register_forward_pre_hook", "register_forward_hook", {"with_kwargs": True}
        if self.masks is not None:
            yield self.module, before, self.masks.given, with_kwargs
        blocks = {layer.block for layer in self.layers if not layer.inline}
        for name in {layer.caller for layer in self.layers if layer.inline}:
            yield module(name), before, partial(self._enter_caller, name), {}
        for i, layer in enumerate(self.layers):
            for name in layer.inline:
                yield module(name), before, partial(self._enter_inline, i, Counter()), {}
        for name in blocks:
            yield module(name), before, partial(self._enter_block, name), with_kwargs
        for name in {scope.module for i in self.intercepted if (scope := self.layers[i].scope)}:
            yield module(name), before, partial(self._enter_scope, name), {}
            yield module(name), after, self._leave_scope, {"always_call": True}
        reads: dict[str, list[_ReadTensor]] = {}
        for read in self._reads():
            reads.setdefault(read.location.module, []).append(read)
        for name, some in reads.items():
            yield module(name), before, partial(self._before, name, some), with_kwargs
            if any(not read.is_input for read in some):
                yield module(name), after, partial(self._after, some), with_kwargs
        for name in blocks:
            yield module(name), after, self._leave_block, with_kwargs

    def _reads(self) -> Iterator[_ReadTensor]:
        """Yield the tensors of all hooked points that are inputs or outputs of modules."""
        structure, points = self.structure, self.points
        embed = structure.embed
        if embed is not None and embed.module != LOOKUP and self.is_hooked(points.embed):
            yield _ReadTensor(embed, False, partial(self.fire, points.embed), None)
        if structure.head is not None and self.is_hooked(points.head):
            yield _ReadTensor(structure.head, True, partial(self.fire, points.head), None)
        if structure.final is not None and self.is_hooked(last := self.points.blocks[-1].hook_resid_post):
            fire = partial(self._show_stream, [last]) if self.layers[-1].inline else partial(self.fire, last)
            yield _ReadTensor(structure.final, True, fire, None)
        for i, (layer, block) in enumerate(zip(self.layers, self.points.blocks, strict=True)):
            if layer.stream is not None and layer.has_stream:
                both = [block.hook_resid_pre, *([self.points.blocks[i - 1].hook_resid_post] if i else [])]
                if hooked := [point for point in both if self.is_hooked(point)]:
                    yield _ReadTensor(layer.stream, True, partial(self._show_stream, hooked), i)
            for name in ("attn_out", "mlp_out"):
                location = getattr(layer, name)
                if location is None or location.module == MATRIX:
                    continue
                if self.is_hooked(point := getattr(block, f"hook_{name}")):
                    fire = partial(self.fire_addition, point=point, factor=location.factor)
                    yield _ReadTensor(location, False, fire, i)
            if isinstance(layer.router, Router) and any(map(self.is_hooked, block.mlp.children())):
                yield _ReadTensor(layer.router, False, partial(self._show_routing, block.mlp, layer.router), i)
            if layer.z is not None and layer.z.module != MATRIX and "z" in self.layer_points[i]:
                yield _ReadTensor(layer.z, True, partial(self.fire_z, i=i), i)
        for attention, latent in self.latents:
            yield _ReadTensor(latent, True, partial(self._fire_latent, attention), attention.layer)
        for p in self.module_projections:
            yield _ReadTensor(p.projection, False, partial(self.fire_projection, hooked=p), p.attention.layer)

    def _fire_latent(self, attention: HookedAttention, state: Tensor) -> Tensor:
        """Fire on a compressed state, which may have an axis of one head."""
        flat = state.flatten(2) if state.ndim > 3 else state
        fired = self.fire_at(attention, "latent", flat)
        return state if fired is flat else fired

    def _show_routing(self, points: Any, router: Router, output: Any) -> None:
        """Fire read-only on what a router's output shows."""
        for site in router.sites:
            if self.is_hooked(point := getattr(points, f"hook_{site}")):
                self.show(point, router.read(site, output, self.positions))

    def _show_stream(self, points: list[Any], tensor: Tensor) -> Tensor:
        """Fire read-only on a stream that has other readers."""
        shown = tensor.clone() if self.structure.in_place else tensor
        for point in points:
            self.show(point, shown)
        return tensor

    def _enter_caller(self, name: str, module: nn.Module, args: Any) -> None:
        self.callers[name] = caller_frame(), ()

    def _enter_inline(self, i: int, counts: Counter[str], module: nn.Module, args: Any) -> None:
        """Enter a layer whose block is no module, at the first of its modules."""
        if self.running != [i]:
            scope = CountedCalls(i, *self.callers[self.layers[i].caller], Counter())
            self.running, self.within, self.scopes = [i], [counts], [scope]

    def _enter_block(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        i = self.layer_at.get((name, self.runs[name]), -1)
        if i < 0:
            known = sum(layer.block == name for layer in self.layers)
            raise WorkbenchError(
                f"block {name or 'of the module'} runs more than the {known} times that it ran on the example tokens: "
                "observe the module with tokens on which it runs as often"
            )
        self.runs[name] += 1
        self.running.append(i)
        self.within.append(Counter())
        if not self.layers[i].has_stream or not self.is_hooked(point := self.points.blocks[i].hook_resid_pre):
            return None
        inputs = args, kwargs
        changed = self._fired(inputs, self.layers[i].stream_in, self.layers[i].axes[0], partial(self.fire, point))
        return None if changed is inputs else changed

    def _leave_block(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        i = self.running.pop()
        self.within.pop()
        if not self.layers[i].has_stream or not self.is_hooked(point := self.points.blocks[i].hook_resid_post):
            return None
        if self.structure.final is not None and i == len(self.layers) - 1:
            return None
        changed = self._fired(output, self.layers[i].stream_out, self.layers[i].axes[1], partial(self.fire, point))
        return None if changed is output else changed

    def _enter_scope(self, name: str, module: nn.Module, args: Any) -> None:
        """Count and hand on calls from here, if the running layer makes its attention calls in this run of the module."""
        i = self.running[-1] if self.running else -1
        scope = self.layers[i].scope if i in self.intercepted else None
        is_scope = False
        if scope is not None and scope.module == name:
            is_scope = self.within[-1][f"(scope) {name}"] == scope.run
            self.within[-1][f"(scope) {name}"] += 1
        self.scopes.append(CountedCalls(i if is_scope else -1, caller_frame(), (), Counter()))
        if is_scope and not self.everywhere:
            self.mode.__enter__()

    def _leave_scope(self, module: nn.Module, args: Any, output: Any) -> None:
        scope = self.scopes.pop()
        if scope.layer >= 0 and not self.everywhere:
            self.mode.__exit__(None, None, None)
        if output is not None:  # else it raised
            self.check_calls(scope)

    def _before(self, name: str, reads: list[_ReadTensor], module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.runs[name] += 1
        if self.running:
            self.within[-1][name] += 1
        inputs = args, kwargs
        for read in reads:
            if read.is_input and self._is_current(read):
                inputs = self._fired(inputs, read.location.path, read.location.axes, read.fire)
        return None if inputs[0] is args and inputs[1] is kwargs else inputs

    def _after(self, reads: list[_ReadTensor], module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        changed = output
        for read in reads:
            if read.is_input or not self._is_current(read):
                continue
            if isinstance(read.location, Router):  # several of its tensors together
                read.fire(output)
            else:
                changed = self._fired(changed, read.location.path, read.location.axes, read.fire)
        return None if changed is output else changed

    def _is_current(self, read: _ReadTensor) -> bool:
        """Return whether the module's latest run, among all or among those in the layer, is the run to read."""
        location = read.location
        if read.layer is None:
            return self.runs[location.module] == location.run + 1
        in_layer = bool(self.running) and self.running[-1] == read.layer
        return in_layer and self.within[-1][location.module] == location.run + 1

    def _fired(self, structure: Any, path: TensorPath, axes: Axes, fire: Callable[[Tensor], Tensor]) -> Any:
        """Fire on the tensor at a path, as [batch, pos, ...] of tokens."""
        tensor, positions = get_at(structure, path), self.positions
        shown = positions.shaped(tensor, axes)
        if shown is None:  # some positions, for example the last one alone at the head
            fired = fire(tensor)
            return structure if fired is tensor else replaced_at(structure, path, fired)
        fired = fire(shown)
        return structure if fired is shown else replaced_at(structure, path, positions.unshaped(fired, tensor, axes))


class CallsListenedTo:
    """A module's `forward` while its own calls fire hook points: a wrapper that has a `finally` around each call.

    Copies and pickles of the module get the `forward` of its class.

    Args:
        module: The module.
        run_of: Returns the run for a call's arguments and keyword arguments, or None for a call without hooks.
        failed: Called with an error of ours; the call continues without hooks. Without it errors are raised.
    """

    def __init__(
        self, module: nn.Module, run_of: Callable[[Any, Any], HookedRun | None],
        failed: Callable[[Exception], object] | None,
    ) -> None:  # fmt: skip
        self.module, self.run_of, self.failed, self.thread = module, run_of, failed, get_ident()
        self.before = module.__dict__.get("forward")
        self.forward = module.forward
        update_wrapper(self, self.forward)
        module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hooks = None
        try:
            if get_ident() == self.thread and (run := self.run_of(args, kwargs)) is not None:
                hooks = run
        except Exception as error:
            if self.failed is None:
                raise
            self.failed(error)
        return self.forward(*args, **kwargs) if hooks is None else guarded(hooks, self.forward, *args, **kwargs)

    def close(self) -> None:
        """Restore the module's `forward`, or ignore further calls if it has been wrapped again."""
        self.run_of = lambda args, kwargs: None
        if self.module.__dict__.get("forward") is self:
            if self.before is None:
                del self.module.__dict__["forward"]
            else:
                self.module.__dict__["forward"] = self.before

    def __reduce__(self) -> Any:
        return MethodType, (type(self.module).forward, self.module)
