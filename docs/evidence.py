"""docs/evidence.md: the verdict of the shipped runs on every published claim, with the published numbers."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from workbench.claims import CLAIMS, QUESTIONS, STATUSES, Evidence, stored_verdicts
from workbench.claims.collect_evidence import stored
from workbench.claims.final_loss_conditions import tokens_per_parameter
from workbench.claims.loss import at_best_rates
from workbench.claims.registry import SCALED
from workbench.claims.verdict import DECIDED, Verdict, expected_by_chance
from workbench.claims.verdict_wording import model_name
from workbench.models import build
from workbench.runs.catalogue import catalogue
from workbench.statistics.intervals import Interval, confidence, t_quantile
from workbench.studies.study_file import find_study, read_study
from workbench.studies.study_runs import plan, sizes
from workbench.views.source import EVIDENCE

SHOWN = 4  # comparisons in the section of a claim

ABOUT = """# Evidence for published claims

After this page you know the verdict of the shipped runs on each published claim, with effects, intervals and seeds.

    workbench analyze data/evidence           # the same with figures
    workbench app --runs data/evidence        # the runs

The runs were trained for this project on two processor cores. These are small models: a verdict holds at the stated size only.
[Verdicts](verdicts.md) explains the rules and how often they are wrong by chance.

"""

CORRECTION = """
## Correction

This page used to state "a value residual lowers the loss: supported, -0.32 nats [-0.36, -0.28], 10 seeds" (4 layers, 300 steps, 0.9
training tokens per parameter). An independent rerun shows other causes of that number:

- With 100 warm-up steps in place of 30 the *Transformer* ends 0.30 nats lower [0.13, 0.48].
- At 8 layers and 600 steps ResFormer gains 0.27 nats. Halving the values alone, without any path to the first layer, gains 0.25 nats
  [0.19, 0.31] (3 seeds).
- At 10 tokens per parameter ResFormer - Transformer is -0.013 nats [-0.063, +0.036] (4 layers, 3 seeds).

