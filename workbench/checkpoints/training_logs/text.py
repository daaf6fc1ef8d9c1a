"""Text logs with a step and its numbers on a line: nanoGPT, modded-nanogpt, llm.c, parameter-golf.

    iter 250: loss 1.6170, time 6002.98ms, mfu 9.86%
    step 250: train loss 1.5482, val loss 1.7322
    step:125/3200 val_loss:4.6012 train_time:17763ms step_avg:154.46ms
    step    1/10 | loss 11.032358 (+nanz)| norm 22.1414 (+nanz)| lr 8.57e-07 | 2575.63 ms | 39.0% bf16 MFU | 203557 tok/s
    s:250 trl:6.1818 lr:0.000215 norm:0.90

A line that can be read in two ways is left out, with the reason.
Source: logs of karpathy/nanoGPT, KellerJordan/modded-nanogpt, karpathy/llm.c and openai/parameter-golf.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from workbench.checkpoints.training_logs.quantity_names import (
    AVERAGES,
    ESTIMATED,
    IN_TEXT,
    NAMES,
    SECONDS,
    TIMES,
    plain_name,
)
from workbench.checkpoints.training_logs.reading import CUT_OFF, WIDE, LogNumbers, LogReader, encoding_of, of_evaluation

OTHERS = (
    ".json", ".csv", ".tsv", ".jsonl", ".parquet", ".py", ".md", ".html", ".toml", ".yaml", ".yml", ".svg", ".ipynb",
)  # fmt: skip
LONGEST = 4000  # characters of a line with numbers; longer lines are code or data
NUMBER = r"[-+]?(?:\d+(?:[,_]\d{3})*(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?|nan|[-+]?inf"
UNIT = (
    r"[(\[]?(?:bp[bcptw]\b|bits?(?:\s?(?:/|per)\s?\w+|\b)|nats?\s?(?:/|per)\s?(?:byte|char|word)\w*"
    r"|[x×*·]\s?\d[\d.^e+-]*|e[-+]\d+)"
)
"""Units of a loss that is not in nats, and powers of ten apart from their number: `1.2 (bpb)`, `3.0 e-4`, `3.0 x 10^-4`."""
AMBIGUOUS = re.compile(r"[-+]?\d{1,3},\d{3}")  # thousands or decimals
PAIR = re.compile(
    r"(?P<name>(?<![\w/.])[a-z_][\w/.]*(?:[ -][a-z_][\w/.]*){0,3})['\"]?\s*[:=]?\s*"
    rf"(?P<number>{NUMBER})(?:\s?(?P<unit>(?:ms|us|sec|s|min|m|k|%)(?![\w/])|{UNIT}))?(?!\w|[.,]\d)",
    re.IGNORECASE,
)
STEP = re.compile(
    r"(?:^s:|(?<![\w/])(?:global_)?step['\"]?[\s:=]|(?<![\w/])iter(?:ation)?['\"]?[\s:=])\s*\d", re.IGNORECASE
)
SPACED = re.compile(r"step[\s:=]*\d{1,3}(?:[ .]\d{3})+(?![\w.])", re.IGNORECASE)  # thousands apart: 1 000, 1.000
COUNTERS = ("global_step", "step", "s", "iteration", "iter")
"""Names of the optimiser step, the most reliable first: litGPT's `iter` counts micro-batches beside its `step`."""
NO_COUNTERS = ("micro", "warmup", "per", "time")
"""Words before `step` that give it another meaning."""
ALONE = re.compile(r"val loss ([-\d.]+|nan)\s*", re.IGNORECASE)  # llm.c: after as many steps as the line before counts
LLM_C = re.compile(r"step\s+(?P<step>\d+)/\d+ \|.*\|\s*(?P<ms>[\d.]+) ms\s*\|.* tok/s")  # the time has no name
SMOOTHED = re.compile(
    r"\blrm:|\b(?:avg|mean|ema|running|smoothed)\b[(\d.]*[)\]]\s*loss", re.IGNORECASE
)  # nanochat; [avg] loss
EVALUATION = re.compile(r"\b(?:val|valid|validat\w+|eval|evaluat\w+|test|dev|h[eo]ld[ -]?out)\b", re.IGNORECASE)
OTHER_RANK = re.compile(r"rank[\s:=]*0*[1-9]", re.IGNORECASE)
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def _read(path: Path, numbers: LogNumbers) -> None:
    numbers.evaluation = of_evaluation(path)
    last: int | None = None
    waiting, cut, length = list[float](), False, 0
    with path.open(encoding=encoding_of(path), errors="replace") as lines:  # a carriage return ends a line too
        while line := lines.readline(LONGEST):
            begun, cut = cut, len(line) == LONGEST and not line.endswith("\n")
            line = COLOURS.sub("", line) if "\x1b" in line else line
            if begun or cut:
                numbers.skipped[f"parts of lines longer than {LONGEST} characters"] += 1
            elif alone := ALONE.fullmatch(line):
                waiting.append(float(alone[1]))
            elif STEP.search(line):
                if len(line) < length and not line.endswith("\n"):
                    numbers.skipped[CUT_OFF] += 1
                    break
                length = len(line.rstrip("\n"))
                if timed := LLM_C.match(line):
                    step = int(timed["step"])
                    _add_losses(waiting, step - 1 if last is None else last, numbers)
                    last = step
                _add_line(line, numbers, timed["ms"] if timed else "")
    _add_losses(waiting, last, numbers)


