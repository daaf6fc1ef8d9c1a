"""Do value paths speed up induction?

Claim (ours, exploratory): on random tokens repeated once, models whose later layers read the first layer's values learn to
copy earlier than the vanilla Transformer, and a residual on the keys does not help. Refuted where the order of formation
steps (Olsson et al. 2022: first step with the copy loss below half of its start) is lost in any seed. Published: none known.
"""

from analyses.common import arguments, conclude, read
from workbench import plots
from workbench.findings import formation_steps, race_verdict


def main() -> None:
    """Read the race, print formation steps and the verdict."""
    given = arguments(__doc__ or "")
    _, _, telemetry = read(given.runs, "race")
    steps = formation_steps(telemetry)
    conclude(given.out, "race_to_induction", race_verdict(steps), steps, plots.race(telemetry))


if __name__ == "__main__":
    main()
