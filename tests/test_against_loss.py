"""Concentration and similarity of every checkpoint beside its loss: the table and the figure, on planted runs."""

import pytest
from planted import LAST, evidence, losses, row, runs

from workbench.claims import CLAIMS
from workbench.claims.concentration import against_loss
from workbench.claims.judging import judge, with_figure


def test_concentration_beside_the_loss_of_every_checkpoint():
    """Deep layers 2 and 3 of 4 have deficits 0.2 and 0.4; the loss is measured at the end and read off training half way."""
    made = runs("transformer", "neutreno", seeds=1)
    other = runs("svformer", seeds=1, T=256)
    rows = [
        row(of, "importance_entropy", n / 10 if n < 3 else 0.4, layer=n, variant="deficit", step=step, unit="nats")
        for of in made + other for step in (0, 50, LAST) for n in range(4)
    ]  # fmt: skip
    rows += [
        row(of, "sink_mass", 0.1 + 0.5 * h, layer=1, head=h, step=LAST, unit="share") for of in made for h in (0, 1)
    ]
    rows += [row(made[0], "loss", 2.0, step=LAST)]
    found = against_loss(evidence(made + other, rows, losses(made, lambda of: 3.0)), [made[0]["run"]])
    assert set(found["run"]) == {of["run"] for of in made}, "all models of the setting, and no other setting's"
    assert set(found["quantity"]) == {"entropy deficit, deep layers", "sink mass, strongest head"}, (
        "nothing was said of similarity"
    )
    mine = found[found["run"] == made[0]["run"]].set_index(["quantity", "step"])
    deficit = mine.loc["entropy deficit, deep layers"]
    assert deficit["value"].tolist() == pytest.approx([0.3] * 3)
    assert deficit["loss"].tolist() == pytest.approx([6.0, 5.0, 2.0]), (
        "6 and 4 at steps 0 and 100; measured 2 at the end"
    )
    assert mine.loc[("sink mass, strongest head", LAST), "value"] == pytest.approx(0.6)
    assert against_loss(evidence([], []), []).empty


def test_a_claim_of_both_shows_the_figure_of_the_setting_it_compared_and_none_where_nothing_was_measured():
    (claim,) = (c for c in CLAIMS.values() if c.shows.get("metric") == "against_loss")
    made = runs("transformer", "neutreno", "resformer", seeds=5)
    rows = [row(of, "sink_mass", 0.5, layer=1, head=0, step=s, unit="share") for of in made for s in (0, 100, LAST)]
    told = losses(made, lambda of: 3.0)
    shown = evidence(made, rows, told)
    measured = with_figure(*judge(shown, [claim]), shown)
    assert set(measured.shown["run"]) == {of["run"] for of in made}
    assert len([t for t in measured.figure.data if t.x[0] is not None]) == len(made)
    empty = evidence(made, (), told)
    bare = with_figure(*judge(empty, [claim]), empty)
    assert bare.figure is None
    assert bare.shown.empty
