"""The four sentences of an X-ray, derived from records of one model: number, baseline, uncertainty, and what decides.

Thresholds are this project's and are said in the sentences. One model cannot show that another would do better: the
last sentence weighs what speaks for and against, and names the experiment that would settle it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd

from workbench.models.architecture_names_and_colours import ARCHITECTURES
from workbench.statistics.sink_thresholds import FOUND_MOST, SINK_MASS

PUBLISHED = (
    "published gain of ResFormer -0.027 to -0.032 nats (about 1 %) at 82M to 468M parameters, one seed (Zhou et al. 2024); "
    "train both with three seeds to know"
)
MOSTLY, HARDLY = 0.8, 0.5  # of what values do: supplied by the token alone; needing context
PARTS = {
    "first_position": "the first position", "profile": "other positions (local attention)", "content": "particular tokens",
}  # fmt: skip
UNLEARNED = 1e-3  # nats: what values do of which no share is to be spoken of
NOTHING = 1e-4  # nats: a distance from uniform attention that has no parts to speak of
_NOT_REPLACED = "Replacing all later layers' own values was not measured."
_NO_OWN = "No layer after the first has values of its own."
ALMOST, SECONDARY = 0.8, 0.05  # share of a sink that is named; least share of a head that a later token holds
OTHERS = " and others"
TokenName = Callable[[int], str]
TOKEN: TokenName = "token {}".format
DRAINED = 0.5  # first token's value norm over the others' median


def _at(
    frame: pd.DataFrame, metric: str, *, last: bool = True, site: str | None = None, control: str | None = None
) -> pd.DataFrame:
    """Return rows of a metric, or of one of its controls, at the last step (or at step 0) without a variant."""
    of_control = frame["control"].isna() if control is None else frame["control"] == control
    rows = frame[(frame["metric"] == metric) & of_control]
    steps = frame["step"].dropna()
    step = (steps.max() if last else 0) if len(steps) else None
    if step is not None:
        rows = rows[rows["step"] == step]
    elif not last:
        rows = rows.head(0)
    return rows[rows["site"] == site] if site else rows


def _at_init(frame: pd.DataFrame, rows: pd.DataFrame, layer: float) -> str:
    """Return a layer's value at step 0 if the model was also measured later."""
    start = rows[rows["layer"] == layer]["value"].dropna()
    return f", {start.iloc[0]:.2f} at random init" if len(start) and frame["step"].max() > 0 else ""


def pm(value: float, se: float, digits: int = 2) -> str:
    """A number and its error, which is never rounded to nothing."""
    if math.isnan(se):
        return f"{value:.{digits}f} (error unknown)"
    while 0 < se < 0.5 * 10**-digits and digits < 4:
        digits += 1
    return f"{value:.{digits}f} ± {se:.{digits}f}"


def _percent(value: float, se: float) -> str:
    return f"{100 * value:.1f}% (error unknown)" if math.isnan(se) else f"{pm(100 * value, 100 * se, 1)}%"


