"""Rotary settings of a configuration, as transformers reads them.

A configuration has `rope_parameters` or, in older files, `rope_scaling` and `rope_theta`. If it has both blocks, transformers reads
`rope_scaling` alone. Our decoder computes the plain rotation (Su et al., 2021); transformers computes the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workbench.errors import BadCheckpoint, NotCovered, UnknownName

BLOCKS = ("rope_scaling", "rope_parameters")  # the first that is not empty counts
POSITIVE = (
    "rope_theta", "factor", "attention_factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    "short_factor", "long_factor", "partial_rotary_factor",
)  # fmt: skip
LISTS = ("short_factor", "long_factor")
PARTIAL = ("partial_rotary_factor", "rotary_pct")  # share of a head that rotates
OTHERS = ("use_scaled_rope", "rope_scaling_factor")  # of training scripts


def plain_theta(values: Mapping[str, Any], where: Path) -> Any:
    """Return the base of a plain rotation, None if the configuration does not say it; raises for other or contradictory ones."""
    blocks = [block for key in BLOCKS if (block := values.get(key))]
    block = blocks[0] if blocks else {}
    if not isinstance(block, dict) or block.get("rope_type", block.get("type", "default")) != "default":
        raise NotCovered(f"{where}: rotary scaling {block} is not supported, only the plain rotation")
    for key in PARTIAL:
        if (share := block.get(key, values.get(key, 1.0))) != 1.0:
            raise NotCovered(f"{where}: {key}={share!r} is not supported, only 1.0")
    for key in OTHERS:
        if values.get(key):
            raise NotCovered(f"{where}: {key}={values[key]!r} is not supported, only the plain rotation")
    given = [values.get("rope_theta"), block.get("rope_theta")]
    hidden = [b.get("rope_theta") for b in blocks[1:] if isinstance(b, dict)]
    thetas = [theta for theta in (*given, *hidden) if theta is not None]
    if any(theta != thetas[0] for theta in thetas) or (thetas and given == [None, None]):
        raise BadCheckpoint(
            f"{where} contradicts itself: rope_theta is {given[0]} there, {given[1]} in the block of rotary settings that counts, and "
            f"{hidden or 'absent'} in the other; write one of them"
        )
    if not thetas and "rope_theta" in values:
        raise BadCheckpoint(f"{where}: rope_theta is null; write the base of the rotation, or remove the key")
    return thetas[0] if thetas else None


def check_rotary(config: Any, where: Path) -> None:
    """Raise `BadCheckpoint` for rotary settings of a transformers configuration that it would compute nonsense from."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for block in _blocks(config.to_dict()):
        known = ("default", getattr(type(config), "default_rope_type", "default"), *ROPE_INIT_FUNCTIONS)
        if (kind := block["rope_type"]) not in known:
            raise BadCheckpoint(f"{where}: {UnknownName('rope_type', kind, set(known))}")
        for key in POSITIVE:
            given = block.get(key)
            values = given if isinstance(given, list) and key in LISTS else [] if given is None else [given]
            for value in values:
                least_is_zero = key == "partial_rotary_factor" and kind == "proportional"
                if type(value) not in (int, float) or not (0 < value < math.inf or (least_is_zero and value == 0)):
                    raise BadCheckpoint(
                        f"{where}: {key} of the rotary settings is {value!r}; it must be a positive number"
                    )
        if (block.get("partial_rotary_factor") or 1) > 1:
            raise BadCheckpoint(
                f"{where}: partial_rotary_factor is {block['partial_rotary_factor']}; it must be at most 1"
            )
        if kind == "llama3" and not (block.get("low_freq_factor") or 0) < (block.get("high_freq_factor") or math.inf):
            raise BadCheckpoint(f"{where}: low_freq_factor must be below high_freq_factor in {block}")
        for key in LISTS if kind == "longrope" else ():  # one factor would be spread over all frequencies
            if not isinstance(block.get(key), list) or len(block[key]) < 2:
                raise BadCheckpoint(
                    f"{where}: {key} is {block.get(key)!r}; it must be a list, a factor for each frequency"
                )


def _blocks(values: Mapping[str, Any], key: str = "") -> Iterator[Mapping[str, Any]]:
    """Yield every block of rotary settings in a configuration, its parts and its kinds of layers."""
    if key in BLOCKS and "rope_type" in values:
        yield values
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _blocks(value, key if key in BLOCKS else name)
