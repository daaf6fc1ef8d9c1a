"""What a referee checks on a page: corrected intervals, paired differences, runs behind a verdict, names and captions."""

from __future__ import annotations

from dataclasses import replace

import dashboard
import numpy as np
import pandas as pd
import pytest
from scipy import stats

from app.page_layout import provenance_table
from workbench import plots
from workbench.claims import CLAIMS, DECIDED, stored_verdicts
from workbench.claims.judging import chosen
from workbench.claims.verdict import (
    Verdict,
    corrected,
    in_one_sentence,
    judge_differences,
    judged,
    judged_by_seed,
    of_settings,
)
from workbench.errors import WorkbenchError
from workbench.file_io import read_json
from workbench.places import SHIPPED
from workbench.statistics.censored import compare_steps
from workbench.statistics.intervals import Interval, over_seeds
from workbench.statistics.multiple_testing import holm, holm_factors
from workbench.statistics.parameter_and_token_savings import saved_share
from workbench.views import Link, Source, depth, differences, main_result, start, start_runs
from workbench.views.source import RunAtStep, prompt_notes
from workbench.views.writing import caption_of


@pytest.fixture(scope="module")
def source(populated):
    return dashboard.kept(populated)


def test_factors_of_holm_are_the_adjusted_over_the_plain_p_values():
    p = [0.01, 0.04, 0.03, 0.0]
    np.testing.assert_allclose(np.multiply(holm_factors(p), p), holm(p))
    assert holm_factors([0.0, 0.5]) == [2.0, 1.0]
    assert holm_factors([0.03, 0.04]) == [2.0, 1.5], "the second is raised to the first's 0.06"


def test_a_claim_with_several_settings_has_the_share_of_one():
    """Weights 1, 1/2, 1/2. Over its weight the first p is 0.02, the others 0.08 and 0.024; 2, 1 and 1/2 of the weights are left."""
    p, weights = [0.02, 0.04, 0.012], [1.0, 0.5, 0.5]
    assert holm(p, weights) == pytest.approx([0.04, 0.04, 0.04])
    assert holm([0.01, 0.04, 0.012], weights) == pytest.approx([0.02, 0.04, 0.024])
    assert holm(p, [1.0, 1.0, 1.0]) == holm(p)
    np.testing.assert_allclose(np.multiply(holm_factors(p, weights), p), holm(p, weights))
    with pytest.raises(ValueError, match="not tested"):
        of_settings([("A", Verdict("supported", "", p=0.01)), ("B", Verdict("gated", ""))])


def test_a_widened_interval_is_students_at_the_divided_level():
    values = pd.Series([0.1, 0.3, 0.2, 0.5], index=pd.Index([0, 1, 2, 3], name="seed"))
    plain = over_seeds(values)
    assert plain.seeds == ("0", "1", "2", "3")
    half = stats.t.ppf(1 - 0.05 / 6 / 2, 3) * stats.sem(values)
    wide = plain.widened(6.0)
    assert (wide.low, wide.high) == pytest.approx((plain.value - half, plain.value + half))
    assert plain.widened(1.0).high == pytest.approx(plain.high)


def test_a_widened_share_stays_below_one_and_other_intervals_have_none():
    share = saved_share([0.8, 0.7, 0.9])
    wide = share.widened(10.0)
    assert wide.low < share.low < share.high < wide.high < 1
    assert np.isnan(Interval(0.5, 0.4, 0.7, 100).widened(2.0).low), "over documents"
    assert np.isnan(Interval(3.0, np.nan, np.nan, 3, 0.01, (1.0, 2.0, 6.0)).widened(2.0).low), "log-rank"


def test_a_log_rank_test_fills_the_point_that_has_no_whisker():
    never = pd.DataFrame({"at": [100.0] * 5, "formed": False})
    fast = pd.DataFrame({"at": [10.0, 12, 14, 11, 13], "formed": True})
    later, same = compare_steps(never, fast), compare_steps(never, never)
    assert str(later) == "+88 (n = 5, censored)"
    (verdict,) = corrected(
        [judged({"later": later}, 1, "", "steps", shown={"same": same, "one seed": over_seeds([3.0])})]
    )
    assert verdict.status == "supported"
    assert list(verdict.adjusted()["significant"]) == [True, False, False]
    assert not replace(verdict, factor=10.0).adjusted()["significant"].any()
    figure = plots.intervals(verdict.adjusted(), "")
    assert [figure.data[0].marker.symbol[0], figure.data[1].marker.symbol[0]] == ["circle", "circle-open"]
    assert "did not reach its step, a log-rank test decides" in figure.layout.title.subtitle.text.replace("<br>", " ")
    assert figure.data[0].customdata[0] == "log-rank p = 0.0079"
    seeds = judged_by_seed(verdict)
    assert seeds.set_index("comparison").loc["later", "seed 3"] == 89
    assert in_one_sentence(replace(verdict, setting="5 seeds of 2 models")) == "(5 seeds): later +88 steps, p = 0.0079."