def _add_losses(waiting: list[float], step: int | None, numbers: LogNumbers) -> None:
    """Add llm.c's validation losses, which follow a step's line, and clear the list."""
    for loss in waiting:
        if step is None:
            numbers.skipped["val loss has no step"] += 1
        else:
            numbers.add(step, "val_loss", loss)
    waiting.clear()


def _add_line(line: str, numbers: LogNumbers, milliseconds: str) -> None:
    """Add the numbers of a line, or count why it is left out."""
    pairs, short = PAIR.findall(line), line.startswith("s:")
    counters = [(kind, number, unit) for name, number, unit in pairs if (kind := _counter(name, short))]
    best = min((kind for kind, *_ in counters), key=COUNTERS.index, default="")
    steps = {(number, unit) for kind, number, unit in counters if kind == best}
    if len(steps) != 1 or SPACED.search(line):
        numbers.skipped["two steps on a line" if len(steps) > 1 else "the step is no number"] += 1
        return
    if OTHER_RANK.search(line):
        numbers.skipped["another rank than 0"] += 1
        return
    ((text, rounded),) = steps
    if rounded:
        numbers.skipped["the step is rounded"] += 1
        return
    if best.startswith("iter") and any(plain_name(name).startswith("micro") for name, *_ in pairs):
        numbers.skipped[f"{best} counts micro-batches; add the step"] += 1
        return
    step = _value(text)
    values = dict[str, set[tuple[str, str]]]()
    known = False
    # an evaluation is named elsewhere than in the names of losses, as in `val: loss 3.2`
    names_evaluation = EVALUATION.search(line) and EVALUATION.search(
        PAIR.sub(lambda m: m[0] if plain_name(m["name"]) == "loss" or "loss" not in m["name"].lower() else "", line)
    )
    for name, number, unit in pairs:
        plain = plain_name(name)
        if plain == "epoch":
            numbers.note_epoch(_value(number), step)
        plain = "step_time" if plain == "time" and line.startswith("iter ") else IN_TEXT.get(plain, plain)  # nanoGPT
        if _counter(name, short) or not (plain in NAMES or plain in AVERAGES or "loss" in plain):
            continue
        known = True
        if plain == "loss" and SMOOTHED.search(line):
            numbers.skipped["the loss is a running mean"] += 1
        elif plain == "loss" and names_evaluation:
            numbers.skipped["loss on a line that names an evaluation"] += 1
        elif unit.lower() not in (SECONDS if plain in TIMES else ("",)) and plain not in AVERAGES:
            numbers.skipped[f"{name} has {'the unit ' if unit else 'no unit'}{unit.lstrip('([')}"] += 1
        elif AMBIGUOUS.fullmatch(number) and NAMES.get(plain) != "tokens_per_second":
            numbers.skipped[f"{name} has a comma, of thousands or of decimals"] += 1
        else:
            values.setdefault(plain, set()).add((number, unit.lower()))
    estimated = "val_loss" in values and not line.lstrip().startswith("step:")
    for plain, each in values.items():
        if len(each) > 1:
            numbers.skipped[f"{plain} has two values on a line"] += 1
            continue
        ((number, unit),) = each
        ours = ESTIMATED if plain == "train_loss" and estimated else plain
        name = f"{ours}_s" if plain in TIMES else ours
        numbers.add(step, name, _value(number), factor=SECONDS.get(unit, 1.0))
    if milliseconds:
        numbers.add(step, "step_time_ms", float(milliseconds))
        numbers.skipped["tok/s is an average over many steps"] += 1
    elif not known:
        numbers.skipped["a line with a step and no known quantity"] += 1


def _value(number: str) -> float:
    return float(number.replace(",", ""))


@lru_cache(4096)
def _counter(name: str, short: bool) -> str:
    """Return which of `COUNTERS` a name is, an empty string for other names; only a short line of llm.c has `s`."""
    *before, word = name.lower().replace("-", " ").split()
    if word not in COUNTERS or (word == "s" and not short) or (before and before[-1] in NO_COUNTERS):
        return ""
    return word


READER = LogReader(
    "text",
    lambda path, head: path.suffix.lower() not in OTHERS and bool(head) and (head[:2] in WIDE or b"\0" not in head),
    _read,
)
