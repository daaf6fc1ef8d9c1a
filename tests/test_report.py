"""The report of a folder: it shows what the claims say, and so do the demo's story and the page of claims."""

import html
import re

import dashboard

from workbench.claims.analysis import Analysis, chosen, judge
from workbench.claims.collect import find_runs, stored
from workbench.claims.page import write_page
from workbench.reports.folder import write_report
from workbench.views import Source, start


def test_report_demo_and_page_of_claims_say_the_same_of_one_race(populated, tmp_path):
    """SVFormer copies seven steps before the vanilla model in each of three seeds."""
    name, folder = start.demo.RACE_CLAIM, tmp_path / "runs"
    for path in populated.glob("race-*"):
        dashboard.copied(path, folder / path.name)
    (story,) = start.demo.verdicts(Source(folder), "race", [name])
    assert story.verdict.status == "supported"
    evidence = stored(find_runs([folder])[0])
    analysis = Analysis(judge(evidence, chosen(claims=[name])), evidence, {})
    pages = [write_page(analysis, tmp_path, "workbench analyze"), write_report(folder, tmp_path / "report.html")]
    for page in pages:
        article = re.search(rf'<article class="(\w+)" id="{name}">.*?</article>', page.read_text(), re.DOTALL)
        assert article[1] == story.verdict.status
        assert html.escape(story.verdict.sentence) in article[0]
        assert f">{story.verdict.words}<" in article[0]
