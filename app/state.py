"""What the pages share: the runs under the folder, the selection, every cached call into the library.

Everything cached is keyed by plain values: paths, steps, and when the files last changed. Torch is imported only when a
page asks a model something.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from app import url
from app.url import plain
from workbench import plots
from workbench.errors import ArchitectureAssumed, BadData, WorkbenchError
from workbench.files import digest
from workbench.names import LABELS
from workbench.results import load_records, records
from workbench.runs import Run, is_locked, list_runs, runs_folder

LONGEST_PROMPT, MOST_TOKENS = 20_000, 256
DATA_ERRORS = (WorkbenchError, OSError, ValueError, KeyError, TypeError)


# ---- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """What the pages know of a run without opening its checkpoints."""

    name: str
    path: str
    architecture: str
    series: str  # the architecture, with options where runs of one set differ in them
    seed: int
    kind: str
    group: str
    title: str
    steps: tuple[int, ...]
    last: int  # the recipe's last step
    n_layers: int
    n_heads: int

    @property
    def stamp(self) -> tuple[int, ...]:
        """Changes when anything in the folder appears or is replaced."""
        return _stamp(Path(self.path))


def _stamp(path: Path) -> tuple[int, ...]:
    parts = (path, path / "run.json", path / "telemetry", path / "records")
    return tuple(p.stat().st_mtime_ns if p.exists() else 0 for p in parts)


def root() -> Path:
    """The folder of runs: `--runs DIR` after `--`, else the environment's, else ./runs."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--runs")
    return runs_folder(parser.parse_known_args(sys.argv[1:])[0].runs)


def listing() -> tuple[list[Entry], dict[str, str]]:
    """All runs, and what is wrong with the folders that cannot be read."""
    folder = root()
    try:
        found = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
        return _listing(str(folder), tuple((p.name, *_stamp(p)) for p in found))
    except OSError as error:
        return [], {} if isinstance(error, FileNotFoundError) else {folder.name: str(error)}


@st.cache_data(max_entries=4, show_spinner=False)
def _listing(folder: str, stamps: tuple[Any, ...]) -> tuple[list[Entry], dict[str, str]]:
    runs, problems = list_runs(Path(folder))
    entries, options = [], {}
    for run in runs:
        try:
            entries.append(_entry(run))
            options[run.name] = dict(run.info.get("options") or {})
        except DATA_ERRORS as error:
            problems[run.name] = f"run.json is incomplete: {type(error).__name__} {error}"
    named = []
    for entry in entries:
        alike = [options[e.name] for e in entries if (e.group, e.architecture) == (entry.group, entry.architecture)]
        mine = options[entry.name]
        differing = sorted(k for k in mine if any(other.get(k) != mine[k] for other in alike))
        told = "".join(f" {k}={mine[k]}" for k in differing)
        named.append(Entry(**{**entry.__dict__, "series": entry.series + told}))
    return named, problems


def _entry(run: Run) -> Entry:
    if run.recorded:
        return _recorded(run)
    model, train, data = run.model, run.train, run.info["data"]
    kind = str(data["kind"])
    group = f"{kind}-{model.n_layers}x{model.d_model}-{digest(run.info['model'], run.info['train'], data)[:4]}"
    what = "repeated random tokens" if kind == "repeated" else f"text ({', '.join(map(str, data.get('domains', ())))})"
    return Entry(
        name=run.name,
        path=str(run.path),
        architecture=run.architecture,
        series=run.architecture,
        seed=run.seed,
        kind=kind,
        group=group,
        title=f"{what}: {model.n_layers} layers of width {model.d_model}, {train.steps} steps",
        steps=tuple(run.steps),
        last=train.steps,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
    )


def _recorded(run: Run) -> Entry:
    """What somebody's own loop recorded: each recording is a series of its own, for nothing says they are alike."""
    return Entry(
        name=run.name,
        path=str(run.path),
        architecture=run.architecture,
        series=run.name,
        seed=run.seed,
        kind="recorded",
        group="recorded",
        title="recorded in other loops",
        steps=(),
        last=0,
        n_layers=int(run.info["model"]["n_layers"]),
        n_heads=0,
    )