def _finite(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows whose value is a number."""
    return rows[np.isfinite(rows["value"].astype(float))]


def _range(values: pd.Series) -> str:
    low, high = f"{values.min():.1%}", f"{values.max():.1%}"
    return low if low == high else f"{low} to {high}"


def concentration_text(frame: pd.DataFrame) -> str:
    """Return the layer with the most concentrated attention, its concentration, and the largest of the three parts."""
    rows = _finite(_at(frame, "concentration_parts"))
    whole = rows[rows["variant"].isna()]
    if whole.empty:
        return "Not measured: this model's attention gives no statistics."
    top = whole.sort_values("value").iloc[-1]
    layer = int(top["layer"])
    parts = rows[(rows["layer"] == layer) & rows["variant"].notna()].set_index("variant")["value"]
    share = {k: parts[k] / top["value"] if top["value"] > 0 else 0.0 for k in PARTS if k in parts}
    most = sorted((k for k in share if share[k] >= 0.01), key=lambda k: -share[k])
    shares = ", ".join(f"{share[k]:.0%} on {PARTS[k]}" for k in most)
    before = _at(frame, "concentration_parts", last=False)
    init = _at_init(frame, before[before["variant"].isna()], layer)
    if not top["value"] > NOTHING:
        return (
            f"Not concentrated: most in layer {layer}, {max(top['value'], 0.0):.4f} nats from uniform causal attention (0 by definition"
            f"{init}), too little to be split into parts: nothing is learned yet."
        )
    strength = "Hardly concentrated" if top["value"] < 0.05 else "Concentrated"
    span = f" Layers range from {whole['value'].min():.2f} to {whole['value'].max():.2f}." if len(whole) > 1 else ""
    return (
        f"{strength}: most in layer {layer}, {pm(top['value'], top['se'])} nats from uniform causal attention "
        f"(0 by definition{init}){': ' if shares else ''}{shares}.{span}"
    )


def sinks_text(frame: pd.DataFrame, token: TokenName = TOKEN) -> str:
    """Return the number of sink heads, at the first position and at any, and whether the values there are drained.

    Args:
        frame: Records of the model.
        token: Name of a token id.
    """
    mass = _finite(_at(frame, "sink_mass"))
    even = _finite(frame[(frame["metric"] == "sink_mass") & (frame["control"] == "uniform_causal")])
    heads = mass[mass["head"].notna() & mass["variant"].isna()]
    if heads.empty:
        return "Not measured: this model's attention gives no statistics."
    strong, rest = heads[heads["value"] > SINK_MASS], ""
    if len(null := _finite(_at(frame, "null_mass")).sort_values("value")):  # of softmaxes with a sink logit
        most = null.iloc[-1]
        where = f"{_percent(most['value'], most['se'])} in layer {int(most['layer'])}, head {int(most['head'])}"
        rest = f" Heads also rest on a column that is no token: {null['value'].mean():.1%} of all attention, {where}."
    top = heads.sort_values("value").iloc[-1]
    even = even[even["layer"] == top["layer"]]["value"]  # windows may differ by layer
    floor = f"; uniform attention would give {even.iloc[0]:.1%}" if len(even) else ""
    place = f"layer {int(top['layer'])}, head {int(top['head'])}"
    anywhere = _anywhere(frame, token)
    if strong.empty:
        lead = "The first token is no sink" if _rests(frame) else "There is no sink to drain"
        return (
            f"{lead}: the strongest head ({place}) gives the first token "
            f"{_percent(top['value'], top['se'])} of its attention{floor}; a sink here means more than {SINK_MASS:.0%}.{anywhere}{rest}"
        )
    drained = _drain_text(frame, _drain(frame), {int(n) for n in strong["layer"]}, "the first token's value has")
    return (
        f"{len(strong)} of {len(heads)} heads give the first token more than {SINK_MASS:.0%} of their attention (strongest "
        f"{_percent(top['value'], top['se'])}, {place}{floor}); {drained}.{anywhere}{rest}"
    )


def _drain_text(frame: pd.DataFrame, drain: pd.DataFrame, layers: set[int], whose: str) -> str:
    """Return whether values at sinks of these layers are drained, with the smallest ratio."""
    drain = drain[drain["layer"].isin(layers)].sort_values("value")
    if drain.empty:
        return "their values were not measured"
    worst, verdicts = drain.iloc[0], list[str]()  # by two standard errors; unresolved without an error
    for value, se in zip(drain["value"], drain["se"], strict=True):
        known = "drained" if value + 2 * se < DRAINED else "not drained" if value - 2 * se > DRAINED else "unresolved"
        verdicts.append(known)
    before = _drain(frame, last=False) if pd.isna(worst["variant"]) else drain.head(0)
    text = (
        f"{verdicts[0]}: {whose} {pm(worst['value'], worst['se'])} times the others' median norm in layer "
        f"{int(worst['layer'])} (1 = none, drained below {DRAINED}){_at_init(frame, before, worst['layer'])}"
    )
    drained = f"; {verdicts.count('drained')} of {len(drain)} layers with sinks are drained"
    return text + drained * (len(drain) > 1)


def _anywhere(frame: pd.DataFrame, token: TokenName) -> str:
    """Return the heads that rest on any few positions, with positions and tokens; empty if these were not sought."""
    shares = _finite(_at(frame, "found_sinks"))
    heads = shares[shares["variant"].isna()].sort_values("value")
    if heads.empty:
        return ""
    top, strong = heads.iloc[-1], heads[heads["value"] > SINK_MASS]
    most = f"{_percent(top['value'], top['se'])}, layer {int(top['layer'])}, head {int(top['head'])}"
    if strong.empty:
        return f" No other position is one either: few positions of a head hold at most {most}."
    where = sink_names(_of_head(shares, top), token)
    differ = "; these differ between documents, as where heads find tokens again, and are no sink"
    kind = "" if _rests(frame) else differ
    text = f" At any position: {len(strong)} of {len(heads)} heads rest on {FOUND_MOST} positions at most (strongest {most}: {where}{kind})"
    if where != "position 0":
        drain = _drain(frame, variant="found")
        text += f"; {_drain_text(frame, drain, {int(n) for n in strong['layer']}, 'values there have')}"
    others = shares[shares["variant"].str.startswith("token ").fillna(False) & (shares["value"] >= SECONDARY)]
    largest = others.groupby("variant", observed=True)["value"].max().sort_values(ascending=False).head(3)
    named = [f"{token(int(str(name).split()[-1]))} (up to {share:.0%} of a head)" for name, share in largest.items()]
    return text + (f". Later in a document, sinks are {', '.join(named)}." if named else ".")


def _of_head(shares: pd.DataFrame, row: pd.Series) -> pd.DataFrame:
    return shares[(shares["layer"] == row["layer"]) & (shares["head"] == row["head"])]


def _rests(frame: pd.DataFrame) -> bool:
    """Return whether some head rests on few positions or tokens that are the same in most documents."""
    shares = _finite(_at(frame, "found_sinks"))
    heads = shares[shares["variant"].isna() & (shares["value"] > SINK_MASS)]
    return any(not sink_names(_of_head(shares, row)).endswith(OTHERS) for _, row in heads.iterrows())


def sink_names(shares: pd.DataFrame, token: TokenName = TOKEN) -> str:
    """Return where one head rests, from its rows of `found_sinks`: positions if these hold 80 % of it, otherwise tokens."""
    total = float(shares[shares["variant"].isna()]["value"].iloc[0])
    for kind in ("position", "token"):
        rows = shares[shares["variant"].str.contains(f"{kind} ").fillna(False)].sort_values("value", ascending=False)
        rows = rows[rows["value"].cumsum().shift(fill_value=0) < ALMOST * total].head(FOUND_MOST)
        names = [str(name) for name in rows["variant"]]
        if kind == "position" and rows["value"].sum() >= ALMOST * total:
            numbers = sorted(int(name.split()[-1]) for name in names)
            return f"position{'s' if len(numbers) > 1 else ''} {' and '.join(map(str, numbers))}"
    words = ("the first " * name.startswith("first ") + token(int(name.split()[-1])) for name in names)
    more = "" if rows["value"].sum() >= ALMOST * total else OTHERS
    return ", ".join(words) + more


def _drain(frame: pd.DataFrame, *, last: bool = True, variant: str | None = None) -> pd.DataFrame:
    rows = _finite(_at(frame, "value_drain", last=last))
    rows = rows[rows["variant"].isna() if variant is None else rows["variant"] == variant]
    own = rows[rows["site"] == "own_v"]
    return own if (own["layer"] > 0).any() or rows["site"].ne("v").all() else rows[rows["site"] == "v"]


def _deep(frame: pd.DataFrame) -> pd.DataFrame:
    """Later half of the layers, own values where there are any."""
    own = frame[frame["site"] == "own_v"]
    rows = own if (own["layer"] > 0).any() else frame[frame["site"] == "v"]
    rows = rows[rows["layer"].notna() & (rows["layer"] > 0)]
    return rows[rows["layer"] >= (rows["layer"].max() + 1) / 2] if len(rows) else rows


def token_share_text(frame: pd.DataFrame) -> str:
    """Share of the variance of deep values that the token's identity explains, against init and shuffled ids."""
    found = _deep(_at(frame, "token_identity_share"))
    deep = _finite(found)
    if len(found) and deep.empty:
        return "Not measurable here: no two tokens occur twice each, or values do not differ, so there is nothing to explain."
    if deep.empty:
        return "Not measurable here: no layer after the first has values of its own."
    worst = deep["se"].max()
    error = " (error unknown)" if math.isnan(worst) else f" (± at most {worst:.1%})"
    control = _finite(_deep(_at(frame, "token_identity_share", control="shuffled")))
    beside = [f"{control['value'].abs().max():.0%} with shuffled ids"] if len(control) else []
    if len(start := _finite(_deep(_at(frame, "token_identity_share", last=False)))) and frame["step"].max() > 0:
        beside.append(f"{_range(start['value'])} at random init")
    what = "own values" if (deep["site"] == "own_v").all() else "effective values"
    first, last = int(deep["layer"].min()), int(deep["layer"].max())
    layers = f"layer {first}" if first == last else f"layers {first} to {last}"
    return (
        f"{_range(deep['value'])}{error} of the variance of the {what} in {layers} is the identity of the token "
        f"({', '.join(beside) or 'no baseline measured'}); 100 % would be a lookup table."
    )


def _replaced(change: dict[str, tuple[float, float]], has_own: bool = True) -> str:
    """Return the loss from replacing later values, or why it is unknown."""
    if not {"token_mean", "zero"} & set(change):
        return _NOT_REPLACED if has_own else _NO_OWN
    share = change.get("seen", (math.nan, math.nan))[0]
    seen = f" (at {share:.0%} of the positions: not all tokens have one)" if share < 0.995 else ""
    costs = []
    for name, how in (("token_mean", f"their token's mean{seen}"), ("zero", "zero")):
        value, se = change.get(name, (math.nan, math.nan))
        if math.isfinite(value):
            number = f"{value:+.3f} nats (error unknown)" if math.isnan(se) else f"{value:+.3f} ± {se:.3f} nats"
            costs.append(f"{how} costs {number}")
    return f"Replacing all later layers' own values by {', by '.join(costs) or 'anything'}{'' if costs else ' gives no number'}."


def residual_text(frame: pd.DataFrame, path: str | None = None) -> str:
    """Return the arguments for and against a value residual in this model.

    Args:
        frame: Records of the model.
        path: The value paths that were found in its numbers, in words; "" where there are none, None where they are unknown.
    """
    rows = _at(frame, "value_ablation")
    rows = rows if len(rows) else _at(frame, "deep_value_ablation")
    rows = rows[rows["layer"].isna()]  # the values of all layers after the first are replaced
    pairs = zip(rows["value"].astype(float), rows["se"].astype(float), strict=True)
    change = dict(zip(map(str, rows["variant"]), pairs, strict=True))  # of the loss, and its error
    has_own = bool(((frame["site"] == "own_v") & (frame["layer"] > 0)).any())
    architecture = str(frame["architecture"].iloc[0])
    known = [ARCHITECTURES[part] for part in architecture.split("+") if part in ARCHITECTURES]
    if has := next((a.label for a in known if a.value_path), path):
        why = "A model trained without that path would show whether it is the cause."
        return f"It has a value path already ({has}). {_replaced(change, has_own)} {why}"
    if path is None and architecture == "unknown":
        return f"Undecided: it is unknown whether the model has a value path already. {_replaced(change, has_own)}"
    if why := _undecided(change, has_own):
        return f"Undecided: {why[0].lower()}{why[1:]}"
    for_it, against, low = _of_values(change)
    mass = _finite(_at(frame, "sink_mass"))["value"]
    if len(mass) and (float(mass.max()) > SINK_MASS or _rests(frame)):
        for_it.append("there are sinks, which the published models lose")
    elif len(mass):
        against.append("there are no sinks to remove")
    more = len(for_it) - len(against)
    start = "Open" if low or not more else "More speaks for it" if more > 0 else "More speaks against it"
    pro, con = ("; ".join(reasons) or "nothing measured here" for reasons in (for_it, against))
    return f"{start}; for: {pro}. Against: {con}.{low} One model cannot decide it: {PUBLISHED}."


def _undecided(change: dict[str, tuple[float, float]], has_own: bool) -> str:
    """Why the replaced values decide nothing; empty where they may."""
    if not {"token_mean", "zero"} <= set(change):
        return _NOT_REPLACED if has_own else _NO_OWN
    if change.get("seen", (1.0, 0.0))[0] == 0:
        return "no token of these documents is in the table of means, so nothing was replaced; give more documents."
    (token, token_se), (zero, zero_se) = change["token_mean"], change["zero"]
    if not math.isfinite(zero):
        why = "the loss is then no number, as where a norm of the attention's output divides by 0"
        return f"values cannot be zeroed here: {why}. {_replaced(change)}"
    if not math.isfinite(token):
        return f"values cannot be replaced by their token's mean here: the loss is then no number. {_replaced(change)}"
    if math.isnan(token_se) or math.isnan(zero_se):
        return f"one document gives no error; give more documents. {_replaced(change)}"
    return f"nothing is learned yet in later values. {_replaced(change)}" if abs(zero) < UNLEARNED else ""


def _of_values(change: dict[str, tuple[float, float]]) -> tuple[list[str], list[str], str]:
    """Reasons for and against a value residual from the replaced values, and what decides neither way."""
    (token, token_se), (zero, zero_se) = change["token_mean"], change["zero"]
    facts = _replaced(change).rstrip(".").replace("Replacing", "replacing")
    if zero <= 2 * zero_se:
        effect = "changes the loss by no more than its error" if zero >= -2 * zero_se else "lowers the loss"
        return [], [f"removing later values {effect} ({facts})"], ""
    supplied = 1 - token / zero
    error = 2 * math.hypot(token_se, token / zero * zero_se) / zero
    if supplied >= MOSTLY and supplied - error >= HARDLY:
        reason = f"the token alone supplies {supplied:.0%} of what later values do ({facts})"
        return [f"{reason}, and the first layer's values are a function of it"], [], ""
    if "seen" in change:  # a table from few documents: rare ids' means are noise, which costs what context would
        bound = (
            f" The token alone supplies at least {max(supplied, 0):.0%} of what later values do ({facts}): a table of means from as many "
            "documents as were measured gives a lower bound, which decides neither way; `--layers` reads a large one."
        )
        return [], [], bound
    if supplied + error < HARDLY:
        return [], [f"later values need context: the token alone supplies {supplied:.0%} of what they do ({facts})"], ""
    if supplied + error < MOSTLY:
        return [], [f"the token supplies only part, {supplied:.0%}, of what later values do ({facts})"], ""
    return [], [], f" How much the token alone supplies is unresolved: {supplied:.0%} ± {error / 2:.0%} ({facts})."


SENTENCES = {
    "concentration": concentration_text,
    "sinks": sinks_text,
    "token_share": token_share_text,
    "residual": residual_text,
}