def test_tables_have_the_interval_before_and_after_the_correction_and_name_a_share_that_passes_its_range():
    plain = over_seeds([-0.9, -0.5, -0.7])
    found = replace(judged({"mass": plain, "saved": over_seeds([-1.5, -1.2, -1.3])}, -1, "", "share"), factor=9.0)
    first, saved = found.adjusted().to_dict("records")
    assert [*found.adjusted()][2:6] == ["low", "high", "low_adjusted", "high_adjusted"]
    assert (first["low"], first["high"]) == (plain.low, plain.high)
    wide = plain.widened(9.0)
    assert (first["low_adjusted"], first["high_adjusted"]) == (wide.low, wide.high)
    assert (first["note"], saved["note"]) == ("an interval passes -1 or 1: so few seeds do not bound this share", "")
    assert plots.intervals(found.adjusted(), "").data[0].error_x.array[0] == pytest.approx(wide.high - wide.value)
    assert f"[{wide.low:+.3g}, {wide.high:+.3g}] Holm-adjusted" in in_one_sentence(found)


@pytest.mark.slow
def test_every_claim_with_shipped_evidence_lists_its_judged_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.views.source.EVIDENCE", SHIPPED / "evidence")
    stored = stored_verdicts.parse_verdicts(read_json(SHIPPED / "evidence" / stored_verdicts.FILE))
    for claim in chosen():
        verdict, here = stored.of[claim.name], Source(tmp_path)
        table, _ = start.runs_behind(here, start.Judgement(claim, verdict, ()))
        judged_columns = table.drop(columns=["run", "model", "seed", "address"])
        assert len(table) == len(verdict.runs)
        assert len(judged_columns.columns), claim.name
        assert judged_columns.notna().any().all(), claim.name
        if len(verdict.table) and verdict.status in DECIDED:
            assert judged_by_seed(verdict).iloc[:, 2:].notna().any(axis=None), claim.name
    onset = start.runs_behind(
        here, start.Judgement(CLAIMS["a_gate_prevents_the_sink"], stored.of["a_gate_prevents_the_sink"], ())
    )[0]
    assert {"not formed by step 7200", "step 3311"} <= set(onset["step of sink onset (strongest head above 0.5)"])
    loss = stored.of["lower_loss"]
    table = start.runs_behind(here, start.Judgement(CLAIMS["lower_loss"], loss, ()))[0]
    minus = table.loc[table["model"] == "ResFormer", "minus Transformer, same seed"]
    assert minus.mean() == pytest.approx(loss.table["value"].iloc[0]), "the judged difference"


def test_whiskers_exclude_zero_exactly_where_the_verdict_is_decided():
    rng = np.random.default_rng(1)
    for _ in range(40):
        differences = {i: over_seeds(rng.normal(rng.choice([0.0, 0.8]), 0.5, 5)) for i in range(4)}
        for i, verdict in judge_differences(differences).items():
            assert (differences[i].widened(verdict.factor).sign != 0) == (verdict.status != "unresolved")


def test_a_compound_claim_names_the_comparison_that_fails():
    clear, vague = over_seeds([-0.3, -0.31, -0.29]), over_seeds([-0.3, 0.31, -0.29])
    verdict = judged({"a": clear}, -1, "", "nats", also={"b": vague}, shown={"c": clear})
    (verdict,) = corrected([verdict])
    assert verdict.status == "unresolved"
    assert verdict.unmet() == {"b": "the adjusted interval does not exclude 0 in the claimed direction"}
    few = judged({"a": clear, "b": over_seeds([0.1])}, -1, "", "nats", min_seeds=5)
    assert few.unmet() == {"a": "too few seeds for a test", "b": "too few seeds for an interval"}
    assert list(verdict.adjusted()["role"]) == ["decides", "must hold too", "context"]
    assert list(verdict.adjusted()["significant"]) == [True, False, True]


