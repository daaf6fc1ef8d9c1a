"""Frozen configs of models and of training, and the presets; unknown keys are refused with the nearest names.

Sizes `2m`, `82m`, `180m` and `468m` and the recipe are those of Zhou et al. (2024), Value Residual Learning;
`tiny` trains in minutes on a laptop, `mini` on a small GPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import WorkbenchError, refuse_unknown

MAX_INTEGER = 2**63  # of a tensor's size


def _known(cls: Any, kind: str, values: Mapping[str, Any]) -> None:
    fields = [each.name for each in dataclasses.fields(cls)]
    for key in values:
        refuse_unknown(kind, key, fields)


def _complete(cls: Any, kind: str, values: Mapping[str, Any]) -> None:
    _known(cls, kind, values)
    required = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [key for key in required if key not in values]:
        raise WorkbenchError(f"config lacks {', '.join(missing)}")


def _numbers(config: Any, *, may_be_zero: tuple[str, ...] = ()) -> None:
    """Refuse values that are not finite positive numbers of the declared type."""
    for each in dataclasses.fields(config):
        value, kind = getattr(config, each.name), str(each.type)
        if kind not in ("int", "float", "bool"):
            continue
        allowed = (int, float) if kind == "float" else (int,)
        typed = isinstance(value, allowed) and isinstance(value, bool) == (kind == "bool")
        zero = kind == "bool" or each.name in may_be_zero
        limit = math.inf if kind == "float" else MAX_INTEGER
        if not typed or not 0 <= value < limit or (value == 0 and not zero):
            bound = f" below {limit}" if typed and value >= limit else ""
            raise WorkbenchError(f"{each.name}={value!r}: must be a {'' if zero else 'positive '}{kind}{bound}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder, with TransformerLens' keys; raises `WorkbenchError` for impossible shapes.

    `n_key_value_heads` defaults to `n_heads`.
    """

    n_layers: int
    d_model: int
    n_heads: int
    d_mlp: int
    d_vocab: int
    n_ctx: int
    n_key_value_heads: int = 0
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if not self.n_key_value_heads:
            object.__setattr__(self, "n_key_value_heads", self.n_heads)
        _numbers(self)
        if self.d_model % self.n_heads or self.d_head % 2:
            even = [h for h in range(1, self.d_model // 2 + 1) if self.d_model % (2 * h) == 0]
            what = f"d_model={self.d_model} into even heads; choose from {even}"
            raise WorkbenchError(f"n_heads={self.n_heads} does not cut {what}")
        if self.n_heads % self.n_key_value_heads:
            fit = [g for g in range(1, self.n_heads + 1) if self.n_heads % g == 0]
            what = f"n_heads={self.n_heads}; choose from {fit}"
            raise WorkbenchError(f"n_key_value_heads={self.n_key_value_heads} does not divide {what}")

    @property
    def d_head(self) -> int:
        """Width of one head."""
        return self.d_model // self.n_heads

    @property
    def d_key_value(self) -> int:
        """Width of all key-value heads together."""
        return self.d_head * self.n_key_value_heads

    @classmethod
    def of(cls, preset_or_config: str | ModelConfig | Mapping[str, Any]) -> ModelConfig:
        """Return a config from a preset's name, a mapping of config keys, or a config."""
        if isinstance(preset_or_config, ModelConfig):
            return preset_or_config
        if isinstance(preset_or_config, str):
            refuse_unknown("preset", preset_or_config, PRESETS)
            return PRESETS[preset_or_config].model
        if not isinstance(preset_or_config, Mapping):
            raise WorkbenchError(f"{preset_or_config!r}: a preset's name, a ModelConfig or a mapping of config keys")
        _complete(cls, "config key", preset_or_config)
        return cls(**preset_or_config)

    def replace(self, **changes: Any) -> ModelConfig:
        """Return a copy with changed keys; ungrouped heads stay ungrouped."""
        _known(type(self), "config key", changes)
        if "n_heads" in changes and self.n_key_value_heads == self.n_heads:
            changes.setdefault("n_key_value_heads", changes["n_heads"])
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class ObservedConfig(ModelConfig):
    """Shape of an observed module; its `rms_norm_eps`, `rope_theta` and `init_std` have no meaning."""

    head_width: int

    def __post_init__(self) -> None:
        """Check the types only: heads of an observed module need not divide its width."""
        for each in dataclasses.fields(self):
            if each.type == "int" and type(value := getattr(self, each.name)) is not int:
                raise WorkbenchError(f"{each.name}={value!r}: must be an int")

    @property
    def d_head(self) -> int:
        """Width of one query head, which need not be d_model / n_heads."""
        return self.head_width


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The recipe: AdamW (0.9, 0.95), decay of matrices only, clipping, warm-up, then cosine to a tenth.

    A step has `batch` sequences of `T` tokens over all processes. `warmup` and `steps` count steps. A telemetry row is written every
    `log_every` steps and a resume point every `save_every` steps. `checkpoints` counts checkpoints per doubling of the step, in
    addition to step 0 and the last step. `lr_factors` maps patterns of parameter names to factors of the learning rate, as
    {"blocks.0.*": 5}.
    """

    steps: int
    batch: int
    T: int
    lr: float = 6e-4
    lr_final: float = 0.1
    warmup: int = 120
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0
    log_every: int = 10
    validate_every: int = 100
    validation_sequences: int = 32
    save_every: int = 100
    checkpoints: int = 1
    bf16: bool = False
    lr_factors: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _numbers(self, may_be_zero=("warmup", "weight_decay", "lr_final", "beta1", "beta2", "clip"))
        if self.T < 2:
            raise WorkbenchError(f"T={self.T}: a sequence needs 2 tokens")
        if not isinstance(self.lr_factors, Mapping):
            needed = 'must map patterns to factors, as {"blocks.0.*": 5}'
            raise WorkbenchError(f"lr_factors={self.lr_factors!r}: {needed}")
        for pattern, factor in self.lr_factors.items():
            if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
                raise WorkbenchError(f"lr_factors: {factor!r} of {pattern!r} must be a positive number")
        object.__setattr__(self, "lr_factors", dict(self.lr_factors))

    def replace(self, **changes: Any) -> TrainConfig:
        """Return a copy with changed keys."""
        _known(type(self), "training key", changes)
        return dataclasses.replace(self, **changes)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Return a config from a mapping; unknown keys are refused."""
        _complete(cls, "training key", values)
        return cls(**values)


@dataclass(frozen=True)
class Preset:
    """A model size and its training recipe."""

    model: ModelConfig
    train: TrainConfig

    @property
    def vocabulary(self) -> int:
        """Default vocabulary of a new tokenizer: the model's, at most 4,096, since small corpora have too few merges for more."""
        return min(self.model.d_vocab, 4096)


def _published(n_layers: int, n_heads: int, d_model: int) -> Preset:
    shape = {"n_layers": n_layers, "n_heads": n_heads, "d_model": d_model, "d_mlp": d_model * 7 // 2}
    model = ModelConfig(**shape, d_vocab=50_277, n_ctx=2048)
    return Preset(model, TrainConfig(steps=10_000, batch=1024, T=2048, validate_every=1000, save_every=500, bf16=True))


PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        ModelConfig(n_layers=4, d_model=64, n_heads=4, d_mlp=176, d_vocab=1024, n_ctx=2048),
        TrainConfig(steps=300, batch=8, T=128, lr=4e-3, warmup=30, validate_every=50, save_every=50),
    ),
    "mini": Preset(
        ModelConfig(n_layers=8, d_model=256, n_heads=8, d_mlp=704, d_vocab=2048, n_ctx=2048),
        TrainConfig(steps=4000, batch=64, T=512, lr=2e-3, warmup=120, validate_every=200, save_every=500),
    ),
    "2m": _published(4, 2, 16),
    "82m": _published(8, 8, 512),
    "180m": _published(12, 12, 768),
    "468m": _published(24, 16, 1024),
}
