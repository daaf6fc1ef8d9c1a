"""Does the gain carry over to downstream tasks?"""

from __future__ import annotations

from workbench.claims.evidence import Evidence
from workbench.claims.registry import PAPER, RESFORMERS, claim
from workbench.claims.verdict import InsufficientEvidence, Verdict

MIN_PARAMETERS = 80e6  # parameters: below, zero-shot accuracies are at chance


@claim(
    supports="zero-shot accuracy above vanilla's by more than its standard errors, over tasks",
    refutes="no difference beyond the errors",
    scale="not checkable small: accuracies of small models are at chance",
    published="average of six tasks at 2,048 tokens 0.333 against 0.355 (paper's table; its text rounds 2.2 points up to almost 3), "
    "mostly ARC-e and PIQA, with ARC-c worse; 468M: 40.6 % against 41.3 % to 42.3 % (reported by others)",
    source=PAPER,
)  # fmt: skip
def downstream_gains(evidence: Evidence) -> Verdict:
    """A value residual gains on downstream tasks without further training."""
    pair = evidence.of_task("text").comparable("transformer", RESFORMERS)
    size = float(pair.of_models(["transformer"]).fact("parameters"))
    if size < MIN_PARAMETERS:
        raise InsufficientEvidence(
            f"Models of {size / 1e6:.1f} M parameters answer zero-shot tasks at chance; {MIN_PARAMETERS / 1e6:.0f} M is the least."
        )
    raise InsufficientEvidence(
        "Zero-shot accuracy is measured by the evaluation harness, outside these records: lm-eval with --model workbench for each run."
    )