So the loss of short runs measures how fast a model starts and how large its values are. Short and unfinished runs therefore do not
test claims on the final loss ([conditions](verdicts.md#rules)), and a gain counts only if the model also ends ahead of halved
values. The lead in learning to copy has this control too ([induction](induction.md)). [Attention sinks](sinks.md#correction) has a
second correction.

**A lead at 20 tokens per parameter is gone at 50 and at 100.** The studies `losses20` to `losses140_tuned` and `paths50` have a complete
schedule for each budget, 4 layers of width 32 (116,000 parameters) and 5 seeds. Each model has its best learning rate at that budget, or
at the next smaller one that was tried, by a seed that is not reported. The tables have differences of the validation loss in nats with
95 % intervals:

{budgets}
- **At 20** ResFormer leads and halved values do not, so the path itself helps. But training is unfinished: the loss still falls by 0.029
  nats over the last tenth of the steps, and a test allows 0.02.
- **At 50 and at 100** five seeds resolve no lead. The published gains of 0.01 to 0.03 are not excluded. This page used to have ResFormer
  behind at 50, at the best rate of 20 tokens per parameter, twice the best one there. At 50 the Transformer's loss still falls by 0.023
  nats over the last tenth, so claims that compare with it are not tested there.
- **At 140** ResFormer meets all three conditions and is *unresolved*. With the rates of 50 tokens per parameter (`losses140`) it ended
  -0.038 nats from the Transformer [-0.084, +0.009], and halved values lowest (-0.059 [-0.088, -0.029]). The Transformer's rate of 0.006
  is too high there: at 0.0015 the same five seeds end 0.063 nats lower [0.022, 0.103].
- **One seed is little to choose a rate on.** At 140 it chose 0.0015 for halved values too, where five seeds end 0.020 nats higher
  [0.015, 0.026] than at 0.003. So ResFormer's lead over halved values there is one of rates.
- **SVFormer** leads at first and ends behind at 140, as published: its validation loss is below the Transformer's at step 1,600 in all
  5 seeds, and above it at step 4,800.
- **DenseFormer** averages hidden states over depth and leaves the values alone. It ends below the Transformer and ResFormer at 140. With
  Holm's correction over the models the interval of its lead over the Transformer includes 0. This page used to state that lead as -0.103
  nats, at the rate that is best for DenseFormer and too high for the Transformer. Now every claim on the final loss compares models at
  their best rates.
- **The hidden state** is no worse a place for a residual than the values: at 140 it ends below ResFormer. So by itself the claim that
  values are the place is refuted at this size; among all claims of this page it is unresolved. Queries, keys and attention were not
  trained at 140. A control that only makes the embedding larger (`once=true`) has half of the lead over the Transformer at 50 and at
  140, and both intervals include 0. So it is open whether the path helps or a larger embedding. At 8 layers and 600 steps this residual
  ends highest.
- **Half of the cache.** SVFormer ends 0.051 nats below GQA at 140. But seed 102 chose the smallest rate for GQA, 0.00075, by 0.002 nats, so
  the comparison stays open.

**Measures at 140.** All measures ship of these runs. The expected gains of the path are absent, or halved values have them too
([token information](findings/token_information.md), [alike tokens](findings/alike_tokens.md)). ResFormer's own values use fewer directions
than the Transformer's at best rates, and more at one rate of 0.006, as the Transformer's number depends on the rate.

**A sink on text takes long training, a start token and a high rate.** In pilots every sequence begins with
a start token. After 20 tokens per parameter the Transformer's strongest head gives it 0.035 of its attention, as in uniform attention.
After 140 it gives 0.54 and 0.47 at a rate of 0.006 (seeds 80 and 81). At 0.0015 it gives 0.16, and the loss is 0.04 nats lower (seed 80).
At 0.006 the share is 0.48 and 0.50 in ResFormer, 0.50 and 0.46 in SVFormer, and 0.53 with halved values (seed 80). Without a start token
it is 0.03. This page used to
say that no sink forms at this size. Five seeds, which would decide whether a value path weakens the sink, are not trained yet (`start140`).

"""

UNDECIDED = {  # where `make gpu` trains what a claim that is not tested needs, and what it still lacks
    "lower_loss": "`gpu`",
    "same_cost": "`gpu`, on a machine without other work",
    "ahead_of_relatives": "`gpu`",
    "fewer_parameters": "`sizes`, one learning rate for all sizes",
    "denseformer_weights_have_structure": "`gpu`",
    "not_merely_easier_optimisation": "`gpu`; not its control with a faster first layer (`first_layer_rate`)",
    "less_concentration_in_deep_layers": "`start140`, 2.5 hours of one core; `gpu`, if its Transformer forms a sink",
    "smoothing_and_concentration_are_linked": "`start140`; `gpu`, if its Transformer forms a sink",
    "start_token_decides_the_sinks": "`gpu`, if its Transformer forms a sink; not the arm without a start token (15 further runs)",
    "value_path_is_the_place": "`gpu_relatives`",
    "first_layer_is_the_source": "`gpu_relatives`",
    "late_layers_profit": "`gpu_relatives`",
    "robust_to_its_weight": "`gpu_relatives`, five weights",
    "reuse_by_token_beats_constant_reuse": "`gpu_relatives`",
    "deep_values_can_be_looked_up": "`gpu_relatives`",
    "sharing_values_hurts_least": "`gpu_relatives`",
    "half_of_the_heads_can_share_the_first_values": "`gpu_relatives`",
    "half_the_cache_for_a_small_penalty": "`gpu_relatives`",
    "attention_residuals_lower_the_loss": "`gpu_relatives`",
    "averages_by_content_beat_fixed_ones": "`gpu_relatives`",
    "exclusive_heads_lower_the_loss": "`gpu_relatives` at 512 tokens; not the shorter texts (12 further runs)",
}
SPREAD = 0.04  # nats, the standard deviation over seeds of ResFormer - Transformer in `losses100`


def pages() -> tuple[str, str]:
    """Return the page, and the stored verdicts, which save the dashboard from judging again."""
    runs = catalogue(EVIDENCE).entries
    verdicts = stored_verdicts.judge_all(runs)
    return page(verdicts.of), stored_verdicts.text(stored_verdicts.mark(runs), verdicts)


def page(of: Mapping[str, Verdict]) -> str:
    """Return the page of these verdicts."""
    verdicts = list(of.values())
    parts = [
        ABOUT,
        _summary(of),
        f"\n{expected_by_chance(verdicts)}\n",
        CORRECTION.format(budgets=_by_budget()),
        _undecided(of),
    ]
    for question, text in QUESTIONS.items():
        names = [name for name, claim in CLAIMS.items() if claim.question == question]
        parts += [f"\n## {text}\n", *(_claim(name, of[name]) for name in names)]
    return "".join([*parts, "\n## Studies\n\n", _studies()])


def _by_budget() -> str:
    """Return the differences of the losses at every budget, and the losses where there are many models, each at its best rate."""
    text, _ = stored([entry for entry in catalogue(EVIDENCE).entries if re.match(r"(losses|paths)\d", entry.name)])
    pairs = (("resformer", "transformer"), ("resformer", SCALED), ("svformer", "transformer"), (SCALED, "transformer"))
    rows, ends = (
        [["tokens per parameter", *(f"{model_name(a)} - {model_name(b)}" for a, b in pairs), "rates chosen on"]],
        "",
    )
    for _, runs in text.runs.groupby("steps"):
        one = replace(text, runs=runs, sweeps=text.runs, settings=[], compared=[])
        group, tuning = at_best_rates(one, "transformer", "resformer", also=one.models)
        losses, budget = group.losses(), f"{tokens_per_parameter(group.of_models(['transformer']).runs):.0f}"
        chosen = f"seed {tuning.seeds[0]}, {tuning.rates} rates"
        rows.append([budget, *(_in_nats(group.difference(losses, *pair)) for pair in pairs), chosen])
        if len(group.models) > len({name for pair in pairs for name in pair}):
            ends += f"\nThe losses at {budget} tokens per parameter, in nats:\n\n{_ends(group)}"
    return f"{_table(rows)}{ends}"


def _ends(group: Evidence) -> str:
    losses, rate = group.losses(), group.runs.groupby("model")["lr"].first()
    rows = [["model", "learning rate", "loss", "minus the Transformer's", "minus ResFormer's"]]
    means = {name: group.by_seed(losses, name).mean() for name in group.models}
    for name in sorted(means, key=lambda name: means[name]):
        bases = ("transformer", "resformer")
        apart = [_in_nats(group.difference(losses, name, base)) if name != base else "" for base in bases]
        rows.append([model_name(name), f"{rate[name]:g}", f"{means[name]:.3f}", *apart])
    return _table(rows)


def _in_nats(difference: Interval) -> str:
    return f"{difference.value:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]))


def _undecided(of: Mapping[str, Verdict]) -> str:
    """Return what a GPU would train for the claims that are not tested, and what it could see."""
    planned = [read_study(find_study(name)) for name in ("gpu_rates", "gpu", "gpu_relatives")]
    runs = sum(len(study.cells) * len(study.seeds) for study in planned)
    config, recipe = sizes(plan(planned[0], EVIDENCE, device="cpu")[0])
    tokens = recipe.steps * recipe.batch * recipe.T
    with torch.device("meta"):
        parameters = sum(p.numel() for p in build("transformer", config).parameters())
    needed = [t_quantile(n - 1) / math.sqrt(n) for n in (5, 3)]  # standard deviations
    shape = f"{config.n_layers} layers of width {config.d_model}, {parameters / 1e6:.1f} million parameters"
    speed = f"{runs * tokens / 3.6e9:.1f} million tokens a second"
    names = [n for n, v in of.items() if v.status == "gated" or (v.status == "not_checkable" and n in UNDECIDED)]
    rows = "".join(f"| {n.replace('_', ' ')} | {UNDECIDED[n]} |\n" for n in names)
    return f"""
## What would decide the claims that are not tested

`make gpu` trains these studies in this order:

- `gpu_rates`: six models at three rates, one seed
- `gpu`: these six at their best rates, five seeds
- `sizes`: four models from 0.1 to 2 million parameters, 20 tokens per parameter, five seeds
- `gpu_relatives`: {len(planned[2].cells)} models, three seeds

The models of `gpu` have {shape}. They train with {recipe.warmup} warm-up steps and a start
token before every sequence. Each of the {runs} runs reads {tokens / 1e6:.0f} million tokens, {tokens / parameters:.0f} per parameter.
An hour suffices at {speed} over all processes. On an H200 15 processes reached 2.7 million
(100 steps each in bfloat16, not compiled, without validation and measuring).

Let s be a difference's standard deviation over seeds. Five seeds resolve a difference above {needed[0]:.2f} s, three seeds
above {needed[1]:.2f} s, before Holm's correction over all claims. At 116,000 parameters s is {SPREAD} nats, so five seeds
resolve {needed[0] * SPREAD:.2f} nats. To resolve the published 0.027 nats, s must be below {0.027 / needed[0]:.3f}.
In simulations, three seeds of `sizes` find the published saving of 16.1 % with a probability of 0.25 to 0.48, five seeds with 0.58
to 0.96, depending on the form of the curve.

| claim | trained in |
|---|---|
{rows}"""


def _studies() -> str:
    lines = ["| study | question | runs | minutes of training | command | commit |\n|---|---|---|---|---|---|\n"]
    for file in sorted(EVIDENCE.glob("*/*.toml")):
        facts = json.loads((file.parent / "provenance.json").read_text(encoding="utf-8"))
        question = tomllib.loads(file.read_text(encoding="utf-8"))["question"]
        minutes = f"{facts['training_minutes']:.0f}"
        lines.append(
            f"| {facts['study']} | {question} | {facts['runs']} | {minutes} | `{facts['command']}` | {facts['commit']} |\n"
        )
    return "".join(lines)


def _summary(of: Mapping[str, Verdict]) -> str:
    """Return the number of claims by status, a row for each decided or unresolved claim, and the names of the others."""
    counts = {words: sum(v.status == status for v in of.values()) for status, words in STATUSES.items()}
    lines = [
        f"{len(of)} claims: {', '.join(f'{n} {words}' for words, n in counts.items() if n)}.\n",
        f"\n| claim | verdict | first effect, {confidence()} interval | seeds |\n|---|---|---|---|\n",
    ]
    for name, verdict in sorted(
        of.items(), key=lambda item: DECIDED.index(item[1].status) if item[1].status in DECIDED else 9
    ):
        if verdict.status in DECIDED:
            row = next((row for row in verdict.table.to_dict("records") if _number(row)), {})
            effect, seeds = _number(row), row.get("n", "")
            lines.append(f"| [{name.replace('_', ' ')}](#{name}) | {STATUSES[verdict.status]} | {effect} | {seeds} |\n")
    for status, why in (
        ("gated", "Not tested, because a condition is not met"),
        ("not_checkable", "Not checkable here"),
    ):
        names = [f"- [{name.replace('_', ' ')}](#{name})\n" for name, v in of.items() if v.status == status]
        lines += [f"\n*{why}:*\n\n", *names] if names else []
    return "".join(lines)


def _number(row: Mapping[Any, Any]) -> str:
    """Return a compared number with its interval and unit, or nothing for other rows."""
    if not {"comparison", "low", "high", "value", "unit"} <= set(row) or not isinstance(row["comparison"], str):
        return ""
    between = "(no interval)" if math.isnan(row["low"]) else f"[{row['low']:+.3g}, {row['high']:+.3g}]"
    return f"{row['comparison']} {row['value']:+.3g} {between} {row['unit']}"


def _claim(name: str, verdict: Verdict) -> str:
    claim = CLAIMS[name]
    rows = [row for row in verdict.table.head(SHOWN).to_dict("records") if _number(row)]
    results = "".join(f"- {_number(row)}, {row['n']:.0f} seeds\n" for row in rows)
    facts = {
        "Details": verdict.details, "Setting": verdict.setting or "none", "Published": claim.published, "Source": claim.source,
        "Supported if": claim.supports, "Refuted if": claim.refutes,
    }  # fmt: skip
    return f"\n### {name}\n\n{claim.text}\n\n{results}\n**{verdict.words.capitalize()}.**\n{listed(facts)}"


def listed(facts: Mapping[str, str]) -> str:
    """Return facts as paragraphs. A sentence with three parts or more becomes a list, after its introduction in `Details`."""
    return "".join(f"\n**{key}:**{_paragraphs(text, introduced=key == 'Details')}" for key, text in facts.items())


def _paragraphs(text: str, *, introduced: bool) -> str:
    blocks = [""]
    for sentence in re.split(r"(?<=\.) (?=[A-Z])", text):
        before, colon, after = sentence.partition(": ")
        before, items = (f" {before}:", after) if introduced and colon and "; " not in before else ("", sentence)
        parts = re.split(r"; (?![^(]*\))", items.removesuffix("."))  # not inside brackets
        if len(parts) < 3:
            blocks[-1] += f" {sentence}"
        else:
            blocks[-1] += before
            blocks += ["".join(f"- {part}\n" for part in parts), ""]
    return (
        "\n\n".join(
            block.strip("\n").removeprefix(" " if i else "") for i, block in enumerate(blocks) if block or not i
        )
        + "\n"
    )