def test_corrections_for_settings_and_claims_multiply_and_are_stored(tmp_path):
    one, other = (judged({"a": over_seeds(x)}, -1, "", "nats") for x in ([-0.3, -0.31, -0.28], [-0.3, -0.1, -0.2]))
    both = of_settings([("A", one), ("B", other)])
    assert both.factor == pytest.approx(2.0)
    verdict, _ = corrected([both, other])
    assert verdict.factor == pytest.approx(4.0)
    stored_verdicts.save_verdicts(tmp_path, "m", stored_verdicts.Verdicts({"x": verdict}, frozenset(), {}))
    stored = stored_verdicts.load_verdicts(tmp_path, "m").of["x"]
    assert stored.settings == verdict.settings
    assert stored.details == verdict.details
    pd.testing.assert_frame_equal(stored.adjusted(), verdict.adjusted())


# ---- pages -----------------------------------------------------------------------------------------------------------


def test_the_difference_by_layer_is_paired_and_needs_three_seeds(source):
    link = Link(
        "depth",
        {
            "set": source.group(Link("depth", {"a": "text-resformer-s0"}))[0].group,
            "metric": "token_identity_share",
            "site": "v",
        },
    )
    drawing = depth.differences(source, link)
    rows = drawing.table[drawing.table["architecture"] == "resformer"]
    np.testing.assert_allclose(rows["value"], 0, atol=1e-12)
    assert list(rows["layer"]) == [0, 1]
    assert drawing.sentence.startswith("2 paired seeds: a verdict needs 3")
    assert all(trace.error_y.array is None for trace in drawing.figure.data)
    two = link.but(compare=1, a="text-resformer-s0", b="text-transformer-s1")
    assert "ResFormer minus Transformer" in depth.differences(source, two).figure.layout.title.text
    assert depth.differences(source, two).figure.layout.title.text.endswith("step 20")
    with pytest.raises(WorkbenchError, match="two seeds of one model"):
        depth.differences(source, two.but(b="text-resformer-s1"))


def test_three_seeds_decide_a_layer(source, monkeypatch):
    tables = {"resformer": [[1.0, 5.0], [1.2, 5.1], [0.9, 5.2]], "transformer": [[1.1, 1.0], [1.0, 1.1], [1.0, 1.15]]}
    monkeypatch.setattr(
        depth,
        "_by_layer",
        lambda s, o, entries, step: (pd.DataFrame(tables.get(entries[0].series, [[np.nan, np.nan]] * 3)), set()),
    )
    drawing = depth.differences(
        source, Link("depth", {"set": source.group(Link("depth", {"a": "text-resformer-s0"}))[0].group})
    )
    rows = drawing.table.set_index(["architecture", "layer"])
    assert rows.loc[("resformer", 1), "value"] == pytest.approx(4.0166667)
    assert list(rows.loc["resformer", "significant"]) == [False, True]
    # a column `p` is shown as adjusted, as that of `workbench diff` is
    assert "p" not in rows
    assert rows.loc[("resformer", 1), "p_unadjusted"] < 0.05
    assert drawing.figure.data[0].customdata[1][1].startswith(" [")
    assert rows.loc[("resformer", 1), "low_adjusted"] < rows.loc[("resformer", 1), "low"], "over two comparisons"
    assert "ResFormer: differs in layer 1" in drawing.sentence
    assert "Holm-adjusted over 2 comparisons" in drawing.figure.layout.title.subtitle.text.replace("<br>", " ")


def test_no_difference_by_layer_averages_matrices_terms_or_other_layers(source, monkeypatch):
    link = Link(
        "depth", {"set": source.group(Link("depth", {"a": "text-resformer-s0"}))[0].group, "metric": "sink_mass"}
    )
    assert depth.depth_options(source, link).is_paired
    assert depth.has_pairs(source, link, depth.depth_options(source, link))
    read = source.records
    for axis, values in (("part", ["W_V", "W_Q"]), ("source", [0, 1])):
        monkeypatch.setattr(source, "records", lambda *a, axis=axis, values=values: pd.concat(
            [read(*a).assign(**{axis: pd.array([v] * len(read(*a)), read(*a)[axis].dtype)}) for v in values], ignore_index=True
        ))  # fmt: skip
        with pytest.raises(WorkbenchError, match="one number per layer"):
            depth.differences(source, link)
    monkeypatch.setattr(source, "records", lambda *a: (rows := read(*a))[rows["architecture"] != "transformer"])
    assert not depth.has_pairs(source, link, depth.depth_options(source, link)), "the Transformer has no records"


def test_two_seeds_of_one_model_have_no_differences_of_stored_measures(source):
    link = Link("differences", {"a": "text-resformer-s0", "b": "text-resformer-s1", "compare": "1"})
    with pytest.raises(WorkbenchError, match="two seeds of one model"):
        differences.moved_measures(source, link)


