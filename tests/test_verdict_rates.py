"""False verdicts of every claim by chance: a simulation, and the page that prints it."""

import math

import pandas as pd
import pytest
from verdict_rates import NOISE, OUT, TABLES, choices, rates

from workbench.claims import CLAIMS

MOST = 6.0  # per cent of verdicts that may be false


def test_every_claim_that_can_be_judged_has_its_rates_on_the_page():
    told = pd.read_csv(OUT)
    assert set(NOISE) == set(CLAIMS) - {"downstream_gains"}
    assert set(told["claim"]) >= set(NOISE)
    assert (told[["supported", "one part false", "refuted"]].fillna(0) <= MOST).all(axis=None)


@pytest.mark.slow
def test_false_verdicts_are_as_rare_as_the_page_says():
    found, told = pd.DataFrame([*rates(), *choices()]), pd.read_csv(OUT)
    error = 100 * math.sqrt(0.05 * 0.95 / TABLES)
    for column in ("supported", "one part false", "refuted"):
        assert (found[column].fillna(0) <= MOST + 3 * error).all(), found[["claim", "seeds", column]].to_string()
    both = found.merge(told, on=["claim", "seeds"], suffixes=("", " told"))
    assert len(both) == len(told) == len(found)
    for column in (
        "supported",
        "one part false",
        "refuted",
        "power at 1 sigma",
        "power at 2 sigma",
        "power at 3 sigma",
    ):
        assert ((both[column] - both[f"{column} told"]).abs().fillna(0) <= 3).all(), column
