"""The report of a folder: it shows what the claims say, and so do the demo's story and the page of claims."""

import html
import json
import os
import re
from types import SimpleNamespace

import dashboard
import pytest

from workbench import file_io
from workbench.claims.analysis import Analysis, write_page
from workbench.claims.collect_evidence import stored
from workbench.claims.judging import chosen, judge, with_figure
from workbench.claims.verdict import Verdict
from workbench.places import SHIPPED
from workbench.reports import runs_report
from workbench.reports.runs_report import series_by_run, up_to_date, write_report
from workbench.runs import tracker_export
from workbench.runs.catalogue import catalogue
from workbench.runs.records import records, write_parquet
from workbench.runs.run import Run
from workbench.storage.packed import unpacked
from workbench.studies.study_runs import outcomes
from workbench.views import Link, Source, depth, start


@pytest.mark.slow
def test_report_demo_and_page_of_claims_say_the_same_of_one_race(populated, tmp_path):
    """SVFormer copies seven steps before the vanilla model in each of three seeds; the control on the keys is not there."""
    name, runs = "value_paths_speed_up_induction", tmp_path / "runs"
    for path in populated.glob("race-*"):
        dashboard.copied(path, runs / path.name)
    (story,) = [j for j in start.judgements(Source(runs), Link("start")) if j.claim.name == name]
    assert story.verdict.status == "unresolved"
    evidence, _ = stored(catalogue(runs).entries)
    analysis = Analysis(tuple(with_figure(j, evidence) for j in judge(evidence, chosen(claims=[name]))), evidence, {})
    pages = [write_page(analysis, tmp_path, "workbench analyze"), write_report(runs, tmp_path / "report.html")]
    for page in pages:
        text = page.read_text().replace("−", "-").replace("\xa0", " ")
        article = re.search(rf'<article class="(\w+)" id="{name}">.*?</article>', text, re.DOTALL)
        assert article[1] == story.verdict.status
        assert html.escape(story.verdict.sentence) in article[0]
        assert f">{story.verdict.words}<" in article[0]


@pytest.mark.slow
@pytest.mark.parametrize(("shortest", "says"), [([None, 4], "In some of these runs")])
def test_the_race_says_whether_counting_would_do(populated, tmp_path, shortest, says):
    for path, drawn in zip(sorted(populated.glob("race-*"))[:2], shortest, strict=True):
        dashboard.copied(path, tmp_path / path.name)
        info = json.loads((tmp_path / path.name / "run.json").read_text())
        info["data"]["shortest"] = drawn
        file_io.write_json(tmp_path / path.name / "run.json", info)
    page = write_report(tmp_path, tmp_path / "report.html").read_text()
    assert f"Reproduce: workbench report --runs {tmp_path}" in page
    assert [w for w in ("always begins at", "has to recognise", "In some of these runs") if w in page][-1].startswith(
        says
    )


@pytest.mark.slow
def test_the_loss_of_a_text_is_drawn_whatever_its_run_is_called(populated, tmp_path):
    dashboard.copied(populated / "text-resformer-s1", tmp_path / "mine")
    dashboard.copied(next(populated.glob("race-*")), tmp_path / "text-of-another-task")
    page = write_report(tmp_path, tmp_path / "report.html").read_text()
    domains = set(Run.open(tmp_path / "mine").telemetry().query("metric == 'validation_loss'")["data"])
    assert set(re.findall(r"Validation loss, (\w+)\.", page)) == domains


def test_the_report_averages_no_runs_of_two_experiments():
    """A Transformer that reads no start token is no fourth seed of those that do."""
    entries = [
        e
        for study in ("sinks", "sinks_without_start")
        for e in catalogue(unpacked(SHIPPED / "evidence" / study)).entries
    ]
    series = series_by_run(entries)
    named = {e.group: {series[o.name] for o in entries if o.group == e.group} for e in entries}
    first, second = named.values()
    assert "transformer · start token none" in first | second
    assert not first & second