def being_written(entries: Iterable[Entry]) -> bool:
    """Whether somebody is training or recording one of these now."""
    return any(is_locked(Path(e.path)) for e in entries)


def demo_runs(experiment: str) -> list[Entry]:
    """The demo's runs of one experiment, by the names it gives them."""
    return [e for e in listing()[0] if re.fullmatch(rf"{experiment}-.+-s\d+", e.name)]


def demo_status() -> dict[str, Any] | None:
    """How far the demo is; None where none was started here. `running` is False once it is done or has gone quiet."""
    path = root() / ".demo.json"
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
        ready, planned = len(status["ready"]), len(status["models"])
        newest = max([path.stat().st_mtime, *(p.stat().st_mtime for p in root().glob("*/telemetry"))])
        quiet = time.time() - newest > 180
        left = status.get("left_s")
        return {
            "finished": bool(status["finished"]),
            "running": not status["finished"] and not quiet,
            "ready": ready,
            "planned": planned,
            "left_s": float(left) if left is not None else None,
            "failed": {str(k): str(v) for k, v in dict(status["failed"]).items()},
        }
    except (*DATA_ERRORS, AttributeError):
        return None


# ---- the selection ----


def choose_set(entries: Sequence[Entry]) -> list[Entry]:
    """Runs that may be compared: of one data, shape and recipe. The largest such set first."""
    titles = {e.group: e.title for e in entries}
    sizes = {g: sum(e.group == g for e in entries) for g in titles}
    groups = sorted(titles, key=lambda g: (-sizes[g], g))
    chosen = url.choose(
        "Experiment",
        "set",
        groups,
        show=lambda g: f"{titles[g]} ({sizes[g]} runs)",
        help="Runs of one data, shape and recipe",
    )
    return [e for e in entries if e.group == chosen]


def choose_models(entries: Sequence[Entry]) -> list[Entry]:
    """The runs of the chosen architectures."""
    names = sorted(
        {e.series for e in entries}, key=lambda n: (list(plots.COLOURS).index(n) if n in plots.COLOURS else 99, n)
    )
    chosen = url.choose_many("Models", "models", names, show=name_of)
    if not chosen:
        st.info("Choose at least one model.")
    return [e for e in entries if e.series in chosen]


def name_of(series: str) -> str:
    """An architecture as people write it."""
    return LABELS.get(series, series)


# ---- records ---------------------------------------------------------------------------------------------------------


@st.cache_resource(max_entries=512, show_spinner=False)
def _table(path: str, series: str, kind: str, stamp: tuple[int, ...]) -> pd.DataFrame | str:
    """A run's telemetry or records, or what is wrong with them; shared, so never written to."""
    try:
        run = Run.open(path)
        frame = run.telemetry() if kind == "telemetry" else load_records([run.path])
        return frame.assign(architecture=series, run=run.name)
    except DATA_ERRORS as error:
        return f"{kind}: {error}"


def table(
    entries: Iterable[Entry], kind: str, metrics: Iterable[str] | None = None, quiet: bool = False
) -> pd.DataFrame:
    """Telemetry or records of runs; a run whose files are damaged is named on the page and left out."""
    wanted, parts = None if metrics is None else set(metrics), []
    for entry in entries:
        found = _table(entry.path, entry.series, kind, entry.stamp)
        if isinstance(found, str):
            if not quiet:
                st.warning(f"{plain(entry.name)} is left out: {plain(found)}", icon=":material/broken_image:")
            continue
        parts.append(found if wanted is None else found[found["metric"].isin(wanted)])
    full = [p for p in parts if len(p)]
    return pd.concat(full, ignore_index=True) if full else records([])


def paired(frame: pd.DataFrame) -> pd.DataFrame:
    """Numbers minus the Transformer's of the same seed; empty where no seed is shared."""
    try:
        return plots.relative(frame)
    except WorkbenchError:
        return frame.head(0)


def metric_info(name: str) -> tuple[str, str]:
    """A metric's or intervention's first line, and its whole description."""
    import inspect

    from workbench.interventions import INTERVENTIONS
    from workbench.metrics import METRICS

    item = METRICS.get(name) or INTERVENTIONS.get(name)
    return (item.summary, inspect.getdoc(item.function) or "") if item else ("", "")


