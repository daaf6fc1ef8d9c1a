"""Do the values of deep layers need context?

Claim (after Bank of Values, arXiv 2606.02780): in a trained vanilla model most of the variance of deep own values is the
token's identity, and replacing them by their mean per token costs a small part of what zeroing costs. Refuted where the
token mean costs about as much as zero. Control: the same share at random init, and under shuffled ids.
"""

from analyses.common import arguments, conclude, read
from workbench import plots
from workbench.findings import values_verdict


def main() -> None:
    """Read the text models, print shares and loss changes with the verdict."""
    given = arguments(__doc__ or "")
    _, frame, _ = read(given.runs, "text")
    share = frame[(frame["metric"] == "token_identity_share") & (frame["site"] == "own_v")]
    ablated = frame[frame["metric"] == "value_ablation"]
    kept = ["architecture", "seed", "step", "metric", "layer", "variant", "control", "value", "se", "n", "unit"]
    table = ablated[kept] if len(ablated) else share[kept]
    conclude(given.out, "deep_values", values_verdict(frame), table, plots.plot(share))


if __name__ == "__main__":
    main()
