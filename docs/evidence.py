"""docs/evidence.md: what the runs that ship say of every claim, beside what is published."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.claims import CLAIMS, QUESTIONS, STATUSES, all_verdicts
from workbench.claims.verdict import Verdict, expected_by_chance
from workbench.runs.catalogue import catalogue
from workbench.views.source import EVIDENCE

ABOUT = """# What the shipped runs say

Everything here is computed from `data/evidence`: runs that were trained for this project on two processor cores, their records and what
training wrote down, without weights. `workbench analyze data/evidence` says the same with figures, `workbench app --runs data/evidence`
shows the runs, and the commands below train them again. These are small models: a verdict holds at the size named with it, no further.
How verdicts are decided, and how often they are wrong by chance: [verdicts.md](verdicts.md).

"""


SHOWN = 3  # numbers of a claim in the table of all


def pages() -> tuple[str, str]:
    """The page, and the verdicts that ship with the runs, so that the dashboard need not judge them."""
    runs = catalogue(EVIDENCE).entries
    found = all_verdicts.judge_all(runs)
    return _page(found.of), all_verdicts.text(all_verdicts.mark(runs), found)


def _page(of: Mapping[str, Verdict]) -> str:
    verdicts = list(of.values())
    parts = [ABOUT, _studies(), f"\n{expected_by_chance(verdicts)}\n\n", _counted(verdicts), _table(of)]
    for question, text in QUESTIONS.items():
        names = [name for name, claim in CLAIMS.items() if claim.question == question]
        if told := [_claim(name, of[name]) for name in names if of[name].status != "not_checkable"]:
            parts += [f"\n## {text}\n", *told]
    parts.append("\n## Not checkable with these runs\n\n")
    parts += [f"- {name}: {v.sentence}\n" for name, v in of.items() if v.status == "not_checkable"]
    return "".join(parts)


def _studies() -> str:
    lines = ["| study | what it asks | runs | minutes of training | command | commit |\n|---|---|---|---|---|---|\n"]
    for file in sorted(EVIDENCE.glob("*/*.toml")):
        told = json.loads((file.parent / "provenance.json").read_text(encoding="utf-8"))
        asks = tomllib.loads(file.read_text(encoding="utf-8"))["question"]
        minutes = f"{told['training_minutes']:.0f}"
        lines.append(
            f"| {told['study']} | {asks} | {told['runs']} | {minutes} | `{told['command']}` | {told['commit']} |\n"
        )
    return "".join(lines)


def _counted(verdicts: Sequence[Verdict]) -> str:
    """How many claims have each status."""
    counts = {words: sum(v.status == status for v in verdicts) for status, words in STATUSES.items()}
    return f"Of {len(verdicts)} claims: {', '.join(f'{n} {words}' for words, n in counts.items() if n)}.\n"


def _table(of: Mapping[str, Verdict]) -> str:
    """Every claim that was put to the test beside what is published; the numbers that come first in deciding it."""
    lines = ["\n| claim | published | here | verdict |\n|---|---|---|---|\n"]
    for name, verdict in of.items():
        if verdict.status != "not_checkable":
            here = "<br>".join(_number(row) for row in verdict.table.head(SHOWN).to_dict("records")) or verdict.sentence
            cells = (f"[{CLAIMS[name].text}](#{name})", CLAIMS[name].published, here, verdict.words)
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n")
    return "".join(lines)


def _number(row: Mapping[Any, Any]) -> str:
    """A compared number with its interval and unit; one of a table without intervals by itself."""
    if not {"comparison", "low", "high", "value", "unit"} <= set(row) or not isinstance(row["comparison"], str):
        return ""
    return f"{row['comparison']} {row['value']:+.3g} [{row['low']:+.3g}, {row['high']:+.3g}] {row['unit']}"


def _claim(name: str, verdict: Verdict) -> str:
    claim = CLAIMS[name]
    facts = {
        "Here": verdict.sentence, "Setting": verdict.setting or "none", "Published": claim.published, "Source": claim.source,
        "Supported where": claim.supports, "Refuted where": claim.refutes,
    }  # fmt: skip
    told = "".join(f"- {key}: {text}\n" for key, text in facts.items())
    return f"\n### {name}\n\n{claim.text}\n\n**{verdict.words.capitalize()}.**\n\n{told}"
