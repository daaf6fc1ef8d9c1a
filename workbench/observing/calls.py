"""Calls a forward pass makes that attention can be read from: fused attention, matrix products, softmax.

A call keeps its original function and arguments, so that running it untouched changes no bit of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from workbench.observing.layouts import from_heads, to_heads

_FUSED = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_INTERFACE = ("module", "query", "key", "value", "attention_mask")


@dataclass
class Fused:
    """One call that does a whole attention: q, k, v [..., pos, d_head] in, the heads' outputs out."""

    function: Callable[..., Any]
    named: dict[str, Any]
    mask: Any
    causal: bool
    dropout: float
    scale: float
    window: int | None = None  # the latest so many keys alone, where an argument says so
    output: tuple[int, ...] = ()  # where the heads' outputs stand in what it returns
    heads_first: bool = True  # whether its output is [..., head, pos, d_head]

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as the call was given them."""
        return self.named["query"], self.named["key"], self.named["value"]

    def heads(self, batch: int) -> list[Tensor]:
        """q, k and v, each [batch, pos, head, d_head]."""
        return [to_heads(x, batch) for x in self.qkv]

    def run(self, changed: Mapping[str, Tensor] | None = None) -> Any:
        """What the original function returns, with some of query, key and value [batch, pos, head, d_head] replaced."""
        replaced = {name: from_heads(x, self.named[name]) for name, x in (changed or {}).items()}
        return self.function(**self.named | replaced)

    def z(self, raw: Tensor, batch: int) -> Tensor:
        """The heads' outputs [batch, pos, head, d_head]."""
        return to_heads(raw, batch) if self.heads_first else raw.reshape(batch, raw.shape[1], -1, raw.shape[-1])

    def raw(self, z: Tensor, like: Tensor) -> Tensor:
        """The inverse of `z`."""
        return from_heads(z, like) if self.heads_first else z.reshape(like.shape)


def fused(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Fused:
    """A call of `torch.nn.functional.scaled_dot_product_attention`."""
    named = dict(zip(_FUSED, args, strict=False)) | dict(kwargs)
    scale = named.get("scale")
    return Fused(
        function,
        named,
        named.get("attn_mask"),
        bool(named.get("is_causal", False)),
        float(named.get("dropout_p", 0.0)),
        named["query"].shape[-1] ** -0.5 if scale is None else float(scale),
    )


def interface(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Fused:
    """A call of a function that is registered in Hugging Face's `AttentionInterface`."""
    named = dict(zip(_INTERFACE, args, strict=False)) | dict(kwargs)
    module, scale = named["module"], named.get("scaling")
    causal = named.get("is_causal")
    mask = named.get("attention_mask")
    return Fused(
        lambda **given: function(*[given.pop(name) for name in _INTERFACE if name in given], **given),
        named,
        mask,
        mask is None and bool(getattr(module, "is_causal", True) if causal is None else causal),
        float(named.get("dropout") or 0.0),
        named["query"].shape[-1] ** -0.5 if scale is None else float(scale),
        window=named.get("sliding_window"),
        output=(0,),
        heads_first=False,
    )


# ---- products --------------------------------------------------------------------------------------------------------

PRODUCTS = {"matmul": 0, "__matmul__": 0, "bmm": 0, "baddbmm": 1}
"""Functions of two matrices by name, and where their first one stands."""


@dataclass
class Product:
    """A product of two tensors over one shared axis, with a letter for each axis."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    places: tuple[int, int]  # of the two tensors among the arguments
    letters: tuple[str, str, str]  # of the two and of the result

    @property
    def operands(self) -> tuple[Tensor, Tensor]:
        """The two tensors."""
        return self.args[self.places[0]], self.args[self.places[1]]

    def run(self, changed: Mapping[int, Tensor] | None = None) -> Any:
        """What the original function returns, with operand 0 or 1 replaced."""
        args = list(self.args)
        for which, value in (changed or {}).items():
            args[self.places[which]] = value
        return self.function(*args, **self.kwargs)

    def arranged(self, which: int, order: str) -> Tensor:
        """An operand (or 2: pass the result to `arrange`) with its axes in `order`; an axis it lacks has length 1."""
        return arrange(self.operands[which], self.letters[which], order)

    def restored(self, which: int, x: Tensor, order: str) -> Tensor:
        """The inverse of `arranged` for a tensor that takes the operand's place."""
        return restore(x, order, self.letters[which])


def product(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Product | None:
    """The product behind a call, None where it is not one of two tensors of three axes or more."""
    name = getattr(function, "__name__", "")
    if name == "einsum":
        return _einsum(function, args, kwargs)
    first = PRODUCTS[name]
    if "batch1" in kwargs and "batch2" in kwargs:
        args = (*args[:1], kwargs["batch1"], kwargs["batch2"])
        kwargs = {key: value for key, value in kwargs.items() if not key.startswith("batch")}
    pair = args[first : first + 2]
    if len(pair) < 2 or not all(isinstance(x, Tensor) and x.ndim > 2 for x in pair):
        return None
    lead = "abefgh"[-(max(x.ndim for x in pair) - 2) :]
    a, b = (lead[len(lead) - x.ndim + 2 :] for x in pair)
    return Product(function, args, kwargs, (first, first + 1), (f"{a}ic", f"{b}cj", f"{lead}ij"))


def _einsum(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Product | None:
    given = (args[0], *args[1]) if len(args) == 2 and isinstance(args[1], list | tuple) else args
    if len(given) != 3 or not isinstance(given[0], str) or "->" not in given[0] or "." in given[0]:
        return None
    terms, out = given[0].replace(" ", "").split("->")
    letters = terms.split(",")
    if len(letters) != 2 or not all(len(set(term)) == len(term) for term in (*letters, out)):
        return None
    return Product(function, given, kwargs, (1, 2), (letters[0], letters[1], out))


def arrange(x: Tensor, letters: str, order: str) -> Tensor:
    """x, whose axes are `letters`, with its axes in `order`; an axis it lacks has length 1."""
    x = x.permute([letters.index(c) for c in order if c in letters])
    for place, c in enumerate(order):
        if c not in letters:
            x = x.unsqueeze(place)
    return x


def restore(x: Tensor, order: str, letters: str) -> Tensor:
    """The inverse of `arrange`."""
    for place in reversed([i for i, c in enumerate(order) if c not in letters]):
        x = x.squeeze(place)
    kept = [c for c in order if c in letters]
    return x.permute([kept.index(c) for c in letters])


def roles(scores: Product, values: Product, pattern: int) -> tuple[tuple[int, str, str], tuple[str, str, str]] | None:
    """How the axes of q, k, v and z lie, from the two products around a softmax.

    Returns (which operand is q, order of q, order of k) and (order of the pattern, of v, of z), each order ending in
    (query or key, d_head); None where the products are not of this form.
    """
    out = scores.letters[2]
    lead, query, key = out[:-2], out[-2], out[-1]
    a, b, _ = scores.letters
    first = 0 if query in a and key in b else 1
    q, k = (a, b) if first == 0 else (b, a)
    inner = [c for c in q if c in k and c not in out]
    p, v, z = values.letters[pattern], values.letters[1 - pattern], values.letters[2]
    width = [c for c in v if c not in p and c in z]
    if query not in q or key not in k or len(inner) != 1 or len(width) != 1 or p[-1] not in v or p[-2] not in z:
        return None
    return (first, lead + query + inner[0], lead + key + inner[0]), (p, p[:-2] + p[-1] + width[0], p[:-1] + width[0])
