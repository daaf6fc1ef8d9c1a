"""Is it better information flow, or only easier optimisation?"""

from __future__ import annotations

import contextlib

from workbench.claims.evidence import Evidence
from workbench.claims.loss import at_best_rates, beside_scaled
from workbench.claims.registry import PAPER, RESFORMERS, SCALED, claim
from workbench.claims.verdict import InsufficientEvidence, Verdict, judged
from workbench.claims.verdict_wording import RATES, intervals_text, model_name, seeds_note


@claim(
    supports="the value residual wins at each of three learning rates and at each model's best; no vanilla model whose first layer, or "
    "first W_V, learns faster catches up; nor does a model whose later values are halved",
    refutes="vanilla ends lower: at one of the rates, tuned, or with a faster first layer",
    scale="8 layers, three seeds, three rates for each architecture",
    published="a figure over learning rates (paper, its caption); the gradient of the first W_V rises and the gradient of the first W_O "
    "falls (reported by others)",
    source=PAPER, metrics=("gradient_norm",), models=("transformer", *RESFORMERS), shows={"metric": "gradient_norm", "part": "W_V"},
    final_loss=True,
)  # fmt: skip
def not_merely_easier_optimisation(evidence: Evidence) -> Verdict:
    """The gain is not merely easier optimisation: it stays at every tuned learning rate, and faster first layers do not give it."""
    text = evidence.of_task("text")
    sweep = text.comparable("transformer", RESFORMERS, ignoring=("lr",))
    model = sweep.first_of(RESFORMERS)
    losses = sweep.losses()
    by_rate = ((rate, rows) for rate, rows in losses.groupby("lr") if {model, "transformer"} <= set(rows["model"]))
    intervals = {f"at rate {rate:g}": sweep.difference(rows, model) for rate, rows in by_rate}
    best, tuning = at_best_rates(text, "transformer", (model,), also=(SCALED,))
    tuned = {"each at its best rate": best.difference(best.losses(), model)} if tuning.rates >= RATES else {}
    scaled, told = beside_scaled(best, best.losses(), model)
    if not intervals:
        raise InsufficientEvidence("The two models share no learning rate.")
    controls = [m for m in sweep.models if m.startswith("transformer[")]
    tried = losses.groupby("model")["lr"].agg(set)
    shared = {name: losses[losses["lr"].isin(tried[model] & tried.get(name, set()))] for name in controls}
    against = {f"against {name}": sweep.difference(rows, model, name) for name, rows in shared.items()}
    first = next(iter(intervals.values()))
    lacking = [f"learning rates ({tuning.rates} of the {RATES} needed)"] * (tuning.rates < RATES)
    lacking += ["the control with halved values"] * (not scaled)
    lacking += ["no vanilla control whose first layer learns faster"] * (not controls)
    missing = f"; missing: {', '.join(lacking)}" if lacking else ""
    more = "".join(f"; {name} {i}" for name, i in {**tuned, **against}.items()) + (told if scaled else "")
    norms = dict[str, str]()  # the shortcut adds terms to the gradient of W_V, so its rise is expected
    for part in ("W_V", "W_O"):
        with contextlib.suppress(InsufficientEvidence):
            rows = sweep.rows("gradient_norm", part=part, layer=0)
            mine, base = sweep.by_seed(rows, model), sweep.by_seed(rows, "transformer")
            if len(mine) and len(base):
                norms[part] = f"{mine.mean() / base.mean():.2f} times for {part}"
    if len(norms) == 2:
        more += (
            f"; gradient norms of the first layer are {' and '.join(norms.values())} (the first close to a tautology)"
        )
    more += missing
    sentence = f"{model_name(model)} - Transformer {intervals_text(intervals, ', ')} nats{seeds_note(first)}{more}."
    return judged({**intervals, **tuned, **against}, -1, sentence, "nats", also=scaled, doubt=lacking)
