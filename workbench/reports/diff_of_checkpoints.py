"""Differences of runs and checkpoints: settings, weights by matrix and direction, and stored measures over seeds.

workbench.diff("runs/text-transformer-s0", "runs/text-resformer-s0")
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from workbench.claims.verdict import judge_differences
from workbench.console import notebook_html
from workbench.errors import BadCheckpoint, BadData, WorkbenchError
from workbench.runs.catalogue import Entry, catalogue
from workbench.runs.records import SAMPLE_COLUMNS, facts, one_sample, read_parquet
from workbench.runs.run import Run
from workbench.runs.table_cache import RecordCache, TelemetryCache
from workbench.statistics.intervals import MIN_SEEDS, paired_seeds
from workbench.storage.path_or_url import locate

SECTIONS = ("architecture", "options", "seed", "model", "train", "data", "machine", "versions", "observed", "log")
"""Sections of a run's description that are compared; times, names and places are not."""
TOP, NAMED = 4, 3  # singular directions, parameters in a message
TABLES_OF_IDS = r"(.*\.)?(embed(_tokens|_positions|_in)?|(tok|word)_embeddings|w[tp]e)\.weight|.*\.tables\.\d+"
GPT2 = r"(.*\.)?(c_attn|c_proj|c_fc)\.weight"  # stored [input, output] by transformers, [output, input] by nanoGPT
AXES = ["metric", "data", "T", "site", "part", "variant", "unit"]
"""Columns that name a measure."""
CELL = ["layer", "source", "head", "position", "index"]
"""Columns that a measure is averaged over, where both sides have the cell."""


@dataclass(frozen=True, eq=False)
class MatrixChange:
    """The difference B - A of two matrices [rows, columns], as directions: sum over i of size_i left_i right_i^T."""

    relative: float  # ||B - A|| / ||A||, Frobenius norms; NaN if A is 0
    sizes: np.ndarray  # [k], the largest singular values of B - A
    left: np.ndarray  # [rows, k], directions that the change writes
    right: np.ndarray  # [columns, k], directions that the change reads
    shares: np.ndarray  # [k], share of ||B - A||^2 by direction; NaN without a change
    overlap: tuple[float, float]
    """Mean over the directions of B - A of their squared cosine with the space of A's k, left and right: 1 if it holds them. Directions
    beyond the rank are 0 and do not count."""
    chance: tuple[float, float]  # the expectation for random directions, k / rows and k / columns, k at most A's rank


def matrix_change(a: Any, b: Any, top: int = TOP) -> MatrixChange:
    """Return by how much and in which directions a matrix moved.

    Args:
        a: Matrix [rows, columns], an array or a tensor.
        b: Matrix of the same shape.
        top: Number k of singular directions, at most the smaller side.

    Returns:
        A `MatrixChange`, computed in float64. Costs O(rows columns min(rows, columns)).

    Raises:
        BadData: The shapes differ, or an argument is no finite matrix.
    """
    a, b = (np.asarray(x.detach().cpu().double() if hasattr(x, "detach") else x, dtype=np.float64) for x in (a, b))
    if a.shape != b.shape or a.ndim != 2 or not a.size:
        raise BadData(f"shapes {a.shape} and {b.shape}: give two matrices of one shape")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise BadData("a matrix holds NaN or an infinite number, so its directions are unknown")
    k, d = min(top, *a.shape), b - a
    size, moved = float(np.linalg.norm(a)), float(np.linalg.norm(d))
    (left, sizes, right), (left_a, sizes_a, right_a) = _directions(d, k), _directions(a, k)
    rank, rank_a = (int(np.count_nonzero(x)) for x in (sizes, sizes_a))  # at most k
    overlap = tuple(float(np.square(x.T @ y).sum() / max(rank, 1)) for x, y in ((left, left_a), (right, right_a)))
    shares = np.square(sizes / moved) if moved else np.full(k, math.nan)
    return MatrixChange(
        moved / size if size else math.nan, sizes, left, right, shares,
        (overlap[0], overlap[1]) if moved and size else (math.nan, math.nan), (rank_a / a.shape[0], rank_a / a.shape[1]),
    )  # fmt: skip


