"""The four sentences of an X-ray, derived from records of one model: number, baseline, uncertainty, and what decides.

Thresholds are this project's and are said in the sentences. One model cannot show that another would do better: the
last sentence weighs what speaks for and against, and names the experiment that would settle it.
"""

from __future__ import annotations

import math

import pandas as pd

from workbench.models.registry import ARCHITECTURES
from workbench.statistics.sinks import SINK_MASS

PUBLISHED = (
    "published gain of ResFormer -0.027 to -0.032 nats (about 1 %) at 82M to 468M parameters, one seed (Zhou et al. 2024); "
    "train both with three seeds to know"
)
MOSTLY, HARDLY = 0.8, 0.5  # of what values do: supplied by the token alone; needing context
PARTS = {
    "first_position": "the first position", "profile": "where tokens stand (local attention)", "content": "particular tokens",
}  # fmt: skip
UNLEARNED = 1e-3  # nats: what values do of which no share is to be spoken of
NOTHING = 1e-4  # nats: a distance from uniform attention that has no parts to speak of
DRAINED = 0.5  # first token's value norm over the others' median


def _at(
    frame: pd.DataFrame, metric: str, *, last: bool = True, site: str | None = None, control: str | None = None
) -> pd.DataFrame:
    """Measured rows of a metric, or those of a control, at the last step (or at step 0), plain variant."""
    rows = frame[
        (frame["metric"] == metric) & (frame["control"].isna() if control is None else frame["control"] == control)
    ]
    steps = frame["step"].dropna()
    step = (steps.max() if last else 0) if len(steps) else None
    if step is not None:
        rows = rows[rows["step"] == step]
    elif not last:
        rows = rows.head(0)
    return rows[rows["site"] == site] if site else rows


def _at_init(frame: pd.DataFrame, rows: pd.DataFrame, layer: float) -> str:
    """What a layer had in these rows of step 0, where the model was also measured later."""
    start = rows[rows["layer"] == layer]["value"]
    return f", {start.iloc[0]:.2f} at random init" if len(start) and frame["step"].max() > 0 else ""


def _pm(value: float, se: float, digits: int = 2) -> str:
    """A number and its error, which is never rounded to nothing."""
    if math.isnan(se):
        return f"{value:.{digits}f}"
    while 0 < se < 0.5 * 10**-digits and digits < 4:
        digits += 1
    return f"{value:.{digits}f} ± {se:.{digits}f}"


def _percent(value: float, se: float) -> str:
    return f"{_pm(100 * value, 100 * se, 1)}%"


def _range(values: pd.Series) -> str:
    low, high = f"{values.min():.1%}", f"{values.max():.1%}"
    return low if low == high else f"{low}-{high}"


def concentration(frame: pd.DataFrame) -> str:
    """Where attention concentrates most, how much, and in which of its three parts."""
    rows = _at(frame, "concentration_parts")
    whole = rows[rows["variant"].isna()].dropna(subset=["value"])
    if whole.empty:
        return "Not measured: this model's attention gives no statistics."
    top = whole.sort_values("value").iloc[-1]
    layer = int(top["layer"])
    parts = rows[(rows["layer"] == layer) & rows["variant"].notna()].set_index("variant")["value"]
    share = {k: parts[k] / top["value"] if top["value"] > 0 else 0.0 for k in PARTS if k in parts}
    shares = ", ".join(f"{share[k]:.0%} on {PARTS[k]}" for k in sorted(share, key=lambda k: -share[k]))
    before = _at(frame, "concentration_parts", last=False)
    init = _at_init(frame, before[before["variant"].isna()], layer)
    if not top["value"] > NOTHING:
        return (
            f"No: most in layer {layer}, {max(top['value'], 0.0):.4f} nats from uniform causal attention (0 by definition{init}), too "
            "little to be split into parts: nothing is learned yet."
        )
    strength = "Hardly" if top["value"] < 0.05 else "Yes"
    span = f"{whole['value'].min():.2f} to {whole['value'].max():.2f}"
    return (
        f"{strength}: most in layer {layer}, {_pm(top['value'], top['se'])} nats from uniform causal attention "
        f"(0 by definition{init}){': ' if shares else ''}{shares}. Layers range from {span}."
    )


