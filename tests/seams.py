"""Which architectures stand for all: the fewest whose models together use every seam of the trunk in every way it is used.

What an architecture uses is read off its shortcuts and the wiring of a small model of it, so a change of either changes the
choice. One whose equations nobody has written down here (`equations.py`) is always among them: it is tested on everything.
"""

from __future__ import annotations

import functools

import equations

from workbench.config import ModelConfig
from workbench.models import ARCHITECTURES, compose
from workbench.models.shortcut import overrides

SHAPE = ModelConfig(n_layers=3, d_model=16, n_heads=4, d_mlp=8, d_vocab=11, n_ctx=16)
SEAMS = (
    "prepare", "shared_source", "own_value", "weights", "softmaxes", "output", "gate", "constants", "skip",
    "stream_sources", "connections",
)  # fmt: skip


@functools.cache
def uses(name):
    """What a small model of an architecture does at the seams, as a set of facts."""
    model = compose(name, SHAPE)
    facts: set[tuple] = {(seam,) for s in model.shortcuts for seam in SEAMS if overrides(s, seam)}
    facts |= {("gate", bool(list(s.parameters()))) for s in model.shortcuts if overrides(s, "gate")}  # learned, or not
    facts |= {("stream_sources", s.weighs_tokens) for s in model.shortcuts if overrides(s, "stream_sources")}
    facts |= {("learned", p.ndim > 1) for s in model.shortcuts for p in s.parameters()}
    facts |= {("grouped",)} if model.config.n_key_value_heads < model.config.n_heads else set()
    facts |= {
        ("norms", name)
        for block in model.blocks
        for name, _ in block.named_parameters()
        if "norm" in name or "_post" in name
    }
    for block in model.blocks:
        wiring = block.attn.wiring
        for tensor, projection in wiring.projections.items():
            scored = "value" if tensor == "v" else "score"  # queries and keys go the same way
            if projection.mixer is not None:
                facts.add((scored, "mixed", len(projection.mixed), projection.mixer.weighs_tokens, projection.projects))
            if projection.shared_source is not None:
                facts.add((scored, "shared", type(projection.shared_source), projection.own_heads > 0))
            facts |= {(scored, "read", type(j), state) for j, state in projection.sources.items()}
        if wiring.joint:
            facts.add(("softmaxes", wiring.joint.attends(wiring.layer), len(wiring.attended.get("rot_k", ()))))
    return facts


def covering(names, among=None):
    """Some of them that together do all that any of them does, or all of some kinds: again and again the one that adds most."""
    facts = {name: {fact for fact in uses(name) if among is None or fact[0] in among} for name in names}
    chosen, left = ["transformer"], set.union(*facts.values()) - facts["transformer"]
    while left:
        chosen.append(max(names, key=lambda name: len(facts[name] & left)))
        left -= facts[chosen[-1]]
    return chosen


def standing_for_all():
    """Names that cover those whose equations are written down, and every other one."""
    written = [name for name in ARCHITECTURES if equations.written(name)]
    return covering(written) + [name for name in ARCHITECTURES if name not in written]


COVERING = standing_for_all()
ATTENDING = covering(COVERING, ("score", "softmaxes", "grouped", "norms", "connections"))
"""Those that stand for all where a test looks at queries, keys and weights alone."""
TOGETHER = [
    "resformer_dense", "mhc+svformer+post_norm", "neutreno+value_embedding", "denseformer+cross_layer_all+gqa",
    "exclusive_attention+gated_attention+cla", "residual_attention+residual_k+gqa",
    "satformer+value_scale", "skip_v1+sink_logit", "neutreno+attention_residuals", "bank_of_values",
    "resformer+cross_layer", *(name for name in ARCHITECTURES if not equations.written(name)),
]  # fmt: skip
"""Combinations that do the same in half as many models: what holds for `any_architecture` is asked of these."""