def show(
    figure: Callable[[], Any],
    frame: pd.DataFrame,
    key: str,
    *,
    download: bool = False,
    numbers: str | None = "The numbers of this figure",
) -> None:
    """A figure with its alt text, its numbers and, on demand, its files; what cannot be drawn is said instead."""
    try:
        made = figure()
    except WorkbenchError as error:
        st.info(plain(error))
        return
    made.update_layout(font_color=None, title_subtitle_font_color=None)  # the page's theme has its own
    st.plotly_chart(made, width="stretch", key=key, config=plots.CONFIG, alt=plots.alt_text(made))
    if numbers:
        panel = st.expander(numbers, on_change="rerun", key=f"{key}_open")
        if panel.open:  # thousands of rows are sent only when somebody looks
            panel.dataframe(
                plots.table(frame),
                width="stretch",
                hide_index=True,
                key=f"{key}_table",
                alt=f"Table of: {plots.alt_text(made)[:300]}",
            )
    if download:
        left, right, _ = st.columns([1, 1, 3])
        left.download_button(
            "Numbers (CSV)",
            lambda: plots.table(frame).to_csv(index=False),
            f"{key}.csv",
            "text/csv",
            key=f"{key}_csv",
            on_click="ignore",
        )
        right.download_button(
            "Figure (HTML)",
            lambda: plots.html(made, whole=True),
            f"{key}.html",
            "text/html",
            key=f"{key}_html",
            on_click="ignore",
        )


# ---- models ----------------------------------------------------------------------------------------------------------


def _release(model: Any) -> None:
    if hasattr(model, "lock"):
        with model.lock:
            model.to("cpu")
            model.reset_hooks()


@st.cache_resource(max_entries=2, on_release=_release, show_spinner=False)
def _model(path: str, step: int, stamp: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ArchitectureAssumed)  # the figures say so
        return Run.open(path).load(step)


@dataclass(frozen=True)
class Look:
    """What a model does with one text: arrays for the figures, no tensors."""

    tokens: list[str]
    patterns: np.ndarray  # [layer, head, query, key]
    values: pd.DataFrame  # value norms per layer, site and position, as records
    next_tokens: list[str]
    next_chances: list[float]
    chances: list[float]  # of each token after the first, given those before it
    assumed: bool


def look(entry: Entry, step: int, text: str | None) -> Look:
    """Run a model on a text (None: a fixed sequence of random tokens, written twice). Raises `WorkbenchError`."""
    folder = Path(entry.path) / f"step_{step:06d}"
    stamp = max((p.stat().st_mtime_ns for p in folder.glob("*")), default=0)
    return _look(entry.path, entry.series, entry.kind, step, stamp, text)


@st.cache_data(max_entries=96, max_size="400MB", show_spinner=False)
def _look(path: str, series: str, kind: str, step: int, stamp: int, text: str | None) -> Look:
    import torch

    try:
        model = _model(path, step, stamp)
    except WorkbenchError:
        raise
    except Exception as error:
        raise WorkbenchError(f"{Path(path).name} cannot be opened at step {step}: {type(error).__name__}") from error
    ids, tokens = _ids(model, kind, Run.open(path).train.T, text)
    layers = range(model.config.n_layers)
    points = [f"blocks.{n}.attn.{p}" for n in layers for p in ("hook_pattern", "hook_v", "own.hook_v")]
    with torch.no_grad():
        logits, cache = model.run_with_cache(ids, names_filter=[p for p in points if p in model.hook_dict])
    common = {
        "run": Path(path).name,
        "architecture": series,
        "step": step,
        "metric": "value_norm",
        "data": "prompt",
        "unit": "norm",
        "n": 1,
    }
    rows = [
        {**common, "T": ids.shape[1], "site": site, "layer": n, "position": i, "value": value}
        for n in layers
        for site, point in (("v", "hook_v"), ("own_v", "own.hook_v"))
        if f"blocks.{n}.attn.{point}" in cache
        for i, value in enumerate(cache[f"blocks.{n}.attn.{point}"][0].flatten(1).float().norm(dim=-1).tolist())
    ]
    chances = logits[0].float().softmax(-1)
    top = chances[-1].topk(min(10, chances.shape[-1]))
    given = chances[:-1].gather(-1, ids[0, 1:, None])[:, 0].tolist()
    patterns = np.stack([cache[f"blocks.{n}.attn.hook_pattern"][0].float().numpy() for n in layers])
    names = _names(model, kind, top.indices.tolist())
    return Look(tokens, patterns, records(rows), names, top.values.tolist(), given, bool(model.assumed))