def test_lines_over_layers_are_drawn_where_several_runs_have_heads(source):
    group = source.group(Link("depth", {"a": "text-resformer-s0"}))[0].group
    assert depth.depth_options(source, Link("depth", {"set": group, "metric": "sink_mass"})).form == "profile"
    assert depth.depth_options(source, Link("depth", {"set": group})).metric == "importance_entropy"
    course = depth.layers(source, Link("depth", {"set": group, "metric": "sink_mass", "view": "steps"}))
    assert "Heads of different runs with equal numbers are unrelated." in course.sentence


def test_a_verdict_leads_to_its_runs_with_their_values(source):
    judged_ = {j.claim.name: j for j in start.judgements(source, Link("start", {"show": "verdicts"}))}
    table, records = start.runs_behind(source, judged_["value_paths_speed_up_induction"])
    assert list(dict.fromkeys(table["model"])) == ["Transformer", "SVFormer"], (
        "the baseline first, then what is compared"
    )
    assert set(table["seed"]) == {0, 1, 2}
    assert table["step of learning to copy"].notna().all()
    assert table["last copy loss, mean"].notna().all()
    assert table["address"].str.startswith("training?set=").all()
    assert records["provenance"].notna().any(), "the drawer names what was read"


def test_the_main_result_states_its_budget_and_lists_what_training_logged(source):
    group = source.group(Link("start", {"a": "text-resformer-s0"}))[0].group
    result = main_result.finding(source, Link("start", {"set": group}))
    assert result.outcome is main_result.LOSS
    words = f"These runs end at {result.budget:.3g} training tokens per parameter; differences are of early training"
    assert words in main_result.method(result)
    rows = main_result.logged_rows(source, source.catalogue().groups[group], [result.outcome.quantity])
    listed = provenance_table([rows])
    assert set(listed["run"]) == {e.name for e in source.catalogue().groups[group]}
    assert set(listed["weights"]) == {"logged by training"}


def test_the_table_of_runs_has_losses_rates_and_seeds(source):
    table = start_runs.runs_table(source).set_index("run")
    row = table.loc["text-resformer-s0"]
    assert (row["rate"], row["seeds"]) == (1e-3, 2)
    assert row["final loss"] == pytest.approx(4.0 - 1.0 - 0.05 * 8)


def test_a_picture_names_model_step_prompt_and_recipe(source):
    words = caption_of(source, Link("attention", {"a": "text-resformer-s0", "step": "8", "prompt": "return  values"}))
    assert words.startswith("ResFormer · s0, step 8; prompt “return values”; text (prose): 2 layers of width 16")
    assert words.endswith("rate 0.001")
    pair = {"compare": "1", "a": "text-resformer-s0", "step": "8", "b": "text-transformer-s0", "step_b": "8"}
    assert caption_of(source, Link("depth", pair)).startswith(
        "A: ResFormer · s0, step 8; B: Transformer · s0, step 8; "
    )


def test_prompts_of_symbols_say_what_is_left_out(source):
    entry = next(e for e in source.catalogue().entries if e.name == "race-svformer-s0")
    assert prompt_notes(entry, "abc") == []
    assert "spaces and line ends are left out" in prompt_notes(entry, "ab c")[0]


def test_an_imported_model_keeps_its_name(source):
    from dataclasses import replace

    entry = replace(
        source.catalogue().entries[0],
        kind="imported",
        name="gpt2",
        series="transformer · gpt2",
        architecture="transformer",
    )
    assert RunAtStep(entry, 20).title == "gpt2, step 20"
    assert RunAtStep(entry, 20, "A").series == "transformer · A: gpt2, step 20"
    alone = replace(entry, steps=(0,))
    assert RunAtStep(alone, 0).title == "gpt2", "a single checkpoint without a step is stored at step 0"
    assert RunAtStep(alone, 0, "A").series == "transformer · A: gpt2"


@pytest.mark.slow
def test_pages_are_linked_with_the_experiment_that_is_shown(browse, populated):
    links = [e.proto.query_string for e in browse(populated, "depth").sidebar.get("page_link")]
    assert len(links) > 6
    assert all("set=text-2x16" in link for link in links), "another page would choose an experiment of its own"
    links = [e.proto.query_string for e in browse(populated, "attention", head="1").sidebar.get("page_link")]
    assert all("a=text-resformer-s0" in link for link in links), "a head of another model is another head"


def test_a_model_that_cannot_be_opened_says_why(browse, populated, tmp_path):
    at = browse(populated, "start", show="here")
    at.text_input(key="open_path").set_value(str(tmp_path / "nowhere.pt"))
    at.button(key="open_model").click()
    dashboard.settled(at.run())
    assert any("nowhere" in w.value.replace("\\", "") for w in at.warning)