def sinks(frame: pd.DataFrame) -> str:
    """How many heads are sinks, and whether the first token's value is drained there."""
    mass = _at(frame, "sink_mass")
    even = frame[(frame["metric"] == "sink_mass") & (frame["control"] == "uniform_causal")]["value"]
    if mass.empty:
        return "Not measured: this model's attention gives no statistics."
    heads = mass[mass["head"].notna()]
    strong, rest = heads[heads["value"] > SINK_MASS], _null(frame)
    top = heads.sort_values("value").iloc[-1]
    floor = f"uniform attention would give {even.iloc[0]:.1%}" if len(even) else ""
    place = f"layer {int(top['layer'])}, head {int(top['head'])}"
    if strong.empty:
        return (
            f"There is no sink to drain: the strongest head ({place}) gives the first token "
            f"{_percent(top['value'], top['se'])} of its attention, {floor}; a sink here means more than {SINK_MASS:.0%}.{rest}"
        )
    layers = sorted({int(n) for n in strong["layer"]})
    drain = _drain(frame)
    drain = drain[drain["layer"].isin(layers)]
    drained = "their values were not measured"
    if len(drain):
        worst = drain.sort_values("value").iloc[0]
        error = 0.0 if math.isnan(worst["se"]) else worst["se"]
        low, high = worst["value"] - 2 * error, worst["value"] + 2 * error
        verdict = "drained" if high < DRAINED else "not drained" if low > DRAINED else "unresolved"
        drained = (
            f"{verdict}: the first token's value has {_pm(worst['value'], worst['se'])} times the others' median norm in layer "
            f"{int(worst['layer'])} (1 = none, drained below {DRAINED}){_at_init(frame, _drain(frame, last=False), worst['layer'])}"
        )
    return (
        f"{len(strong)} of {len(heads)} heads give the first token more than {SINK_MASS:.0%} of their attention (strongest "
        f"{_percent(top['value'], top['se'])}, {place}; {floor}); {drained}.{rest}"
    )


def _null(frame: pd.DataFrame) -> str:
    """How much of the attention goes to no token, where softmaxes have a column that is no key."""
    null = _at(frame, "null_mass")
    if null.empty:
        return ""
    top = null.sort_values("value").iloc[-1]
    most = f"{_percent(top['value'], top['se'])} in layer {int(top['layer'])}, head {int(top['head'])}"
    return f" Heads can also rest on a column that is no token: {null['value'].mean():.1%} of all attention, {most}."


def _drain(frame: pd.DataFrame, *, last: bool = True) -> pd.DataFrame:
    rows = _at(frame, "value_drain", last=last)
    rows = rows[rows["variant"].isna()]
    own = rows[rows["site"] == "own_v"]
    return own if (own["layer"] > 0).any() or rows["site"].ne("v").all() else rows[rows["site"] == "v"]


def _deep(frame: pd.DataFrame) -> pd.DataFrame:
    """Later half of the layers, own values where there are any."""
    own = frame[frame["site"] == "own_v"]
    rows = own if (own["layer"] > 0).any() else frame[frame["site"] == "v"]
    rows = rows[rows["layer"].notna() & (rows["layer"] > 0)]
    return rows[rows["layer"] >= (rows["layer"].max() + 1) / 2] if len(rows) else rows


def token_share(frame: pd.DataFrame) -> str:
    """Share of the variance of deep values that the token's identity explains, against init and shuffled ids."""
    found = _deep(_at(frame, "token_identity_share"))
    deep = found.dropna(subset=["value"])
    if len(found) and deep.empty:
        return "Not measurable here: no two tokens occur twice each, or values do not differ, so there is nothing to explain."
    if deep.empty:
        return "Not measurable here: no layer after the first has values of its own."
    worst = deep["se"].max()
    error = "" if math.isnan(worst) else f" (± at most {worst:.1%})"
    control = _deep(_at(frame, "token_identity_share", control="shuffled"))
    beside = [f"{control['value'].abs().max():.0%} with shuffled ids"] if len(control) else []
    if len(start := _deep(_at(frame, "token_identity_share", last=False))) and frame["step"].max() > 0:
        beside.append(f"{_range(start['value'])} at random init")
    what = "own values" if (deep["site"] == "own_v").all() else "effective values"
    first, last = int(deep["layer"].min()), int(deep["layer"].max())
    layers = f"layer {first}" if first == last else f"layers {first}-{last}"
    return (
        f"{_range(deep['value'])}{error} of the variance of the {what} in {layers} is the identity of the token "
        f"({', '.join(beside) or 'no baseline measured'}); 100 % would be a lookup table."
    )