def runs_with(folder, **settings):
    """Runs by name: architecture, options, and settings of `run.json` that differ from the others' as `train.lr`."""
    for name, (architecture, options, changes) in settings.items():
        dashboard.run(folder, name, architecture, 0, "text", steps=(20,))
        info = json.loads((folder / name / "run.json").read_text()) | {"options": options}
        for key, value in changes.items():
            info[key.partition(".")[0]][key.partition(".")[2]] = value
        file_io.write_json(folder / name / "run.json", info)
    return series_by_run(catalogue(folder).entries)


@pytest.mark.parametrize(
    ("changes", "first", "second"),
    [({"train.save_every": 7}, "", ""), ({"train.lr": 2e-3}, "", " · rate 0.002"), ({"data.kind": "tokens"}, " · text", " · tokens")],
)  # fmt: skip
def test_the_report_names_what_tells_two_experiments_apart(tmp_path, changes, first, second):
    """Options that are equal within each experiment; settings and tasks, also if no model is in both."""
    names = runs_with(
        tmp_path, a=("transformer", {}, {}), b=("resformer_constant", {"lambda_v1": 1.0}, {}),
        c=("resformer_constant", {"lambda_v1": 2.0}, changes), d=("svformer", {}, changes),
    )  # fmt: skip
    assert names == {
        "a": f"transformer{first}", "b": f"resformer_constant lambda_v1=1.0{first}",
        "c": f"resformer_constant lambda_v1=2.0{second}", "d": f"svformer{second}",
    }  # fmt: skip


def test_the_report_draws_copying_by_task_and_speaks_of_distances_on_repeated_tokens_only(tmp_path):
    for name, kind in (("a-svformer-s0", "repeated"), ("b-svformer-s0", "backcopy")):
        common = dashboard.run(tmp_path, name, "svformer", 0, "repeated", steps=(20,))
        info = json.loads((tmp_path / name / "run.json").read_text())
        info["data"] |= {"kind": kind, "shortest": 4}
        file_io.write_json(tmp_path / name / "run.json", info)
        rows = [common | {"metric": "copy_loss", "step": s, "value": 4.0 - s, "unit": "nats"} for s in range(4)]
        write_parquet(records(rows), tmp_path / name / "telemetry" / "000000-000004.parquet")
    page = write_report(tmp_path, tmp_path / "report.html").read_text()
    assert re.findall("<h2>(Copying.*?)</h2>", page) == ["Copying (backcopy)", "Copying"]
    assert page.count("has its own distance to the copy") == 1
    assert page.count("<td>0.001</td>") == 2, "the rate of every run"
    (tmp_path / "a-svformer-s0" / "run.json").unlink()
    assert "distance to the copy" not in write_report(tmp_path, tmp_path / "report.html").read_text()


def test_a_report_is_out_of_date_after_a_change_of_a_run_inside_a_study(tmp_path):
    page, study = tmp_path / "report.html", tmp_path / "study"
    dashboard.run(study, "a", "transformer", 0, "repeated", steps=(20,))
    (study / "provenance.json").write_text("{}")
    page.write_text("")
    os.utime(page, (2e9, 2e9))
    assert up_to_date(page, tmp_path)
    os.utime(study / "a" / "run.json", (3e9, 3e9))
    assert not up_to_date(page, tmp_path)


