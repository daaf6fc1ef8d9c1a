"""What the start page draws: an X-ray from what is stored, the runs, verdicts without measuring, and the demo's story."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace

import dashboard
import pandas as pd
import psutil
import pytest

from workbench import plots
from workbench.claims import stored_verdicts
from workbench.claims.collect_evidence import stored
from workbench.claims.judging import chosen
from workbench.claims.stored_verdicts import judge_apart
from workbench.claims.verdict import Verdict
from workbench.errors import BadData, WorkbenchError
from workbench.places import SHIPPED
from workbench.reports import xray as xrays
from workbench.runs.records import load_records, one_sample, provenance, records
from workbench.runs.run import Run
from workbench.statistics.censored import compare_steps
from workbench.statistics.intervals import Interval
from workbench.storage.packed import unpacked
from workbench.views import Link, Source, main_result, start, start_runs
from workbench.views.source import runs_to_show
from workbench.views.writing import caption_of

A, B = "text-resformer-s0", "text-transformer-s0"


@pytest.fixture(scope="module")
def ask(populated):
    return dashboard.kept(populated)


def link(show, **options):
    return Link("start", {"show": show} | {k: str(v) for k, v in options.items()})


# ---- shipped studies beside own runs ----


@pytest.fixture
def evidence(monkeypatch):
    """The shipped studies, as every installation has them."""
    monkeypatch.setattr("workbench.views.source.EVIDENCE", SHIPPED / "evidence")


@pytest.mark.slow
def test_every_shipped_figure_leads_to_its_runs_which_stand_below_those_of_the_folder(ask, tmp_path, evidence):
    ask = Source(ask.folder)
    entries, own = ask.catalogue().entries, ask.listed()
    assert entries[: len(own)] == own
    assert all(e.shipped for e in entries[len(own) :])
    for models in (start.concentration_models, start.text_models, start.race_models):
        drawn = models(Source(tmp_path))  # a folder without runs of its own
        names = {e.name for e in drawn}
        groups = {e.group for e in entries if e.name in names}
        assert len(groups) == 1, "one link shows them all"
        address = Link.parse(
            f"training?set={groups.pop()}&models={','.join(sorted({e.series for e in entries if e.name in names}))}"
        )
        assert names <= {e.name for e in ask.chosen(address)}
        assert len(ask.telemetry(ask.chosen(address)))
    assert not any(e.shipped for e in start.demo_runs(ask, "sinks")), "a shipped study has the names of the demo's runs"
    known = runs_to_show(ask.folder)
    again = runs_to_show(ask.folder, known)
    assert again.entries == known.entries
    assert again.entries[-1] is known.entries[-1], "shipped runs are read once"


@pytest.mark.slow
def test_shipped_runs_of_an_experiment_that_the_folder_has_are_not_mixed_with_its_own(tmp_path, evidence):
    run = next(unpacked(SHIPPED / "evidence" / "induction").iterdir())
    shutil.copytree(run, tmp_path / "mine-s0")
    groups = Source(tmp_path).catalogue().groups
    (mine,) = (runs for runs in groups.values() if "mine-s0" in {e.name for e in runs})
    assert [e.name for e in mine] == ["mine-s0"], "40 shipped runs have its data and recipe"
    assert len(groups) > 20


# ---- what was found ----


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """The study of learning to copy that ships: three rates, five seeds of six models."""
    folder = tmp_path_factory.mktemp("shipped")
    for run in unpacked(SHIPPED / "evidence" / "induction").iterdir():
        (folder / run.name).symlink_to(run)
    return dashboard.kept(folder)


@pytest.mark.slow
def test_the_finding_is_told_at_the_rate_that_was_best_for_the_baseline(shipped):
    found = main_result.finding(shipped, link("finding"))
    assert sorted(found.rates.values()) == [0.003, 0.006, 0.012]
    ends = {}
    for group, rate in found.rates.items():
        rows = shipped.telemetry([e for e in shipped.group(link("finding", set=group)) if e.series == "transformer"])
        rows = rows[(rows["metric"] == "copy_loss") & (rows["step"] == rows["step"].max())]
        ends[rate] = rows["value"].mean()
    assert min(ends, key=ends.get) == found.rates[found.group]
    other = next(group for group in found.rates if group != found.group)
    asked = main_result.finding(shipped, link("finding", set=other))
    assert asked.group == other
    assert (
        f"{found.rates[found.group]:g} has the lowest"
        in main_result.finding_differences(shipped, link("finding", set=other)).sentence
    )


@pytest.mark.slow
def test_the_finding_has_the_intervals_that_the_claim_judges(shipped):
    found = main_result.finding(shipped, link("finding"))
    evidence, _ = stored(shipped.group(link("finding", set=found.group)))
    (claim,) = chosen(claims=["value_paths_speed_up_induction"])
    judged = claim.judge(evidence).table.set_index("comparison")
    for name, shown in {"svformer": "SVFormer", "resformer": "ResFormer", "residual_k": "key residual"}.items():
        row, factor = judged.loc[f"{shown} at rate 0.003"], found.verdicts[name].factor
        plain = Interval(row["value"], row["low"], row["high"], 5, each=tuple(map(float, row["each"].split())))
        wide = plain.widened(factor)
        assert 1 <= factor <= 5
        assert (wide.value, wide.low, wide.high) == pytest.approx(
            (found.intervals[name].value, found.intervals[name].low, found.intervals[name].high)
        )
    told = main_result.headline(found)
    assert "SVFormer 106 [85, 127]" in told, "docs/induction.md: 271 and 165"
    assert told.endswith("3 unresolved.")
    drawing = main_result.finding_differences(shipped, link("finding"))
    caption = drawing.figure.layout.title.subtitle.text.replace("<br>", " ")
    assert "whisker: 96.4 % to 99 % intervals, as Holm's correction over 5 models demands" in caption
    told = drawing.table.set_index("comparison").loc["SVFormer"]
    assert told["low"] == pytest.approx(judged.loc["SVFormer at rate 0.003", "low"])
    assert told["low_adjusted"] == found.intervals["svformer"].low < told["low"]
    hollow = dict(zip(drawing.figure.data[0].y, drawing.figure.data[0].marker.symbol, strict=True))
    assert hollow["key residual (control)"] == "circle-open", "decided by itself, not among five"
    assert hollow["SVFormer"] == "circle"


@pytest.mark.slow
def test_losses_are_compared_at_each_models_best_rate_as_the_claim_compares_them(tmp_path):
    """Whichever rate is asked for: seed 100 chose the rates, five other seeds are compared, and the curves are of these runs."""
    for study in ("losses20", "losses20_rates"):
        for run in unpacked(SHIPPED / "evidence" / study).glob("losses20*"):
            (tmp_path / run.name).symlink_to(run)
    source = Source(tmp_path)
    found = [main_result.finding(source, link("finding", set=group)) for group in source.catalogue().groups]
    evidence, _ = stored(source.catalogue().entries)
    (claim,) = chosen(claims=["lower_loss"])
    judged = claim.judge(evidence).table.set_index("comparison")
    for result in found:
        plain = result.plain["resformer"]
        assert (plain.value, plain.low, plain.n) == pytest.approx((*judged.loc["all domains", ["value", "low"]], 5))
        assert {entry.seed for entry in result.runs} == {0, 1, 2, 3, 4}
        assert (
            "Each at its best of 5 learning rates, chosen on seed 100, which is not reported: Transformer 0.006"
            in main_result.method(result)
        )
    drawing = main_result.finding_curves(source, link("finding", set=found[0].group))
    assert set(drawing.table["run"]) == {entry.name for entry in found[0].runs}
    assert drawing.table["step"].min() == 230, "beside 7 nats at random init no difference would be seen"
    caption = caption_of(source, link("finding", set=found[0].group))
    assert caption.endswith(found[0].tuning), "no picture states the rate of one experiment"
    assert ", rate " not in caption


@pytest.mark.slow
def test_two_seeds_find_nothing_and_one_model_has_no_finding(shipped, tmp_path, monkeypatch):
    group = main_result.finding(shipped, link("finding")).group
    for entry in shipped.group(link("finding", set=group)):
        if entry.seed < 2 and entry.series in ("transformer", "svformer"):
            shutil.copytree(entry.path, tmp_path / "two" / entry.name)
            if entry.series == "svformer":
                shutil.copytree(entry.path, tmp_path / "one" / entry.name)
    told = main_result.headline(main_result.finding(Source(tmp_path / "two"), link("finding")))
    assert told.startswith("Unresolved: 2 seeds per model")
    with pytest.raises(WorkbenchError, match="a Transformer and another model"):
        main_result.finding(Source(tmp_path / "one"), link("finding"))
    for path in (tmp_path / "two").glob("*-s1"):
        shutil.rmtree(path)
    said = main_result.finding_differences(Source(tmp_path / "two"), link("finding")).sentence
    assert said.startswith("1 seed: each number is one pair of runs and has no interval."), (
        "one seed has no mean over seeds"
    )
    own, models = (Source(tmp_path / name).catalogue() for name in ("one", "two"))
    entries = [
        replace(e, shipped=e.path.startswith(f"{tmp_path}/two"), group=e.path.split("/")[-2])
        for e in (*own.entries, *models.entries)
    ]
    both = Source(tmp_path / "one")
    monkeypatch.setattr(both, "catalogue", lambda: replace(own, entries=tuple(entries)))
    told = main_result.headline(main_result.finding(both, link("finding", set="two")))
    assert told == "Unresolved: 1 seed per model, and a verdict needs 3.", "shipped models beside own runs"


def test_runs_that_never_copy_are_counted_and_have_no_interval():
    fast, slow = (
        pd.DataFrame({"at": at, "formed": [step < 600 for step in at]}) for at in ([100.0, 120, 110], [600.0, 600, 300])
    )
    difference = compare_steps(fast, slow)
    verdicts = {"svformer": Verdict("supported", "")}
    made = main_result.Finding(
        main_result.COPYING, "g", "", {"g": 0.1}, "g", *[{"svformer": difference}] * 2, {"transformer": "2 of 3"}, verdicts,
    )  # fmt: skip
    assert main_result.headline(made) == (
        "SVFormer copies 390 steps earlier than the Transformer. Never: Transformer 2 of 3 runs."
    )
    assert "log-rank" in main_result.method(made)


# ---- this model ----


@pytest.mark.slow
def test_the_four_answers_are_those_of_an_xray_of_the_same_records(ask):
    frame = load_records([ask.folder / A])
    for answer, (name, view) in zip(xrays.answers(frame), start.XRAY.items(), strict=True):
        drawing = view(ask, link("model", a=A))
        assert drawing.sentence == answer.sentence
        assert len(drawing.table) == len(answer.records), name
        assert [t.name for t in drawing.figure.data] == [t.name for t in answer.figure.data]


def test_a_step_that_was_not_measured_says_what_is_missing_and_how_to_get_it(ask):
    (subject,) = ask.subjects(link("model", a=A, step=8))
    assert start.missing(ask, subject) == list(xrays.NEEDED)
    with pytest.raises(WorkbenchError, match="not measured yet: concentration parts"):
        start.sinks(ask, link("model", a=A, step=8))
    assert start.xray_command(subject.entry, 8).endswith("--steps 0,8 --documents 32")
    assert start.xray_command(subject.entry, 20) == f"workbench xray {ask.folder / A}"
    assert start.missing(ask, ask.subjects(link("model", a=A))[0]) == []


@pytest.mark.slow
def test_a_model_without_deep_values_of_its_own_is_compared_by_what_both_have(ask):
    compared = link("model", a="text-svformer-s0", b=B, compare=1)
    shares = start.token_share(ask, compared)
    assert set(shares.table["site"]) == {"v"}
    assert shares.sentence.count("effective values") == 2
    assert plots.MINUS in set(shares.table["architecture"])
    assert "No A − B" in start.residual(ask, compared).sentence
    alone = start.residual(ask, link("model", a="text-svformer-s0"))
    assert alone.sentence.startswith("It has a value path already (SVFormer). No layer after the first")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    from workbench.config import ModelConfig, TrainConfig
    from workbench.data.data_sources import RepeatedData
    from workbench.training.loop import train

    folder = tmp_path_factory.mktemp("trained")
    shape = ModelConfig(n_layers=2, d_model=16, n_heads=4, d_mlp=24, d_vocab=64, n_ctx=128)
    recipe = TrainConfig(steps=4, batch=4, T=64, warmup=2, validate_every=4, validation_sequences=8)
    train("transformer", RepeatedData(), name="mine", runs=folder, model=shape, train=recipe, device="cpu")
    return Source(folder)


def test_numbers_of_two_samples_are_not_averaged():
    def rows(data, n, steps, value):
        told = provenance(data=data, version=1, key="k")
        return [{"run": "r", "metric": "loss", "step": s, "n": n, "value": value, "provenance": told} for s in steps]

    both = records(rows("few", 32, (0, 9), 1.0) + rows("many", 64, (0, 9), 2.0) + rows("init", 128, (0,), 3.0))
    assert one_sample(both)["value"].tolist() == [2.0, 2.0]
    alone = records(rows("few", 32, (0, 9), 1.0))
    assert one_sample(alone) is alone


# ---- what is here ----


def test_the_table_of_runs_says_what_each_is_and_whether_it_is_being_written(ask, tmp_path):
    folder = dashboard.copied(ask.folder, tmp_path / "runs")
    (folder / B / "step_000020" / "config.json").unlink()
    with Run(folder / A).writing():
        table = start_runs.runs_table(Source(folder)).set_index("run")
    assert table.loc[A, "state"] == "being written now"
    assert table.loc[B, "state"] == "stopped before step 20"
    assert table.loc[B, "trained to step"] == 8
    assert table.loc["race-svformer-s1", "state"] == "finished"
    assert table.loc["race-svformer-s1", "experiment"].startswith("random tokens, written twice")
    assert table.loc[A, "measures"] == 9


# ---- verdicts ----


@pytest.mark.slow
def test_verdicts_on_all_runs_are_those_of_an_analysis_and_kept_until_a_file_of_theirs_changes(
    ask, tmp_path, monkeypatch
):
    import workbench.claims.collect_evidence

    def refuse(*args, **kwargs):
        raise AssertionError("measured")

    for entry in ask.catalogue().entries:
        if entry.seed < 1 or entry.name.startswith("text-resformer"):
            shutil.copytree(entry.path, tmp_path / entry.name)
    told, here = [], Source(tmp_path)
    monkeypatch.setattr(workbench.claims.collect_evidence, "measure", refuse)
    monkeypatch.setattr(here, "progress", lambda *done: told.append(done))
    finished = [e for e in here.catalogue().entries if e.finished]
    assert len(finished) > len(here.group(link("verdicts", a=A, alone=1)))
    every = start.judgements(here, link("verdicts"))
    assert [done[:2] for done in told] == [(i, len(told)) for i in range(1, len(told) + 1)]
    told.clear()
    evidence, _ = stored(finished, lambda *done: told.append(done))
    assert told == [(i, len(finished)) for i in range(1, len(finished) + 1)]
    assert [j.claim for j in every] == chosen()
    alone = {c.name: c.judge(evidence).status for c in chosen()[1::8]}
    assert {j.claim.name: j.verdict.alone or j.verdict.status for j in every}.items() >= alone.items()
    by_name = {j.claim.name: j for j in every}
    assert by_name["lower_loss"].verdict.status == "gated", "a few steps test no claim on the final loss"
    assert not by_name["token_information_is_preserved"].decided
    assert "token_probe" in by_name["token_information_is_preserved"].missing
    monkeypatch.setattr(Source, "judge", lambda *_: pytest.fail("judged again"))
    again = start.judgements(Source(tmp_path), link("verdicts"))
    for mine, before in zip(again, every, strict=True):
        pd.testing.assert_frame_equal(mine.verdict.table, before.verdict.table, check_exact=True)
        assert repr(replace(mine.verdict, table=None)) == repr(replace(before.verdict, table=None))
        assert mine.missing == before.missing
    whole = next((tmp_path / A / "records").glob("*.parquet")).read_bytes()
    (tmp_path / A / "records" / "more.parquet").write_bytes(whole[:99])
    with pytest.raises(pytest.fail.Exception, match="judged again"):
        start.judgements(Source(tmp_path), link("verdicts"))


@pytest.mark.slow
def test_a_process_of_its_own_judges_alike_ends_with_its_visitor_and_its_death_is_told(ask, monkeypatch, tmp_path):
    runs, children = ask.group(link("verdicts", a=A, alone=1)), psutil.Process().children
    told: list[tuple[int | str, ...]] = []
    apart = judge_apart(ask.folder, runs, lambda *done: told.append(done))
    assert stored_verdicts.text("", apart) == stored_verdicts.text("", stored_verdicts.judge_all(runs))
    assert [done[:2] for done in told] == [(i, len(told)) for i in range(1, len(told) + 1)]

    def leave(*_: int) -> None:
        raise InterruptedError

    before = children()
    with pytest.raises(InterruptedError):
        judge_apart(ask.folder, runs, leave)
    assert children() == before
    dies = tmp_path / "dies"
    dies.write_text("#!/bin/sh\necho '{\"done\": [1, 4]}'\nkill -9 $$\n")
    dies.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(dies))
    with pytest.raises(WorkbenchError, match=r"ended in the middle .*out of memory"):
        judge_apart(ask.folder, runs, lambda *done: told.append(done))
    assert told[-1] == (1, 4)
    assert children() == before


def test_a_run_whose_records_are_damaged_is_named_beside_the_verdicts_on_the_others(ask, tmp_path):
    for entry in ask.group(link("verdicts", a=A, alone=1))[:3]:
        shutil.copytree(entry.path, tmp_path / entry.name)
    for damaged in (tmp_path / A / "records").glob("*.parquet"):
        damaged.write_bytes(damaged.read_bytes()[:99])
    here = Source(tmp_path)
    assert start.judgements(here, link("verdicts", a=A, alone=1))
    assert list(here.problems) == [A]


def test_the_command_names_the_runs_of_the_experiment(ask, trained, tmp_path):
    assert (
        start.analyze_command(ask, link("verdicts", a=A, alone=1))
        == f"workbench analyze {ask.folder}/text-* --out results"
    )
    alone = start.analyze_command(trained, link("verdicts"), "tokens")
    assert alone == f"workbench analyze {trained.folder} --question tokens --out results"
    folder = dashboard.copied(ask.folder, tmp_path / "some runs")
    (folder / "text-resformer-s1").rename(folder / "other")
    told = start.analyze_command(Source(folder), link("verdicts", a=A, alone=1))
    assert f"'{folder}/other'" in told
    assert "*" not in told


def test_an_experiment_without_a_finished_run_has_no_verdicts(tmp_path):
    dashboard.half_write(tmp_path)
    with pytest.raises(BadData, match="finished"):
        start.judgements(Source(tmp_path), link("verdicts", a="race-transformer-s0"))