def _together(frame: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Change of the loss and its error with the values of all layers after the first replaced, by replacement."""
    rows = _at(frame, "value_ablation")
    rows = rows if len(rows) else _at(frame, "deep_value_ablation")
    rows = rows[rows["layer"].isna()]
    values, errors = rows["value"].astype(float), rows["se"].astype(float).fillna(0.0)
    return {str(k): (v, e) for k, v, e in zip(rows["variant"], values, errors, strict=True)}


def _replaced(change: dict[str, tuple[float, float]]) -> str:
    if "token_mean" not in change:
        return "No layer after the first has values of its own."
    (token, token_se), (zero, zero_se) = change["token_mean"], change["zero"]
    seen = f" at the {change['seen'][0]:.0%} of positions whose token has one" if "seen" in change else ""
    return (
        f"Replacing all later layers' own values by their token's mean{seen} costs {token:+.3f} ± {token_se:.3f} nats, "
        f"by zero {zero:+.3f} ± {zero_se:.3f}."
    )


def _path(frame: pd.DataFrame) -> str | None:
    """The value path a model's name says it has."""
    parts = str(frame["architecture"].iloc[0]).split("+")
    known = [ARCHITECTURES[part] for part in parts if part in ARCHITECTURES]
    return next((a.label for a in known if a.value_path), None)


def residual(frame: pd.DataFrame) -> str:
    """What speaks for and against a value residual in this model."""
    change = _together(frame)
    if (path := _path(frame)) is not None:
        return f"It has a value path already ({path}). {_replaced(change)} Whether that path is why needs a model trained without it."
    mass = _at(frame, "sink_mass")
    if "token_mean" not in change:
        return "Undecided: no layer after the first has values of its own that could be replaced."
    if change.get("seen", (1.0, 0.0))[0] == 0:
        return "Undecided: no token of these documents is in the table of means, so nothing was replaced; give more documents."
    (token, _), (zero, error) = change["token_mean"], change["zero"]
    if abs(zero) < UNLEARNED:
        return f"Undecided: nothing is learned yet in later values. {_replaced(change)}"
    kept = 1 - token / zero if zero > 0 else 0.0
    for_it, against, low = [], [], ""
    facts = _replaced(change).rstrip(".").replace("Replacing", "replacing")
    if zero <= 2 * error:
        against.append(f"removing later values changes the loss by no more than its error ({facts})")
    elif kept >= MOSTLY:
        for_it.append(
            f"the token alone supplies {kept:.0%} of what later values do ({facts}), and the first layer's values are a function of it"
        )
    elif "seen" in change:  # a table from few documents: rare ids' means are noise, which costs what context would
        low = f" The token alone supplies at least {max(kept, 0):.0%} of what later values do ({facts}): a table of means from as many "
        low += (
            "documents as were measured gives a lower bound, which decides neither way; `--layers` reads a large one."
        )
    elif kept < HARDLY:
        against.append(f"later values need context: the token alone supplies {kept:.0%} of what they do ({facts})")
    else:
        against.append(f"the token supplies only part, {kept:.0%}, of what later values do ({facts})")
    if len(mass) and float(mass["value"].max()) > SINK_MASS:
        for_it.append("there are sinks, which the published models lose")
    else:
        against.append("there are no sinks to remove")
    more = len(for_it) - len(against)
    start = "Open" if low or not more else "More speaks for it" if more > 0 else "More speaks against it"
    pro, con = ("; ".join(reasons) or "nothing measured here" for reasons in (for_it, against))
    return f"{start}; for: {pro}. Against: {con}.{low} One model cannot decide it: {PUBLISHED}."