@pytest.mark.slow
def test_an_imported_model_of_unknown_training_is_not_drawn_as_random_init(tmp_path, monkeypatch):
    for name, steps in (("text-transformer-s0", (0, 20)), ("theirs", (0,))):
        common = dashboard.run(tmp_path, name, "transformer", 0, "text", steps=steps)
        common |= {"metric": "importance_entropy", "data": "x", "T": 16, "n": 4, "unit": "nats", "step": steps[-1]}
        rows = [common | {"layer": n, "value": 2.0 + n, "provenance": dashboard.known()} for n in range(2)]
        write_parquet(records(rows), tmp_path / name / "records" / "aa-bb.parquet")
    info = json.loads((tmp_path / "theirs" / "run.json").read_text())
    told = {"imported": {"from": "theirs.pt"}, "data": {"kind": "imported", "domains": ["unknown"]}}
    (tmp_path / "theirs" / "run.json").write_text(json.dumps(info | told))
    drawn = []
    plot = runs_report.plots.plot
    monkeypatch.setattr(runs_report.plots, "plot", lambda *a, **how: drawn.append(plot(*a, **how)) or drawn[-1])
    write_report(tmp_path, tmp_path / "report.html")
    link = Link.parse("depth?metric=importance_entropy&compare=1&a=text-transformer-s0&b=theirs")
    drawn.append(depth.layers(Source(tmp_path), link).figure)
    assert len(drawn) == 2
    for figure in drawn:
        assert "random init" not in " ".join([figure.layout.title.subtitle.text, *(str(t.name) for t in figure.data)])


@pytest.mark.slow
def test_no_number_is_the_mean_of_two_sets_of_documents(tmp_path, monkeypatch):
    """The report, a study's outcome, the runs behind a claim and an exported log take the later and larger set, as pages do."""
    common = dashboard.run(tmp_path, "text-transformer-s0", "transformer", 0, "text")
    common |= {"metric": "sink_mass", "layer": 0, "head": 0, "unit": "share", "data": "validation"}
    rows = [
        common | {"step": step, "value": value, "n": n, "provenance": dashboard.known(data=data, version=1)}
        for data, n, values in (("few", 8, (0.9, 0.9, 0.9)), ("many", 64, (0.1, 0.4, 0.6)))
        for step, value in zip(dashboard.STEPS, values, strict=True)
    ]
    place = tmp_path / "text-transformer-s0"
    write_parquet(records(rows), place / "records" / "aa-bb.parquet")
    loss = common | {"metric": "validation_loss", "layer": None, "head": None, "unit": "nats"}
    write_parquet(records([loss | {"step": 20, "value": 3.0}]), place / "telemetry" / "000000-000021.parquet")
    drawn = []
    plot = runs_report.plots.plot
    monkeypatch.setattr(
        runs_report.plots, "plot", lambda frame, **options: drawn.append(frame) or plot(frame, **options)
    )
    write_report(tmp_path, tmp_path / "report.html")
    (masses,) = [frame["value"].tolist() for frame in drawn if set(frame["metric"]) == {"sink_mass"}]
    assert masses == [0.1, 0.6]
    sent = []
    monkeypatch.setattr(tracker_export, "installed_trackers", lambda to: [to])
    monkeypatch.setattr(tracker_export, "open_trackers", lambda *_: [])
    monkeypatch.setattr(tracker_export, "send_rows", lambda _, frame: sent.append(frame))
    tracker_export.export_log(Run.open(place), "x", ["sink_mass"])
    assert sent[0]["value"].tolist() == [0.1, 0.4, 0.6]
    source = Source(tmp_path)
    claim = next(c for c in chosen() if c.name == "sharing_values_delays_the_sink")
    behind = start.Judgement(claim, Verdict("unresolved", "", runs=("text-transformer-s0",)), ())
    table, seen = start.runs_behind(source, behind)
    assert table["last sink mass, strongest head"].tolist() == [0.6]
    assert seen.loc[seen["metric"] == "sink_mass", "value"].tolist() == [0.1, 0.4, 0.6]
    study = SimpleNamespace(outcome="sink_step")
    cell = SimpleNamespace(model="transformer", point={}, architecture="transformer")
    planned = SimpleNamespace(cell=cell, seed=0, name="text-transformer-s0", runs=str(tmp_path))
    (step,) = outcomes(study, [planned], {})["sink_step"]
    assert step == pytest.approx(14.0), "halfway between steps 8 and 20"