def _names(model: Any, kind: str, ids: list[int]) -> list[str]:
    if model.tokenizer is not None:
        return list(model.tokenizer.token_strings(ids))
    if kind != "repeated":
        return [str(i) for i in ids]
    from workbench.tasks import RepeatedTokens

    return RepeatedTokens(vocabulary=model.config.d_vocab).token_strings(ids)


def _ids(model: Any, kind: str, T: int, text: str | None) -> tuple[Any, list[str]]:
    """Token ids [1, pos] of a prompt and their names; repeated-token models see their letters twice."""
    import torch

    from workbench.tasks import SYMBOLS, RepeatedTokens

    if kind != "repeated":
        if not (text or "").strip():
            raise BadData("the prompt is empty; type some text")
        if model.tokenizer is None:
            raise BadData("this run has no tokenizer, so it cannot read text")
        ids = model.tokenizer.encode(text)
    elif text is None:
        ids = RepeatedTokens(vocabulary=model.config.d_vocab, period=T // 2).validation(1)[0].tolist()
    else:
        known = SYMBOLS[: model.config.d_vocab]
        letters = [c for c in text if not c.isspace()]
        if not letters:
            raise BadData("the sequence is empty; type some letters or digits")
        if unknown := sorted(set(letters) - set(known)):
            raise BadData(f"{' '.join(unknown[:8])}: not among this model's tokens, which are {known}")
        ids = [known.index(c) for c in letters] * 2
    most = min(MOST_TOKENS, model.config.n_ctx)
    if not 2 <= len(ids) <= most:
        raise BadData(f"the prompt is {len(ids)} tokens long; this page draws 2 to {most}")
    return torch.tensor([ids]), _names(model, kind, ids)


def best_head(entries: Sequence[Entry], step: int) -> tuple[int, int] | None:
    """(layer, head) with the highest induction score at a step, from the records."""
    frame = table(entries, "records", ["induction_score"], quiet=True)
    rows = frame[(frame["step"] == step) & frame["variant"].isna() & frame["control"].isna()]
    if rows.empty:
        return None
    top = rows.sort_values("value").iloc[-1]
    return int(top["layer"]), int(top["head"])


def head_maps(pair: Sequence[Entry], step: int) -> list[tuple[str, np.ndarray, list[str]]] | None:
    """(title, pattern, tokens) of each run's copying head at a step; None, with a word on the page, where one cannot run."""
    maps = []
    for entry in pair:
        layer, head = best_head([entry], entry.steps[-1]) or (entry.n_layers - 1, 0)
        try:
            seen = look(entry, step, None)
        except WorkbenchError as error:
            st.warning(f"{plain(entry.name)}: {plain(error)}")
            return None
        maps.append(
            (
                f"{name_of(entry.series)}, seed {entry.seed}: layer {layer}, head {head}",
                seen.patterns[layer, head],
                seen.tokens,
            )
        )
    return maps


def pattern_table(maps: Sequence[tuple[str, np.ndarray, list[str]]]) -> pd.DataFrame:
    """Attention maps as rows: model, query, key, weight, the future left out."""
    parts = []
    for title, pattern, tokens in maps:
        query, key = np.tril_indices(len(tokens))
        names = np.array([f"{i}:{t}" for i, t in enumerate(tokens)])
        parts.append(
            pd.DataFrame({"model": title, "query": names[query], "key": names[key], "weight": pattern[query, key]})
        )
    return pd.concat(parts, ignore_index=True)


def prompt(label: str, default: str, about: str) -> str:
    """The prompt, mirrored in the URL; a long one is stored in the runs folder and linked by its hash."""
    return url.prompt(label, default, about, root() / ".prompts", LONGEST_PROMPT)
