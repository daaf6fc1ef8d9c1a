"""Hooks on a foreign decoder's own modules for one run: each fires one of our hook points, and may replace what passes.

Hooks and function mode stand for this run alone and act in its thread alone. What no hook changes goes on as the same tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial, update_wrapper
from threading import get_ident
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from workbench.errors import WorkbenchError
from workbench.observing.interception.call_sites import caller_frame
from workbench.observing.interception.function_mode import (
    Interception,
    InterceptionMode,
    attention_functions,
    guarded,
)
from workbench.observing.interception.positions import Axes
from workbench.observing.interception.tensor_layouts import TensorPath, get_at, replaced_at
from workbench.observing.listening.attention import AttentionHooks
from workbench.observing.listening.checkpoints import follow_checkpoints
from workbench.observing.listening.run import CountedCalls, Heard, HookedRun
from workbench.observing.recognition.executions import LOOKUP, MATRIX
from workbench.observing.recognition.structure import TensorLocation


class _ReadTensor(NamedTuple):
    """A tensor that is read where it passes: where, among inputs or outputs, in which layer (None: not counted by layer)."""

    location: TensorLocation
    is_input: bool
    fire: Callable[[Tensor], Tensor]
    layer: int | None


class ModuleHooks:
    """The hooks of one run in one thread, on just the modules whose tensors are read, and its function mode.

    The function mode sees every torch function while it is on, so it is on only where a layer makes its attention calls,
    unless something outside them is read.
    """

    def __init__(self, run: HookedRun) -> None:
        self.run, self.layers, self.blocks, self.thread = run, run.layers, run.points.blocks, get_ident()
        run.mode = self.mode = InterceptionMode(AttentionHooks(run), run.failed)
        if run.intercepted or run.everywhere:
            names = attention_functions(run.module)
            self.interception = Interception(self.mode, names, everywhere=run.everywhere, fused=run.fused)
        else:
            self.interception = Interception(None, fused=run.fused)
        self.hooked: dict[nn.Module, None] = {}
        run.follow = partial(follow_checkpoints, run, ModuleHooks) if run.may_checkpoint else None

    def begin(self) -> None:
        """Register all hooks."""
        self.interception.begin()
        for module, register, hook, options in self._hooks():
            self.hooked[module] = None
            getattr(module, register)(hook if self.run.failed is None else partial(self._call_hook, hook), **options)
        if not self.run.everywhere and any(made.layer >= 0 for made in self.run.scopes[-1:]):
            self.mode.__enter__()  # a checkpoint inside an attention runs again

    def end(self) -> None:
        """Remove all hooks and the mode, also after an interrupted `begin` or `end`. Calling it again does nothing."""
        for module in self.hooked:
            for hooks, options in (
                (module._forward_pre_hooks, [module._forward_pre_hooks_with_kwargs]),
                (module._forward_hooks, [module._forward_hooks_with_kwargs, module._forward_hooks_always_called]),
            ):
                for key, hook in list(hooks.items()):
                    if getattr(getattr(hook, "func", hook), "__self__", None) is self:
                        hooks.pop(key, None)
                        for names in options:
                            names.pop(key, None)
        self.interception.end()

    def _call_hook(self, hook: Callable[..., Any], *args: Any) -> Any:
        """Call a hook of a run that must go on; if it fails, let the rest of the run pass."""
        try:
            return hook(*args)
        except Exception as error:
            self.mode.take(error)
            return None

    def _is_elsewhere(self) -> bool:
        """Whether the module runs in another thread, or in calls that a hook makes: these are not this run's."""
        if self.mode.silent or get_ident() != self.thread:
            return True
        if self.run.follow is not None:
            self.run.follow()
        return False

    def _hooks(self) -> Iterator[tuple[nn.Module, str, Callable[..., Any], dict[str, bool]]]:
        """All hooks: the module, how to register it there, and with which options.

        Those of blocks come first, so that the others know which layer is running.
        """
        module = self.run.module.get_submodule
        before, after, with_kwargs = "register_forward_pre_hook", "register_forward_hook", {"with_kwargs": True}
        if self.run.masks is not None:
            yield self.run.module, before, self._note_masks, with_kwargs
        blocks = {layer.block for layer in self.layers if not layer.inline}
        for name in {layer.caller for layer in self.layers if layer.inline}:
            yield module(name), before, partial(self._enter_caller, name), {}
        for i, layer in enumerate(self.layers):
            for name in layer.inline:
                yield module(name), before, partial(self._enter_inline, i, Counter()), {}
        for name in blocks:
            yield module(name), before, partial(self._enter_block, name), with_kwargs
        for name in {scope.module for i in self.run.intercepted if (scope := self.layers[i].scope)}:
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
        yield from self._reads_of_ends()
        for i, (layer, block) in enumerate(zip(self.layers, self.blocks, strict=True)):
            before = self.blocks[i - 1].hook_resid_post if i and layer.has_stream else None
            if layer.stream is not None and layer.has_stream:
                points = [p for p in (block.hook_resid_pre, before) if self.run.is_hooked(p)]
                if points:
                    yield _ReadTensor(layer.stream, True, partial(self._show_stream, points), i)
            for name in ("attn_out", "mlp_out"):
                location = getattr(layer, name)
                if location is None or location.module == MATRIX:
                    continue
                if self.run.is_hooked(point := getattr(block, f"hook_{name}")):
                    fire = partial(self.run.fire_addition, point=point, factor=location.factor)
                    yield _ReadTensor(location, False, fire, i)
            if layer.z is not None and layer.z.module != MATRIX and "z" in self.run.layer_points[i]:
                yield _ReadTensor(layer.z, True, partial(self.run.fire_z, i), i)
        for heard, latent in self.run.latents:
            yield _ReadTensor(latent, True, partial(self._fire_latent, heard), heard.layer)
        for p in self.run.module_projections:
            yield _ReadTensor(p.projection, False, partial(self.run.fire_projection, p), p.heard.layer)

    def _fire_latent(self, heard: Heard, state: Tensor) -> Tensor:
        """Fire on a compressed state, which may have an axis of one head."""
        flat = state.flatten(2) if state.ndim > 3 else state
        fired = self.run.fire_at(heard, "latent", flat)
        return state if fired is flat else fired

    def _reads_of_ends(self) -> Iterator[_ReadTensor]:
        """The token embedding, what the head reads, and the last stream where that is not the last block's output."""
        run, structure, points = self.run, self.run.structure, self.run.points
        embed = structure.embed
        if embed is not None and embed.module != LOOKUP and run.is_hooked(points.embed):
            yield _ReadTensor(embed, False, partial(run.fire, points.embed), None)
        if structure.head is not None and run.is_hooked(points.head):
            yield _ReadTensor(structure.head, True, partial(run.fire, points.head), None)
        if structure.final is not None and run.is_hooked(last := self.blocks[-1].hook_resid_post):
            fire = partial(self._show_stream, [last]) if self.layers[-1].inline else partial(run.fire, last)
            yield _ReadTensor(structure.final, True, fire, None)

    def _show_stream(self, points: list[Any], tensor: Tensor) -> Tensor:
        """A stream that goes on beside its reader, so that it can only be read here."""
        shown = tensor.clone() if self.run.structure.in_place else tensor
        for point in points:
            self.run.show(point, shown)
        return tensor

    def _note_masks(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_elsewhere() and self.run.masks is not None:
            self.run.masks.given(module, args, kwargs)

    def _enter_caller(self, name: str, module: nn.Module, args: Any) -> None:
        """A module runs whose code runs blocks that are no modules."""
        if not self._is_elsewhere():
            self.run.callers[name] = caller_frame(), ()

    def _enter_inline(self, i: int, counts: Counter[str], module: nn.Module, args: Any) -> None:
        """A module runs that belongs to a layer whose block is no module: from here on that layer is running."""
        if not self._is_elsewhere() and self.run.running != [i]:
            made = CountedCalls(i, *self.run.callers[self.layers[i].caller], Counter())
            self.run.running, self.run.within, self.run.scopes = [i], [counts], [made]

    def _enter_block(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._is_elsewhere():
            return None
        run = self.run
        i = run.layer_at.get((name, run.runs[name]), -1)
        if i < 0:
            known = sum(layer.block == name for layer in self.layers)
            raise WorkbenchError(
                f"block {name or 'of the module'} runs more than the {known} times that it ran on the example tokens: "
                "observe the module with tokens on which it runs as often"
            )
        run.runs[name] += 1
        run.running.append(i)
        run.within.append(Counter())
        if not self.layers[i].has_stream or not run.is_hooked(point := self.blocks[i].hook_resid_pre):
            return None
        inputs = args, kwargs
        changed = self._fired(inputs, self.layers[i].stream_in, self.layers[i].axes[0], partial(run.fire, point))
        return None if changed is inputs else changed

    def _leave_block(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if self._is_elsewhere():
            return None
        i = self.run.running.pop()
        self.run.within.pop()
        if not self.layers[i].has_stream or not self.run.is_hooked(point := self.blocks[i].hook_resid_post):
            return None
        if self.run.structure.final is not None and i == len(self.layers) - 1:
            return None
        changed = self._fired(output, self.layers[i].stream_out, self.layers[i].axes[1], partial(self.run.fire, point))
        return None if changed is output else changed

    def _enter_scope(self, name: str, module: nn.Module, args: Any) -> None:
        """A module runs in which a layer may make its attention calls: from here on they are counted and handed on."""
        if self._is_elsewhere():
            return
        run = self.run
        i = run.running[-1] if run.running else -1
        scope = self.layers[i].scope if i in run.intercepted else None
        here = False
        if scope is not None and scope.module == name:
            here = run.within[-1][f"(scope) {name}"] == scope.run
            run.within[-1][f"(scope) {name}"] += 1
        run.scopes.append(CountedCalls(i if here else -1, caller_frame(), (), Counter()))
        if here and not run.everywhere:
            self.mode.__enter__()

    def _leave_scope(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_elsewhere():
            return
        run = self.run
        made = run.scopes.pop()
        if made.layer >= 0 and not run.everywhere:
            self.mode.__exit__(None, None, None)
        if output is not None:  # else it raised
            run.check_calls(made)

    def _before(self, name: str, reads: list[_ReadTensor], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._is_elsewhere():
            return None
        self.run.runs[name] += 1
        if self.run.running:
            self.run.within[-1][name] += 1
        inputs = args, kwargs
        for read in reads:
            if read.is_input and self._is_here(read):
                inputs = self._fired(inputs, read.location.path, read.location.axes, read.fire)
        return None if inputs[0] is args and inputs[1] is kwargs else inputs

    def _after(self, reads: list[_ReadTensor], module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if self._is_elsewhere():
            return None
        changed = output
        for read in reads:
            if not read.is_input and self._is_here(read):
                changed = self._fired(changed, read.location.path, read.location.axes, read.fire)
        return None if changed is output else changed

    def _is_here(self, read: _ReadTensor) -> bool:
        """Whether the module's run that began last is the one to read: among all runs, or among those in the layer."""
        location, run = read.location, self.run
        if read.layer is None:
            return run.runs[location.module] == location.run + 1
        in_layer = bool(run.running) and run.running[-1] == read.layer
        return in_layer and run.within[-1][location.module] == location.run + 1

    def _fired(self, structure: Any, path: TensorPath, axes: Axes, fire: Callable[[Tensor], Tensor]) -> Any:
        """Fire on the tensor at a path, [batch, pos, ...] of tokens however it lies in the module."""
        tensor, positions = get_at(structure, path), self.run.positions
        if (
            shown := positions.shaped(tensor, axes)
        ) is None:  # of some positions, as the input of the last one's logits
            fired = fire(tensor)
            return structure if fired is tensor else replaced_at(structure, path, fired)
        fired = fire(shown)
        return structure if fired is shown else replaced_at(structure, path, positions.unshaped(fired, tensor, axes))


class CallsListenedTo:
    """A module's `forward` while its own calls fire hook points: a wrapper that has a `finally` around each call.

    Copies and pickles of the module get the `forward` of its class.

    Args:
        module: The module.
        run_of: Returns the run to listen to for a call's arguments and keyword arguments, or None.
        failed: Called with an error of ours; the call goes on without hooks. Without it errors are raised.
    """

    def __init__(
        self,
        module: nn.Module,
        run_of: Callable[[Any, Any], HookedRun | None],
        failed: Callable[[Exception], object] | None,
    ) -> None:
        self.module, self.run_of, self.failed, self.thread = module, run_of, failed, get_ident()
        self.before = module.__dict__.get("forward")
        self.forward = module.forward
        update_wrapper(self, self.forward)
        module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hooks = None
        try:
            if get_ident() == self.thread and (run := self.run_of(args, kwargs)) is not None:
                hooks = ModuleHooks(run)
        except Exception as error:
            if self.failed is None:
                raise
            self.failed(error)
        return self.forward(*args, **kwargs) if hooks is None else guarded(hooks, self.forward, *args, **kwargs)

    def close(self) -> None:
        """Restore the module's `forward`; if it has been wrapped again since, listen to no more calls."""
        self.run_of = lambda args, kwargs: None
        if self.module.__dict__.get("forward") is self:
            if self.before is None:
                del self.module.__dict__["forward"]
            else:
                self.module.__dict__["forward"] = self.before

    def __reduce__(self) -> Any:
        return MethodType, (type(self.module).forward, self.module)
