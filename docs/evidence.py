"""docs/evidence.md: what the runs that ship say of every claim, beside what is published."""

from __future__ import annotations

import json
import math
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

**What fell.** This page said "a value residual lowers the loss: supported, -0.32 nats [-0.36, -0.28], 10 seeds" (4 layers, 300 steps, 0.9
training tokens per parameter). An independent rerun shows what that number is made of. With 100 warm-up steps in place of 30 the
*Transformer* ends 0.30 nats lower [0.13, 0.48]. At 8 layers and 600 steps, halving the values alone, without any path to the first layer,
gives 0.25 nats [0.19, 0.31] of ResFormer's 0.27 (3 seeds). At 10 tokens per parameter ResFormer - Transformer is -0.013 nats [-0.063,
+0.036] (4 layers, 3 seeds). So the loss of short runs measures how fast a model starts and how large its values are. Every claim on the
final loss is therefore *not tested* below 10 training tokens per parameter, with fewer than 100 warm-up steps, or while the loss still
falls by 0.02 nats over the last tenth of the steps; and a gain of the first layer's values is supported only if the control with halved
values, and nothing of the first layer's, does not have it. The other claim that fell is in [sinks.md](sinks.md): shared values delay the
sink and do not prevent it. The lead in learning to copy stands against the same control ([induction.md](induction.md)).

The studies that would decide these claims are `losses20_rates` and `losses20` (20 tokens per parameter, rates tuned on a seed that is not
reported). Missing runs of all queued studies are trained in order, and resumed after an interruption, by `for study in losses20_rates
losses20 sinks_long; do workbench study $study --runs RUNS --workers 1 || break; done`.

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
    lines = ["\n| claim | published | here | runs | verdict |\n|---|---|---|---|---|\n"]
    for name, verdict in of.items():
        if verdict.status != "not_checkable":
            here = "<br>".join(_number(row) for row in verdict.table.head(SHOWN).to_dict("records")) or verdict.sentence
            cells = (f"[{CLAIMS[name].text}](#{name})", CLAIMS[name].published, here, verdict.setting, verdict.words)
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n")
    return "".join(lines)


def _number(row: Mapping[Any, Any]) -> str:
    """A compared number with its interval and unit; one of a table without intervals by itself."""
    if not {"comparison", "low", "high", "value", "unit"} <= set(row) or not isinstance(row["comparison"], str):
        return ""
    between = "(no interval)" if math.isnan(row["low"]) else f"[{row['low']:+.3g}, {row['high']:+.3g}]"
    return f"{row['comparison']} {row['value']:+.3g} {between} {row['unit']}"


def _claim(name: str, verdict: Verdict) -> str:
    claim = CLAIMS[name]
    facts = {
        "Here": verdict.sentence, "Setting": verdict.setting or "none", "Published": claim.published, "Source": claim.source,
        "Supported where": claim.supports, "Refuted where": claim.refutes,
    }  # fmt: skip
    told = "".join(f"- {key}: {text}\n" for key, text in facts.items())
    return f"\n### {name}\n\n{claim.text}\n\n**{verdict.words.capitalize()}.**\n\n{told}"
