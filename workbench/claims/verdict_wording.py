"""Words for models, settings and numbers in the sentences of verdicts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from workbench.models.architecture_names_and_colours import ARCHITECTURES, CONTROL, architecture_label
from workbench.statistics.intervals import MIN_SEEDS, Interval

RATES = 3  # learning rates of each model, before a comparison of losses counts as tuned
WORDS = {
    "n_layers": "{:.0f} layers", "d_model": "width {:.0f}", "parameters": "{:,.0f} parameters", "T": "{:.0f} tokens",
    "batch": "batch {:.0f}", "steps": "{:.0f} steps", "lr": "rate {:g}", "budget": "{:,.1f} tokens per parameter",
}  # fmt: skip


RARE = {
    "n_heads": "{:.0f} heads", "query_group": "{:g} query heads for each key-value head", "d_mlp": "MLP width {:.0f}",
    "warmup": "{:.0f} warm-up steps", "rope_theta": "rotary base {:g}", "validation_sequences": "{:.0f} validation sequences",
}  # fmt: skip
"""Words that are needed only where settings differ in them."""


def seeds_note(seeds: Interval | int) -> str:
    """Return a note if the seeds (of an interval, or their number) are too few to decide, else nothing."""
    n = seeds.n if isinstance(seeds, Interval) else seeds
    return f" ({n} of the {MIN_SEEDS} seeds needed)" if n < MIN_SEEDS else ""


def intervals_text(intervals: Mapping[Any, Interval], between: str = "; ", *, notes: bool = False) -> str:
    """Return named intervals as a list, with `seeds_note` if asked."""
    return between.join(f"{name} {i}{seeds_note(i) if notes else ''}" for name, i in intervals.items())


def share(interval: Interval) -> str:
    """Return an interval of shares in per cent."""
    if math.isnan(interval.low):
        return f"{interval.value:.1%} (one seed: no interval)"
    return f"{interval.value:.1%} [{interval.low:.1%}, {interval.high:.1%}]"


def model_name(model: str) -> str:
    """Return the label of a model with its options."""
    base, bracket, options = model.partition("[")
    return f"{architecture_label(base).removesuffix(CONTROL)}{bracket}{options}"


def labelled(text: str) -> str:
    """Return a text with the labels of the architectures that it names."""
    return re.sub(rf"\b({'|'.join(ARCHITECTURES)})\b", lambda name: model_name(name[0]), text)


def setting_of(runs: pd.DataFrame) -> str:
    """Return the common settings of the compared runs in words, with ranges for differing ones; empty for no runs."""
    seeds = runs.groupby(["model", "steps"], dropna=False)["seed"].nunique()  # lengths may have seeds of their own
    models = runs["model"].nunique()
    least, most = (int(seeds.min()), int(seeds.max())) if len(seeds) else (0, 0)
    many = f"{least} seed{'s' * (least > 1)}" if least == most else f"{least} to {most} seeds"
    parts = [f"{many} of {models} model{'s' * (models > 1)}"] if models else []
    known = runs["optimiser"] != "unknown"  # else an imported checkpoint, with placeholders
    runs = runs.assign(
        budget=runs["tokens"] / runs["parameters"],
        T=runs["T"].where(known),
        steps=runs["steps"].where(known | (runs["steps"] > 1)),
    )
    for column, form in WORDS.items():
        values = sorted(runs[column].dropna().unique())
        if values:
            before, number, after = form.replace("{", "|{").replace("}", "}|").split("|")
            low, high = number.format(values[0]), number.format(values[-1])
            parts.append(f"{before}{low if low == high else f'{low} to {high}'}{after}")
    if "chosen_on" in runs and len(on := runs["chosen_on"].unique()) == 1 and len(runs.dropna(subset="chosen_on")):
        parts.append(f"each model at its best of {runs['rates'].min():.0f} rates (chosen on seed {on[0]})")
    return ", ".join(parts)


def differences_of(settings: Sequence[pd.DataFrame]) -> list[str]:
    """Return in words how each of several settings differs from the others."""
    alike = [{str(c): rows[c].iloc[0] for c in rows if rows[c].nunique(dropna=False) == 1} for rows in settings]
    columns = [c for c in map(str, settings[0]) if all(c in setting for setting in alike)]
    differ = [c for c in columns if len({str(setting[c]) for setting in alike}) > 1]
    data = list(
        dict.fromkeys(str(setting.get("data")) for setting in alike)
    )  # a digest, which says nothing to a reader
    alike = [s | {"data": f"{data.index(str(s['data'])) + 1} of {len(data)}"} if "data" in s else s for s in alike]
    names = [
        [(WORDS | RARE).get(c, c.replace("_", " ") + " {}").format(setting[c]) for c in differ] for setting in alike
    ]
    if len(set(map(tuple, names))) < len(names):  # they differ in the learning rate, of which each model has its own
        for parts, setting in zip(names, alike, strict=True):
            parts.append(WORDS["lr"].format(setting["lr"]) if "lr" in setting else "each model at its own rate")
    return [", ".join(filter(None, parts)) for parts in names]


def scope_of(runs: pd.DataFrame) -> str:
    """Return the limit of a comparison of losses with fewer than `RATES` learning rates; empty without a limit."""
    if "rates" in runs and runs["rates"].notna().all():  # each at the best of a sweep of other seeds
        return ""
    rates = int(runs.groupby("model")["lr"].nunique().min()) if len(runs) else RATES
    if not rates:
        return "at an unknown learning rate"
    return "" if rates >= RATES else "at this one learning rate" if rates == 1 else f"at {rates} learning rates"


def listed(names: Sequence[str]) -> str:
    """Return names joined with commas and `and`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "nothing"
