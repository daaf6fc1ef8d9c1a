"""Names, lists, settings and numbers as the sentences of verdicts write them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from workbench.models.registry import CONTROL, label
from workbench.statistics.intervals import MIN_SEEDS, Interval

RATES = 3  # learning rates of each model, before a comparison of losses counts as tuned
WORDS = {
    "n_layers": "{:.0f} layers", "d_model": "width {:.0f}", "parameters": "{:,.0f} parameters", "T": "{:.0f} tokens",
    "batch": "batch {:.0f}", "steps": "{:.0f} steps", "lr": "rate {:g}", "budget": "{:,.1f} tokens per parameter",
}  # fmt: skip


def seeds_note(interval: Interval) -> str:
    """A remark where seeds are too few to decide."""
    return f" ({interval.n} of the {MIN_SEEDS} seeds needed)" if interval.n < MIN_SEEDS else ""


def numbers(intervals: Mapping[Any, Interval], between: str = "; ", *, notes: bool = False) -> str:
    """Named intervals in a row, each with the remark of `seeds_note` where wanted."""
    return between.join(f"{name} {i}{seeds_note(i) if notes else ''}" for name, i in intervals.items())


def share(interval: Interval) -> str:
    """An interval of shares in per cent."""
    if math.isnan(interval.low):
        return f"{interval.value:.1%} (one seed: no interval)"
    return f"{interval.value:.1%} [{interval.low:.1%}, {interval.high:.1%}]"


def model_name(model: str) -> str:
    """A model's name as people read it, options kept."""
    base, bracket, options = model.partition("[")
    return f"{label(base).removesuffix(CONTROL)}{bracket}{options}"


def setting_of(runs: pd.DataFrame) -> str:
    """What the compared runs have in common, in words; a range where they differ. Empty for no runs."""
    seeds = runs.groupby("model")["seed"].nunique()
    least, most = (int(seeds.min()), int(seeds.max())) if len(seeds) else (0, 0)
    many = f"{least} seed{'s' * (least > 1)}" if least == most else f"{least} to {most} seeds"
    parts = [f"{many} of {len(seeds)} model{'s' * (len(seeds) > 1)}"] if len(seeds) else []
    runs = runs.assign(budget=runs["tokens"] / runs["parameters"])
    for column, form in WORDS.items():
        values = sorted(runs[column].dropna().unique())
        if values:
            low, high = form.format(values[0]), form.format(values[-1])
            parts.append(low if low == high else f"{low} to {high}")
    return ", ".join(parts)


def dtypes_of(found: Sequence[str]) -> str:
    """What records were measured in, to follow a setting; empty where nothing says so."""
    return f", measured in {listed(found)}" if found else ""


def differences_of(settings: Sequence[pd.DataFrame]) -> list[str]:
    """What tells each of several settings (tables of what is alike in them) from the others, in words."""
    columns = [c for c in settings[0].columns if all(rows[c].nunique(dropna=False) == 1 for rows in settings)]
    firsts = [rows.iloc[0] for rows in settings]
    differ = [c for c in columns if len({str(first[c]) for first in firsts}) > 1]
    return [", ".join(WORDS.get(c, c.replace("_", " ") + " {}").format(first[c]) for c in differ) for first in firsts]


def scope_of(runs: pd.DataFrame) -> str:
    """How far a comparison of losses reaches: a model's best rate is known only where several were tried with each."""
    rates = int(runs.groupby("model")["lr"].nunique().min()) if len(runs) else RATES
    return "" if rates >= RATES else "at this one learning rate" if rates == 1 else f"at {rates} learning rates"


def listed(names: Sequence[str]) -> str:
    """Names with commas and an `and`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "nothing"