def _directions(x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the k largest singular values with their left [rows, k] and right [columns, k] vectors, from the smaller Gram matrix."""
    if not x.any():
        return np.zeros((x.shape[0], k)), np.zeros(k), np.zeros((x.shape[1], k))
    from scipy.linalg import eigh  # loads slowly, and few need it

    scale = float(np.abs(x).max())  # squares of tiny changes would underflow
    y = (x if x.shape[0] <= x.shape[1] else x.T) / scale
    values, vectors = eigh(y @ y.T, subset_by_index=[len(y) - k, len(y) - 1])
    sizes, near = np.sqrt(values[::-1].clip(0)), vectors[:, ::-1]
    real = sizes > sizes[0] * 1e-7  # the other directions are rounding: 0
    sizes, near = sizes * real, near * real
    far = y.T @ near / np.where(real, sizes, 1)
    left, right = (near, far) if y.shape == x.shape else (far, near)
    return left, sizes * scale, right


TABLES = ("settings", "weights", "measures")


@dataclass(frozen=True, eq=False)
class Differences:
    """Differences between runs or checkpoints. Tables without rows mean that nothing there differs or is known.

    `settings`: a row for each setting that differs, a column for each run. `weights`: a row for each tensor of A and B.
    `measures`: a row for each stored measure of A and B, `moved` where the Holm-adjusted interval over seeds excludes 0.
    """

    names: tuple[str, ...]
    settings: pd.DataFrame
    weights: pd.DataFrame = field(default_factory=pd.DataFrame)
    measures: pd.DataFrame = field(default_factory=pd.DataFrame)
    notes: tuple[str, ...] = ()

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables by name."""
        return {name: getattr(self, name) for name in TABLES}

    def _repr_html_(self) -> str:
        tables = ((name, t.to_html(index=False, border=0)) for name, t in self.tables.items() if len(t))
        shown = [f"<h4>{name}</h4>{table}" for name, table in tables]
        names = {str(i): name for i, name in enumerate(self.names, 1)}
        return notebook_html("differences", names, *shown, *(f"<p>{escape(note)}</p>" for note in self.notes))


def diff(*things: Any, step: str | int | Sequence[str | int] = "last", top: int = TOP) -> Differences:
    """Compare runs or checkpoints: settings of two or more, and weights and stored measures of two.

    Args:
        things: Runs, run folders, names of what ships, checkpoints of any readable format, or models; at least two.
        step: Checkpoint of runs: "last", "first" or a number, or one for each of `things`.
        top: Number of singular directions per matrix.

    Returns:
        `Differences`. Its `notes` say what is not compared and why.

    Raises:
        WorkbenchError: Fewer than two things, or a number of steps that fits none.
        BadCheckpoint: A checkpoint cannot be read.
    """
    steps = [step] * len(things) if isinstance(step, str | int) else list(step)
    if len(things) < 2 or len(steps) != len(things):
        raise WorkbenchError(
            f"{len(things)} runs and {len(steps)} steps: give two runs or more, and one step for each or for all"
        )
    sides = [Side.of(thing, at) for thing, at in zip(things, steps, strict=True)]
    names = [side.name(with_step=len(set(steps)) > 1) for side in sides]
    names = [n if names.count(n) == 1 else f"{n} ({i})" for i, n in enumerate(names, 1)]  # runs of several folders
    settings = setting_differences({name: side.description() for name, side in zip(names, sides, strict=True)})
    if len(things) > 2:
        return Differences(tuple(names), settings, notes=("Weights and measures are compared for two runs, not more.",))
    notes, weights, measures = [], pd.DataFrame(), pd.DataFrame()
    runs = [side.thing for side in sides if isinstance(side.thing, Run)]
    if absent := [run.name for run in runs if not run.steps]:
        notes.append(f"Weights are not compared: no checkpoints here of {' and '.join(absent)}.")
    else:
        try:
            weights = weight_changes(*(side.tensors() for side in sides), top=top)
        except BadCheckpoint as reason:
            notes.append(f"Weights are not compared: {reason}")
    if len(runs) == 2:
        a, b = (side.rows() for side in sides)
        measures, note = measure_differences(a, b, [d for side in sides for d in side.documents()])
        notes.append(note)
    return Differences(tuple(names), settings, weights, measures, tuple(notes))


@dataclass(frozen=True)
class Side:
    """One of the things that are compared: a run at a step, the path of a checkpoint, or a model."""

    thing: Any
    step: str | int

    @classmethod
    def of(cls, thing: Any, step: str | int) -> Side:
        """Open a run; raises `WorkbenchError` for anything that has neither settings nor weights."""
        if isinstance(thing, str | Path) and (location := locate(thing)).is_run:
            thing = Run.open(location)
        if not isinstance(thing, str | Path | Run) and not hasattr(thing, "named_parameters"):
            what = type(thing).__name__
            raise WorkbenchError(
                f"cannot compare a {what}; give runs, paths of checkpoints, or models of `load` or `observe`"
            )
        return cls(thing, step)

    @property
    def number(self) -> int | None:
        """Number of a run's step; None for the last one of a run without checkpoints."""
        return None if self.step == "last" and not self.thing.steps else self.thing.resolve(self.step)[0]

    def name(self, with_step: bool) -> str:
        """Return the name of a run, of a path or of a model."""
        if isinstance(self.thing, Run):
            return f"{self.thing.name}, step {self.number}" if with_step else self.thing.name
        return str(self.thing) if isinstance(self.thing, str | Path) else f"model {self.thing.architecture}"

    def state(self) -> Any:
        """Return the unread tensors of a checkpoint and its facts."""
        from workbench.checkpoints.lora_adapters import read_merged
        from workbench.checkpoints.paths import identify  # import torch

        return read_merged(identify(self.thing.path if isinstance(self.thing, Run) else self.thing, self.step))

    def description(self) -> Mapping[str, Any]:
        """Return the settings of a run, of a checkpoint's configuration, or of a model."""
        if isinstance(self.thing, Run):
            return run_description(self.thing)
        if isinstance(self.thing, str | Path):
            info = self.state().info
            return {"format": info.format, "model": dict(info.config or {})}
        model = self.thing
        options = getattr(model, "options", {})
        return {"architecture": model.architecture, "options": options, "model": vars(model.config)}

    def tensors(self) -> Mapping[str, Any]:
        """Return the tensors by name, unread where they are in a file."""
        if not isinstance(self.thing, Run | str | Path):
            return dict(self.thing.named_parameters())
        state = self.state()
        state.check()
        return dict(state.tensors)

    def rows(self) -> pd.DataFrame:
        """Return `stored_rows` of a run and of the other seeds of its model in the same folder."""
        folder = self.thing.path.parent
        entries = catalogue(folder).entries
        own = [e for e in entries if e.path == str(self.thing.path)]
        alike = [e for e in entries if own and (e.group, e.series) == (own[0].group, own[0].series)]
        return stored_rows(alike, self.number, RecordCache(folder), TelemetryCache(folder))

    def documents(self) -> list[pd.DataFrame]:
        """Return `stored_documents` of the run, if it is in the index of its folder."""
        own = [e for e in catalogue(self.thing.path.parent).entries if e.path == str(self.thing.path)]
        return [stored_documents(e, self.number) for e in own]


def run_description(run: Run) -> dict[str, Any]:
    """Return the settings of a run; of imported checkpoints without the recipe, which nothing says."""
    known = [name for name in SECTIONS if name in run.info and (name != "train" or "imported" not in run.info)]
    return {name: run.info[name] for name in known}


def setting_differences(descriptions: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Return the settings in which descriptions differ, and no others.

    Args:
        descriptions: Nested settings by name of the run; a nested setting is named `train.lr`.

    Returns:
        A row for each setting that is not equal everywhere: `setting`, and a column for each name with the value as JSON, empty
        where the setting is absent.
    """
    flat = {name: dict(_leaves(described)) for name, described in descriptions.items()}
    keys = dict.fromkeys(key for each in flat.values() for key in each)
    rows = [{"setting": key} | {name: each.get(key, "") for name, each in flat.items()} for key in keys]
    rows = [row for row in rows if len({row[name] for name in flat}) > 1]
    return pd.DataFrame(rows, columns=["setting", *flat])


def _leaves(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)


# ---- weights ---------------------------------------------------------------------------------------------------------


def weight_changes(a: Mapping[str, Any], b: Mapping[str, Any], *, top: int = TOP) -> pd.DataFrame:
    """Return which tensors moved, by how much and in which directions.

    Args:
        a: Tensors by name, of a model or of a checkpoint. A tensor of more than two axes counts as [first axis, all others].
        b: Tensors of the same names and shapes.
        top: Number k of singular directions.

    Returns:
        A row for each tensor of numbers that are not whole, in A's order: `tensor`, `layer` (NA outside the blocks), `matrix` (the
        name without its layer), `shape`, `relative` (||B - A|| / ||A||), and for matrices as in `MatrixChange`: `top_share`
        (share of the change along its first direction), `top_k_share`, `overlap_out` and `overlap_in` (with A's directions)
        and their `chance_out`, `chance_in`. Embeddings and GPT-2's matrices are transposed, as their rows are inputs.

    Raises:
        BadCheckpoint: Names or shapes differ, or quantised weights do; the message names them.
    """
    _refuse_other_parameters(a, b)
    rows, seen = [], set[Any]()
    joint = [x.shape for name, x in a.items() if name.endswith("c_attn.weight") and len(x.shape) == 2]
    transposed = f"{TABLES_OF_IDS}|{GPT2}" if any(3 * n == m for n, m in joint) else TABLES_OF_IDS
    for name in a:
        place = tuple(getattr(x[name], "place", id(x[name])) for x in (a, b))
        if place in seen:  # tied to one before it on both sides
            continue
        seen.add(place)
        one, other = (x[name].read(name, None) if hasattr(x[name], "read") else x[name].detach() for x in (a, b))
        if not (one.is_floating_point() and other.is_floating_point()):
            if not one.equal(other):
                raise BadCheckpoint(
                    f"{name} holds {one.dtype} and {other.dtype} and differs: quantised weights are not compared"
                )
            continue
        if not one.numel():
            continue
        first, second = (x.reshape(len(x) if x.ndim > 1 else 1, -1) for x in (one, other))
        if re.fullmatch(transposed, name):
            first, second = first.mT, second.mT
        change = matrix_change(first, second, top)
        place_in_name = re.fullmatch(r"(?:.*?\.)?(\d+)\.(.*)", name)  # the first number is the layer
        layer, matrix = (int(place_in_name[1]), place_in_name[2]) if place_in_name else (None, name)
        shape = " × ".join(map(str, one.shape))
        row = {"tensor": name, "layer": layer, "matrix": matrix, "shape": shape, "relative": change.relative}
        if one.ndim > 1:
            row |= {
                "top_share": change.shares[0], "top_k_share": change.shares.sum(), "overlap_out": change.overlap[0],
                "chance_out": change.chance[0], "overlap_in": change.overlap[1], "chance_in": change.chance[1],
            }  # fmt: skip
        rows.append(row)
    return pd.DataFrame(rows).astype({"layer": "Int64"})


def _refuse_other_parameters(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """Raise `BadCheckpoint` if names or shapes differ, and say which model lacks what."""
    shapes = [{name: [int(n) for n in x.shape] for name, x in each.items()} for each in (a, b)]
    alone = [sorted(shapes[i].keys() - shapes[1 - i]) for i in (0, 1)]
    faults = [
        f"{one} has parameters that {other} lacks: {', '.join(names[:NAMED])}"
        + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
        for (one, other), names in zip((("A", "B"), ("B", "A")), alone, strict=True)
        if names
    ]
    unequal = [n for n in shapes[0] if n in shapes[1] and shapes[0][n] != shapes[1][n]]
    faults += [f"{n} is {shapes[0][n]} in A and {shapes[1][n]} in B" for n in unequal[:NAMED]]
    if faults:
        raise BadCheckpoint(f"No matrix is compared. {'. '.join(faults)}.")


# ---- stored measures -------------------------------------------------------------------------------------------------


def stored_rows(
    entries: Sequence[Entry], step: int | None, records: RecordCache, telemetry: TelemetryCache
) -> pd.DataFrame:
    """Return stored records and validation losses of runs at a step, without controls. Without a step, each measure's last."""
    rows = pd.concat(
        [records.rows(entries, None)[0], telemetry.rows(entries, ["validation_loss"])[0]], ignore_index=True
    )
    rows = rows[rows["control"].isna()]
    at = rows["step"].astype("Float64").fillna(math.inf if step is None else step)
    upto = at if step is None else at.where(at <= step)
    latest = upto.groupby([rows["run"], rows["metric"]]).transform("max")
    logged = rows["metric"] == "validation_loss"  # which may end a few steps before the checkpoint
    # a run whose log ended before those of the others, or broke, has no loss at this step
    last = (at == latest) & (~logged | (latest == latest[logged].max()))
    rows = rows[last if step is None else (at == step) | (last & logged)]
    return one_sample(rows[rows["value"].notna()])


def measure_differences(
    a: pd.DataFrame, b: pd.DataFrame, documents: Sequence[pd.DataFrame] = ()
) -> tuple[pd.DataFrame, str]:
    """Return which measures differ between B and A beyond the noise over seeds, or over documents of two checkpoints.

    A measure is the mean of its records over the layers, heads and positions that A and B share, for each seed. Differences are
    paired by seed, or with fewer than `MIN_SEEDS` shared seeds by document. They are tested with Student's t test, Holm-corrected
    over all measures.

    Args:
        a: Records of A's model, one step of each seed.
        b: Records of B's model.
        documents: `stored_documents` of A and of B, if there are any.

    Returns:
        A row for each measure that both have on the same documents: its name, `a` and `b` (means over what is paired), `difference`
        (B - A), `low` and `high` (adjusted interval), `seeds`, `p` (adjusted) and `moved`. And a sentence that says how many
        moved beyond which noise, or why nothing is claimed.
    """
    means = []
    for name, given in (("a", a), ("b", b)):
        keyed = given.assign(**{c: given[c].astype(object).where(given[c].notna(), "") for c in (*AXES, *CELL)})
        samples = {text: str(facts(text).get("data", "")) for text in given["provenance"].dropna().unique()}
        keyed["sample"] = [
            samples.get(text, "") for text in given["provenance"]
        ]  # of other documents the seeds share the difference
        means.append(keyed.groupby([*AXES, *CELL, "sample", "seed"])["value"].mean().astype(float).rename(name))
    shared = pd.concat(means, axis=1, join="inner")
    both = shared.groupby(level=[*AXES, "seed"]).mean().reset_index()
    if both.empty:
        return both, "Measures are not compared: A and B share no measure on the same documents and seed."
    cells = [{key[:-1] for key in x.index.tolist()} for x in means]  # without the seed
    alone = {
        cell[: len(AXES)] for cell in cells[0] ^ cells[1]
    }  # measures of which one side has more layers, for example
    each = {key: part.set_index("seed") for key, part in both.groupby(AXES)}
    intervals = {key: paired_seeds(part["b"], part["a"]) for key, part in each.items()}
    tested = {
        key: interval for key, interval in intervals.items() if interval.n >= MIN_SEEDS and math.isfinite(interval.p)
    }
    by_document = not tested and len(documents) == 2
    paired = dict[Any, pd.DataFrame]()  # values of single documents: of the two checkpoints, not of other seeds
    if by_document:
        paired = {key: part for key in each if (part := _over_documents(key, documents)) is not None}
        intervals |= {key: paired_seeds(part["b"], part["a"]) for key, part in paired.items()}
        tested = {key: intervals[key] for key in paired if math.isfinite(intervals[key].p)}
    verdicts = judge_differences(tested)
    rows: list[dict[Any, Any]] = []
    for key, interval in intervals.items():
        sides = paired.get(key, each[key])[["a", "b"]].mean().to_dict()
        row = dict(zip(AXES, key, strict=True)) | sides | {"difference": interval.value}
        if verdict := verdicts.get(key):
            wide = interval.widened(verdict.factor)
            row |= {"low": wide.low, "high": wide.high, "p": min(1.0, interval.p * verdict.factor)}
        rows.append(row | {"seeds": len(each[key]), "moved": verdict is not None and verdict.status != "unresolved"})
    table = pd.DataFrame(rows)
    table[AXES] = table[AXES].astype(object).where(table[AXES] != "", None)
    seeds = max(map(len, each.values()))
    partly = len(alone.intersection(each))
    over = (
        f" For {partly} of {len(each)} measures, only the layers, heads, positions and documents that both have count."
    )
    over = over if partly else ""
    if not tested:
        few = f"{seeds} shared seed{'s' * (seeds > 1)}: nothing is claimed about the models; {MIN_SEEDS} seeds are needed."
        return table, few + over
    noise = "documents" if by_document else "seeds"
    sentence = f"{int(table['moved'].sum())} of {len(tested)} tested measures differ beyond the noise over {noise} (Holm-adjusted)."
    if by_document:
        sentence += f" {seeds} shared seed{'s' * (seeds > 1)}: of these checkpoints, not of their models."
    return table, sentence + over


def _over_documents(key: Any, documents: Sequence[pd.DataFrame]) -> pd.DataFrame | None:
    """Return one measure of A and B by document; None if they were not measured on the same documents."""
    named = dict(zip(AXES, key, strict=True))
    sides = []
    for frame in documents:
        rows = frame[(frame["metric"] == named["metric"]) & (frame["data"] == named["data"])]
        for column in ("site", "variant"):
            rows = rows[rows[column].astype(object).where(rows[column].notna(), "") == named[column]]
        rows = rows[rows["document"].notna() & rows["value"].notna()]
        sides.append(rows.assign(**{c: rows[c].fillna(-1) if c in rows else -1 for c in CELL}))
    a, b = sides
    data = {facts(p).get("data") for x in sides for p in x["provenance"].unique()}
    if named["part"] != "" or a.empty or b.empty or len(data) > 1:
        return None
    means = [x.groupby(["document", *CELL])["value"].mean() for x in (a, b)]
    return pd.concat(means, axis=1, join="inner", keys=["a", "b"]).groupby(level="document").mean()


def stored_documents(entry: Entry, step: int | None) -> pd.DataFrame:
    """Return the stored values of single documents of a run at a step; without a step, at each measure's last."""
    rows = read_parquet(sorted(Path(entry.path).glob("records/*.samples.parquet")), SAMPLE_COLUMNS)
    if step is None:
        last = rows.groupby("metric")["step"].transform("max")
        return rows[rows["step"].isna() | (rows["step"] == last)]
    return rows[rows["step"] == step]
