"""One run of an observed module while somebody listens: hook points fire from its own parts, and may replace what passes.

Hooks and function mode stand for this run alone. What nobody replaces goes on as the same tensor, so no bit changes.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from workbench.models.points import hooked
from workbench.observing.attending import Attending
from workbench.observing.layouts import by_position, from_positions, get, put
from workbench.observing.projections import Projection, Tap
from workbench.observing.watching import eagerly, interfaces, watching


class Listening(Attending):
    """Listener, hooks and memory of one run."""

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """While open, the module's runs are heard."""
        with contextlib.ExitStack() as stack:
            for handle in self._handles():
                stack.callback(handle.remove)
            if self.attentive:
                self.watch = stack.enter_context(watching(self, interfaces(self.module)))
            else:
                stack.enter_context(eagerly())
            yield

    def _handles(self) -> Iterator[Any]:
        """Hooks on just the parts that something is heard of, blocks first, so that they know where they are."""
        parts = dict(self.module.named_modules())
        blocks = {layer.block for layer in self.layers if not layer.loose}
        for i, layer in enumerate(self.layers):
            for name in layer.loose:
                yield parts[name].register_forward_pre_hook(partial(self._step, i, Counter()))
        for name in blocks:
            yield parts[name].register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
        taps: dict[str, list[tuple[Tap, bool, Callable[[Tensor], Tensor], int | None]]] = {}
        for heard in self._taps():
            taps.setdefault(heard[0].module, []).append(heard)
        for name, listeners in taps.items():
            yield parts[name].register_forward_pre_hook(partial(self._given, name, listeners), with_kwargs=True)
            if any(not given for _, given, _, _ in listeners):
                yield parts[name].register_forward_hook(partial(self._made, name, listeners), with_kwargs=True)
        for name in blocks:
            yield parts[name].register_forward_hook(partial(self._leave, name), with_kwargs=True)

    def _taps(self) -> Iterator[tuple[Tap, bool, Callable[[Tensor], Tensor], int | None]]:
        """(where, whether it is given rather than made, what hears it, the layer it is in) of parts with listeners."""
        whole, anatomy = self.observed, self.observed.anatomy
        if anatomy.embed is not None and hooked(whole.hook_embed):
            yield anatomy.embed, False, partial(self.fire, whole.hook_embed), None
        last: Any = whole.blocks[-1]
        if anatomy.head is not None and hooked((head := cast(Any, whole.unembed)).hook_in):
            yield anatomy.head, True, partial(self.fire, head.hook_in), None
        if anatomy.final is not None and hooked(last.hook_resid_post):
            shown = partial(self._shown, (last.hook_resid_post,))
            yield (
                anatomy.final,
                True,
                shown if self.layers[-1].loose else partial(self.fire, last.hook_resid_post),
                None,
            )
        for i, layer in enumerate(self.layers):
            before = whole.blocks[i - 1].hook_resid_post if i and layer.streams else None
            if layer.stream is not None and layer.streams and self._heard(whole.blocks[i].hook_resid_pre, before):
                yield layer.stream, True, partial(self._shown, (whole.blocks[i].hook_resid_pre, before)), i
            for name in ("attn_out", "mlp_out"):
                tap = getattr(layer, name)
                if tap is not None and hooked(getattr(whole.blocks[i], f"hook_{name}")):
                    yield tap, False, partial(self._addition, getattr(whole.blocks[i], f"hook_{name}")), i
            if layer.z is not None and self.wanted(i, "z"):
                yield layer.z, True, partial(self._output, i), i
        for i, name, projection, point in self.parts:
            yield projection, False, partial(self._project, i, name, projection, point), i

    def _enter(self, name: str, part: nn.Module, args: Any, kwargs: Any) -> Any:
        i = self.at.get((name, self.runs[name]), -1)
        self.runs[name] += 1
        self.running.append(i)
        self.within.append(Counter())
        if i < 0:
            return None
        point = self.observed.blocks[i].hook_resid_pre
        if not hooked(point):
            return None
        path, given = self.layers[i].stream_in, (args, kwargs)
        stream = get(given, path)
        found = self.fire(point, stream)
        return None if found is stream else put(given, path, found)

    def _leave(self, name: str, part: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        i = self.running.pop()
        self.within.pop()
        if i < 0:
            return None
        point = self.observed.blocks[i].hook_resid_post
        if not hooked(point) or (self.observed.anatomy.final is not None and i == len(self.layers) - 1):
            return None
        stream = get(output, self.layers[i].stream_out)
        found = self.fire(point, stream)
        return None if found is stream else put(output, self.layers[i].stream_out, found)

    def _given(self, name: str, heard: Any, part: nn.Module, args: Any, kwargs: Any) -> Any:
        self.runs[name] += 1
        if self.running:
            self.within[-1][name] += 1
        given = args, kwargs
        for tap, before, hear, layer in heard:
            if before and self._here(tap, layer):
                tensor = get(given, tap.path)
                found = hear(tensor)
                given = given if found is tensor else put(given, tap.path, found)
        return None if given[0] is args and given[1] is kwargs else given

    def _made(self, name: str, heard: Any, part: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        changed = output
        for tap, before, hear, layer in heard:
            if not before and self._here(tap, layer):
                tensor = get(changed, tap.path)
                found = hear(tensor)
                changed = changed if found is tensor else put(changed, tap.path, found)
        return None if changed is output else changed

    def _here(self, tap: Tap, layer: int | None) -> bool:
        """Whether the run of a part that has begun last is that of a tap: among all, or among those in its layer."""
        if layer is None:
            return self.runs[tap.module] == tap.run + 1
        return bool(self.running) and self.running[-1] == layer and self.within[-1][tap.module] == tap.run + 1

    def _step(self, i: int, fresh: Counter[str], part: nn.Module, args: Any) -> None:
        """A part runs that belongs to a layer whose block is no part: from here on the layer is running."""
        if self.running != [i]:
            self.running, self.within = [i], [fresh]

    @staticmethod
    def _heard(*points: Any) -> bool:
        return any(point is not None and hooked(point) for point in points)

    def _shown(self, points: tuple[Any, ...], tensor: Tensor) -> Tensor:
        """Fire hook points of a stream that goes on beside its reader, so that it can only be read here."""
        handed = tensor.clone() if self.observed.anatomy.in_place else tensor
        for point in points:
            self.show(point, handed)
        return tensor

    def _addition(self, point: Any, made: Tensor) -> Tensor:
        """What is added to the stream [batch, pos, d_model], which some write as [batch * pos, d_model]."""
        shaped = made.view(self.batch, self.length, -1)
        found = self.fire(point, shaped)
        return made if found is shaped else found.view(made.shape)

    def _project(self, i: int, name: str, projection: Projection, point: Any, made: Tensor) -> Tensor:
        """Own values, or queries and keys before their rotation, among a projection's columns."""
        rows = by_position(made, self.batch, self.length)
        assert rows is not None
        heads = projection.of(rows).unflatten(0, (self.batch, self.length))
        found = self.fire(point, heads)
        if name == "v" and i in self.needed:
            self.own[i] = found
        if found is heads:
            return made
        return from_positions(projection.into(rows, found.flatten(0, 1)), made, self.batch, self.length)

    def _output(self, i: int, given: Tensor) -> Tensor:
        """What W_O multiplies, by head."""
        heads = given.unflatten(-1, (self.layers[i].attention.heads, -1))
        found = self.fire(self.point(i, "z"), heads)
        return given if found is heads else found.flatten(-2)

    def matrix(self, made: Any) -> Any:
        """Fire on a projection that is called by itself."""
        if not self.bare:
            return made
        place = self._call("matrix")
        for name, projection, point in self.bare.get(place, ()) if isinstance(made, Tensor) else ():
            made = self._project(place[0], name, projection, point, made)
        return made

    def other(self, name: str) -> None:
        """Of no interest here."""
