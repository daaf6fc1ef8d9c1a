"""Is it better information flow, or only easier optimisation?"""

from __future__ import annotations

from workbench.claims.base import (
    RATES,
    RESFORMERS,
    Evidence,
    Undecided,
    Verdict,
    claim,
    few,
    joined,
    name_of,
    status_of,
    table_of,
)
from workbench.claims.loss import PAPER, tuned_difference


@claim(
    supports="the value residual wins at each of three learning rates and at each model's best; a vanilla model whose first "
    "layer, or first "
    "W_V, learns faster does not catch up",
    refutes="the control closes the gap, or the tuned baseline does",
    scale="8 layers, three seeds, three rates for each architecture",
    published="a figure over learning rates (paper, its caption); the gradient of the first W_V rises and that of the first W_O falls "
    "(reported by others)",
    source=PAPER, metrics=("gradient_norm",), models=("transformer", *RESFORMERS), shows={"metric": "gradient_norm", "part": "W_V"},
)  # fmt: skip
def not_merely_easier_optimisation(evidence: Evidence) -> Verdict:
    """The gain is not merely easier optimisation: it stays at every tuned learning rate, and faster first layers do not give it."""
    text = evidence.on("text")
    sweep = text.comparable("transformer", RESFORMERS, ignoring=("lr",))
    model = sweep.named(RESFORMERS)
    losses = sweep.losses()
    found = {}
    for rate, rows in losses.groupby("lr"):
        if {model, "transformer"} <= set(rows["model"]):
            found[f"at rate {rate:g}"] = sweep.difference(rows, model, "transformer")
    tuned, rates = tuned_difference(text, model)
    if not found:
        raise Undecided("not_checkable", "The two models share no learning rate.")
    controls = [m for m in sweep.models if m.startswith("transformer[")]
    against = {f"against {name}": sweep.difference(losses, model, name) for name in controls}
    gradients = _gradients(sweep, model)
    told = ", ".join(f"{name} {i}" for name, i in found.items())
    first = next(iter(found.values()))
    status = joined(status_of(i, -1) for i in {**found, **against}.values())
    if tuned.n and tuned.sign > 0:
        status = "refuted"
    lacking = []
    if rates < RATES:
        lacking.append(f"learning rates ({rates} of the {RATES} needed)")
    if not controls:
        lacking.append("no vanilla control whose first layer learns faster")
    if lacking and status == "supported":
        status = "unresolved"
    sentence = (
        f"{name_of(model)} - Transformer {told} nats{few(first)}; each at its best rate {tuned}"
        + "".join(f"; {name} {i}" for name, i in against.items())
        + gradients
        + (f"; missing: {', '.join(lacking)}." if lacking else ".")
    )
    return Verdict(status, sentence, table_of({**found, "each at its best": tuned, **against}, "nats"))


def _gradients(sweep: Evidence, model: str) -> str:
    """Ratio of first-layer gradient norms, a remark: the shortcut adds terms to W_V's, so its rise is close to a tautology."""
    ratios = []
    for part in ("W_V", "W_O"):
        try:
            rows = sweep.rows("gradient_norm", part=part, layer=0)
        except Undecided:
            return ""
        mine, base = sweep.by_seed(rows, model), sweep.by_seed(rows, "transformer")
        if mine.empty or base.empty:
            return ""
        ratios.append(f"{mine.mean() / base.mean():.2f} times for {part}")
    return f"; gradient norms of the first layer are {' and '.join(ratios)} (the first close to a tautology)"
