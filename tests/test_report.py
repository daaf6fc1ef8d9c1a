"""The report of a folder: it shows what the claims say, and so do the demo's story and the page of claims."""

import html
import json
import re

import dashboard
import pytest

from workbench import files
from workbench.claims.analysis import Analysis, write_page
from workbench.claims.collect import stored
from workbench.claims.judging import chosen, judge, with_figure
from workbench.places import SHIPPED
from workbench.reports.folder import series_by_run, write_report
from workbench.runs.catalogue import catalogue
from workbench.storage.packed import unpacked
from workbench.views import Link, Source, start


@pytest.mark.slow
def test_report_demo_and_page_of_claims_say_the_same_of_one_race(populated, tmp_path):
    """SVFormer copies seven steps before the vanilla model in each of three seeds; the control on the keys is not there."""
    name, folder = "value_paths_speed_up_induction", tmp_path / "runs"
    for path in populated.glob("race-*"):
        dashboard.copied(path, folder / path.name)
    (story,) = [j for j in start.judgements(Source(folder), Link("start")) if j.claim.name == name]
    assert story.verdict.status == "unresolved"
    evidence, _ = stored(catalogue(folder).entries)
    analysis = Analysis(tuple(with_figure(j, evidence) for j in judge(evidence, chosen(claims=[name]))), evidence, {})
    pages = [write_page(analysis, tmp_path, "workbench analyze"), write_report(folder, tmp_path / "report.html")]
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
        files.write_json(tmp_path / path.name / "run.json", info)
    page = write_report(tmp_path, tmp_path / "report.html").read_text()
    assert [w for w in ("always begins at", "has to recognise", "In some of these runs") if w in page][-1].startswith(
        says
    )


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
