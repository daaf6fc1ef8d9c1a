"""Text logs with a step and its numbers on a line: nanoGPT, modded-nanogpt, llm.c, parameter-golf.

    iter 250: loss 1.6170, time 6002.98ms, mfu 9.86%
    step 250: train loss 1.5482, val loss 1.7322
    step:125/3200 val_loss:4.6012 train_time:17763ms step_avg:154.46ms
    step    1/10 | loss 11.032358 (+nanz)| norm 22.1414 (+nanz)| lr 8.57e-07 | 2575.63 ms | 39.0% bf16 MFU | 203557 tok/s
    s:250 trl:6.1818 lr:0.000215 norm:0.90

Source: logs of karpathy/nanoGPT, KellerJordan/modded-nanogpt, karpathy/llm.c and openai/parameter-golf.
"""

from __future__ import annotations

import re
from pathlib import Path

from workbench.checkpoints.training_logs.fields import AVERAGES, ESTIMATED, IN_TEXT, NAMES, SECONDS, plain_name
from workbench.checkpoints.training_logs.reading import LogNumbers, LogReader
from workbench.files import open_regular

OTHERS = (
    ".json",
    ".csv",
    ".tsv",
    ".jsonl",
    ".parquet",
    ".py",
    ".md",
    ".html",
    ".toml",
    ".yaml",
    ".yml",
    ".svg",
    ".ipynb",
)
LONGEST = 4000  # characters of a line with numbers; longer lines are code or data
NUMBER = r"[-+]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?|nan|[-+]?inf"
PAIR = re.compile(
    r"(?P<name>(?<![\w/.])[a-z_][\w/.]*(?:[ -][a-z_][\w/.]*){0,3})\s*[:=]?\s*"
    rf"(?P<number>{NUMBER})\s?(?P<unit>(?:ms|us|sec|s|min|m|k|%)(?![\w/]))?(?!\w|[.,]\d)",
    re.IGNORECASE,
)
STEP = re.compile(r"(?:^s:|(?<![\w/])(?:global_)?step[\s:=]|(?<![\w/])iter(?:ation)?[\s:=])\s*\d", re.IGNORECASE)
ALONE = re.compile(r"val loss ([-\d.]+|nan)\s*", re.IGNORECASE)  # llm.c: after as many steps as the line before counts
MILLISECONDS = re.compile(r"\|\s*([\d.]+) ms\s*\|")  # llm.c's time of a step, which has no name
SMOOTHED = re.compile(r"\blrm:")  # nanochat, whose printed loss is a running mean
TIMES = ("step_time", "train_time", "step_avg")


def _read(path: Path, numbers: LogNumbers) -> None:
    with open_regular(path) as file:
        encoding = "utf-16" if file.read(2) in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
    last, cut = 0, False
    with path.open(encoding=encoding, errors="replace") as lines:  # a progress bar's carriage returns end lines too
        while line := lines.readline(LONGEST):
            begun, cut = cut, len(line) == LONGEST and not line.endswith("\n")
            if begun or cut:
                numbers.skipped[f"parts of lines longer than {LONGEST} characters"] += 1
            elif alone := ALONE.fullmatch(line):
                numbers.add(last, "val loss", float(alone[1]))
            elif STEP.search(line):
                last = _add_line(line, last, numbers)


def _add_line(line: str, last: int, numbers: LogNumbers) -> int:
    """Add the numbers of a line and return its step, or the last one for a line without."""
    pairs = [(m["name"], m["number"].replace(",", ""), (m["unit"] or "").lower()) for m in PAIR.finditer(line)]
    step = next((float(number) for name, number, _ in pairs if _is_step(name, line)), None)
    if step is None:
        return last
    for name, number, _ in pairs:
        if plain_name(name) == "epoch":
            numbers.note_epoch(float(number), step)
    estimated = any(plain_name(name) == "val_loss" for name, _, _ in pairs) and not line.lstrip().startswith("step:")
    for name, number, unit in pairs:
        plain = plain_name(name)
        plain = "step_time" if plain == "time" and line.startswith("iter ") else IN_TEXT.get(plain, plain)  # nanoGPT
        if _is_step(name, line) or not (plain in NAMES or plain in AVERAGES or "loss" in plain):
            continue
        if plain == "loss" and SMOOTHED.search(line):
            numbers.skipped["the loss that nanochat prints is a running mean"] += 1
        elif (plain in TIMES) != (unit in SECONDS):
            numbers.skipped[f"{name} has {f'the unit {unit}' if unit else 'no unit'}"] += 1
        else:
            ours = ESTIMATED if plain == "train_loss" and estimated else plain
            numbers.add(step, ours, float(number), factor=SECONDS.get(unit, 1.0))
    if (unnamed := MILLISECONDS.search(line)) and "tok/s" in line:
        numbers.add(step, "step_time_ms", float(unnamed[1]))
        numbers.skipped["tok/s is an average over many steps"] += 1
    return int(step)


def _is_step(name: str, line: str) -> bool:
    word = name.lower().replace("-", " ").split()[-1]
    return word in ("step", "iter", "iteration", "global_step") or (word == "s" and line.startswith("s:"))


def _recognises(path: Path, head: bytes) -> bool:
    wide = head[:2] in (b"\xff\xfe", b"\xfe\xff")
    return path.suffix.lower() not in OTHERS and bool(head) and (wide or b"\0" not in head)


READER = LogReader("text", _recognises, _read)
