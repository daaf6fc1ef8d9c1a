"""Generated pages are up to date, links lead somewhere, what pages show runs, and the repository speaks of itself alone."""

import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import generate
import numpy as np
import pictures
import pytest
import typer

from workbench.cli import app
from workbench.places import studies as shipped_studies

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "LOG.md", *ROOT.glob("docs/**/*.md")])


@pytest.mark.slow
def test_generated_files_are_current():
    stale = [path.name for path, content in generate.pages().items() if path.read_text(encoding="utf-8") != content]
    assert not stale, "run `make docs`"


@pytest.mark.slow
def test_the_page_of_evidence_says_what_the_shipped_runs_say():
    made = generate.of_evidence()
    stale = [path.name for path, content in made.items() if path.read_text(encoding="utf-8") != content]
    assert not stale, "run `make docs`"
    assert next(iter(made.values())).count("\n### ") >= 20, "claims with a verdict"


@pytest.mark.slow
def test_the_readmes_picture_shows_the_shipped_runs():
    numbers = pictures.numbers(pictures.resting())
    assert sum(len(line) > 20 for line in numbers) >= 20, "lines and bands of five models in two panels"
    kept = pictures.kept(pictures.RESTING.read_text(encoding="utf-8"))
    assert [len(line) for line in kept] == [len(line) for line in numbers], "run `make docs`"
    np.testing.assert_allclose(np.concatenate(kept), np.concatenate(numbers), rtol=1e-4, err_msg="run `make docs`")


def test_the_description_on_an_index_has_no_relative_link():
    """It is the README without links and figure, or with absolute ones once the repository has an address."""
    before, _, _ = (ROOT / "setup.py").read_text(encoding="utf-8").partition("\nsetup(")
    names = {"__file__": str(ROOT / "setup.py")}
    exec(before, names)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    relative = r"\]\((?!https:)"
    assert len(re.findall(relative, readme)) > 20
    for urls in ({}, {"Repository": "https://example.org/it/"}):
        assert not re.findall(relative, names["described"](readme, urls))
    assert "tutorial (`docs/tutorial.md`)" in names["described"](readme, {})
    assert "](https://example.org/it/blob/main/docs/tutorial.md)" in names["described"](readme, urls)
    assert "](https://example.org/it/raw/main/docs/pictures/resting.svg)" in names["described"](readme, urls)


def test_constraints_record_no_addresses_and_one_torch():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in lines
    assert not [line for line in lines if "/" in line or "@" in line]


def test_the_lock_holds_the_tested_versions_their_hashes_and_no_addresses():
    text = (ROOT / "lock.txt").read_text()
    locked = dict(re.findall(r"^([\w.-]+)==([^ ;\\]+).*\\\n    --hash=sha256:", text, re.MULTILINE))
    tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    names = {name.lower().replace("_", "-"): version for name, version in tested.items()}
    assert len(locked) > 100
    assert {name: version for name, version in locked.items() if names.get(name, version) != version} == {}
    assert "://" not in text
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = asked["optional-dependencies"]
    needed = {
        re.split(r"[\[<>=!]", line)[0].lower() for line in [*asked["dependencies"], *extras["app"], *extras["dev"]]
    }
    assert needed - locked.keys() == {asked["name"]}, "run `make lock`"


def test_the_page_of_the_demo_shows_an_effect_with_its_control():
    """Queries and keys are a matter of the token as much as deep values are, by the numbers of the page of evidence."""
    pages = [" ".join((ROOT / "docs" / name).read_text().split()) for name in ("index.md", "evidence.md")]
    effect, judged = (re.findall(r"(\d+) ?% of (queries|keys)", page) for page in pages)
    assert effect == judged, "of deep_values_need_little_context"
    assert len(effect) == 2
    assert "stays unresolved ([evidence](evidence.md#deep_values_need_little_context))" in pages[0]


def test_lists_of_evidence_are_not_cut_inside_brackets():
    lines = re.findall("^- .*", (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) > 100
    assert [line for line in lines if line.count("(") != line.count(")")] == []


def test_the_readme_counts_the_studies_that_ship():
    shipped = sum(1 for _ in (ROOT / "data" / "evidence").glob("[!.]*/"))
    assert f"the runs of {shipped} studies ship" in (ROOT / "README.md").read_text()


def test_links_lead_somewhere():
    lost = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if "://" not in link and not (target.is_file() and (not anchor or anchor in anchors(target))):
                lost.append(f"{page.name}: {link}")
    assert lost == []


def anchors(page):
    """What a page's headings are called in an address."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_every_page_is_on_the_site():
    listed = set(re.findall(r"[\w/]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "findings").glob("*.md")]
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in pages} | {"decisions/README.md"}


@functools.cache
def parsers():
    return typer.main.get_command(app)


@pytest.mark.parametrize("page", [page for page in PAGES if "decisions" not in page.parts], ids=lambda page: page.stem)
def test_commands_are_such_as_there_are(page):
    """Each line of a block that begins with `workbench`, `make` or `python -m` is parsed, with all its options."""
    group, known = parsers(), shipped_studies()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in re.findall(
        r"^    (?:[A-Z_]+=\S+ )*((?:workbench|make|python -m) .+)$", page.read_text(encoding="utf-8"), re.MULTILINE
    ):
        command, *words = shlex.split(line.partition(" | ")[0], comments=True)
        if command == "workbench":
            asked = group.commands[words[0]].make_context(words[0], words[1:])
            assert asked.params.get("study", "sinks") in known or asked.params["study"].endswith(".toml"), line
        elif command == "make":
            assert {word for word in words if "=" not in word} <= targets, line
        else:
            assert importlib.util.find_spec(words[1]), line


@pytest.mark.slow
def test_python_on_the_pages_runs_and_prints_what_they_say(tmp_path):
    """In one process for all of them; `doc_blocks.py` has what each supposes that its reader has."""
    written = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")]
    assert {
        "README",
        "tutorial",
        "observing",
        "recorder",
        "checkpoints",
        "huggingface",
        "own_metric",
        "own_architecture",
    } <= {p.stem for p in written}
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "doc_blocks.py", tmp_path / "pages", *written], capture_output=True, text=True,
        timeout=560, check=False, env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_fetches_nothing_and_searches_from_the_disk(tmp_path, request):
    pytest.importorskip("mkdocs", reason="`make site` installs what builds it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 30
    fetched = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(?:https?:)?//")
    assert [page.name for page in pages if fetched.search(page.read_text(encoding="utf-8"))] == []
    page = request.getfixturevalue("browser").new_page()
    page.goto(f"file://{tmp_path}/decisions/index.html")
    page.click(".md-search__input")
    page.keyboard.type("induction", delay=20)
    page.locator(".md-search-result__link").first.wait_for(timeout=20_000)
    assert "matching documents" in page.inner_text(".md-search-result__meta")
    page.close()
