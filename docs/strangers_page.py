"""docs/strangers.md: one X-ray row for each public model, sinks wherever they are, with standard errors over documents.

    python docs/strangers_page.py                       # the models of `MODELS` in this machine's Hub cache, and the shipped ones
    python docs/strangers_page.py FILE --own-samples    # a file, on texts that the model writes itself
    python docs/strangers_page.py NAME@REVISION         # a Hub name in the cache

Rows are stored in docs/strangers.csv and keep their place until the same model is measured again. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import csv
import gc
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import workbench
from workbench.checkpoints import hub
from workbench.console import say
from workbench.errors import BadData, WorkbenchError
from workbench.metrics.found_sinks import sink_positions
from workbench.reports.xray import token_name, xray_data
from workbench.reports.xray_sentences import pm, sink_names
from workbench.runs.run import Run, run_or_model
from workbench.statistics.sink_thresholds import SINK_MASS

HERE = Path(__file__).parent
TABLE, PAGE = HERE / "strangers.csv", HERE / "strangers.md"
SHIPPED = ("models-transformer-s0", "models-resformer-s0")
MODELS = {  # a Hub name and its revision when this page was written
    "openai-community/gpt2": "607a30d783dfa663caf39e06633721c8d4cfcd7e",
    "EleutherAI/pythia-160m": "50f5173d932e8e61f858120bcb800b97af589f46",
    "meta-llama/Llama-3.2-1B": "4e20de362430cd3b72f300e6b0f18e50e7166e08",
    "Qwen/Qwen3-0.6B": "c1899de289a04d12100db370d81485cdf75e47ca",
    "allenai/OLMo-2-0425-1B": "a1847dff35000b4271fa70afc5db10fd29fedbdf",
    "HuggingFaceTB/SmolLM2-135M": "93efa2f097d58c2a74874c7e644dbc9b0cee75a2",
    "openai/gpt-oss-20b": "6cee5e81ee83917806bbde320786a8fb61efebee",
}
DOCUMENTS, T = 32, 128
COLUMNS = (
    "model", "revision", "architecture", "text", "loss", "sinks", "where", "first", "drain", "peak", "identity", "token_mean", "zero",
    "shuffled", "coverage",
)  # fmt: skip
HEADINGS = {
    "model": "model", "architecture": "architecture", "text": "text, documents × tokens", "loss": "loss (nats)",
    "sinks": "heads that rest on few positions; strongest share", "where": "where the strongest of them rests",
    "first": "strongest share on position 0", "drain": "smallest value norm of position 0", "peak": "largest state of position 0",
    "identity": "token identity of deep values", "token_mean": "deep values = token means (nats)", "zero": "deep values = 0 (nats)",
}  # fmt: skip
ABOUT = """# Models of other people

With this page you can measure attention sinks, the values at sinks, and deep values of public models. The table has the
models that are measured so far; the [models to add](#models-to-add) have no row yet.

`python docs/strangers_page.py` measures the models in your Hub cache and adds a row for each.

    workbench xray openai-community/gpt2 --download              # put a model into the cache; other names below
    python docs/strangers_page.py                                # measure what the cache has, and the shipped models
    python docs/strangers_page.py stories260K.bin --own-samples  # a file, on texts that the model writes

"""
READING = """
- Numbers are means over documents ± one standard error. A maximum over heads or layers is larger than a typical one.
- A head rests on a position (a sink) if its mean attention to it exceeds uniform causal attention by 0.1, beyond chance (see
  `found_sinks` in [Metrics](metrics.md)). A head is counted if these positions together receive more than 30 % of its attention.
- *Value norm*: norm over the median of the other positions, of position 0 and, if heads rest elsewhere, of these positions
  (*found*). 1 means no drain. *State of position 0*: norm in the residual stream over the mean of the other positions.
- *Token identity*: share of the variance of values that the token explains, from the first to the last layer of the later half.
- *Deep values*: the values of all layers after the first. The loss rises by these numbers when they are replaced.

"""


def measure(name: str, own_samples: bool = False) -> dict[str, str]:
    """Return one row of the table: an X-ray of a run, a file or a Hub name, in numbers with errors.

    Raises `WorkbenchError` if the model cannot be opened or has no text.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject = run_or_model(name)
        data: Any = _samples(subject) if own_samples else None
        config = subject.model if isinstance(subject, Run) else subject.config
        result = workbench.xray(subject, data, n=DOCUMENTS, T=min(T, config.n_ctx))
        false_share = _shuffled(subject, data)
    frame = result.records
    last = frame[(frame["step"].isna() | (frame["step"] == frame["step"].max())) & frame["control"].isna()]
    rows = {str(metric): part for metric, part in last.groupby("metric", observed=True)}
    token = token_name(subject)
    return {
        "model": name.partition("@")[0] if hub.short_name(name) else Path(name).name,
        "revision": _revision(name),
        "architecture": _architecture(subject, str(frame["architecture"].iloc[0])),
        "text": _text(frame, own_samples),
        "loss": _extreme(rows.get("loss"), "value", 1, 3)[0],
        **_sinks(rows, token),
        "drain": _drain(rows),
        "peak": _at_layer(_extreme(_plain(rows.get("hidden_peak")), "value", 1, 1)),
        "identity": _identity(rows.get("token_identity_share")),
        **{how: _cost(rows, how) for how in ("token_mean", "zero")},
        "shuffled": false_share,
        "coverage": result.coverage,
    }


def _samples(subject: Any) -> torch.Tensor:
    """Texts that the model writes from its start token: twice `DOCUMENTS`, as half fill the table of token means."""
    tokenizer = subject.tokenizer
    start = getattr(tokenizer, "bos_id", None)
    if start is None:
        raise BadData("--own-samples needs a tokenizer with a start token")
    begin = torch.full((2 * DOCUMENTS, 1), start)
    ids: torch.Tensor = torch.as_tensor(subject.generate(begin, min(T, subject.config.n_ctx) - 1, seed=0, stop=()))
    return ids


def _shuffled(subject: Any, data: Any) -> str:
    """Count the heads of eight documents that rest somewhere after the weights of each row changed places at random."""
    model = subject.load("last") if isinstance(subject, Run) else subject
    ids = data if isinstance(data, torch.Tensor) else None
    ids = (
        xray_data(subject, None, DOCUMENTS, min(T, model.config.n_ctx)).ids
        if ids is None and not isinstance(subject, Run)
        else ids
    )
    ids = subject.data.sample(DOCUMENTS, min(T, model.config.n_ctx)).ids if ids is None else ids
    generator, false_heads, heads = torch.Generator().manual_seed(0), 0, 0
    for layer in range(model.config.n_layers):
        if (point := f"blocks.{layer}.attn.hook_pattern") not in model.hook_dict:
            continue
        pattern = model.run_with_cache(ids[:8], names_filter=[point])[1][point].detach().double()
        visible = torch.ones(pattern.shape[-2:], dtype=torch.bool).tril()
        order = torch.rand(pattern.shape, generator=generator).masked_fill(~visible, 2).argsort(-1)
        moved = pattern.gather(-1, order) * visible
        at = sink_positions(moved.sum(-2), moved.amax(-1)).any(-1)
        false_heads, heads = false_heads + int(at.sum()), heads + at.numel()
    return f"{false_heads} of {heads}"


def _revision(name: str) -> str:
    folder = hub.snapshot(name) if hub.short_name(name) else None
    return folder.name if folder is not None else ""


def _architecture(subject: Any, name: str) -> str:
    config = subject.model if isinstance(subject, Run) else subject.config
    model = subject.load("last") if isinstance(subject, Run) else subject
    weights = list(model.parameters())
    alike = [
        w for w in weights[1:] if w.shape == weights[0].shape and torch.equal(w, weights[0])
    ]  # tied to the embedding
    size = sum(p.numel() for p in weights) - sum(p.numel() for p in alike)
    foreign = getattr(model, "foreign", None)
    return f"{name if foreign is None else type(foreign).__name__}, {config.n_layers} × {config.n_heads} heads, {size:,} parameters"


def _text(frame: pd.DataFrame, own_samples: bool) -> str:
    first = frame.iloc[0]
    n = int(frame["n"].max())
    return f"{'its own samples' if own_samples else str(first['data']).split(' ')[0]}, {n} × {int(first['T'])}"


def _plain(rows: pd.DataFrame | None) -> pd.DataFrame | None:
    return None if rows is None else rows[rows["variant"].isna()]


def _extreme(rows: pd.DataFrame | None, column: str, sign: int, digits: int) -> tuple[str, Any]:
    """Return the largest (or smallest) value of rows with its error, and its row."""
    finite = rows[rows[column].astype(float).map(math.isfinite)] if rows is not None else pd.DataFrame()
    if finite.empty:
        return "", None
    row = finite.loc[(sign * finite[column].astype(float)).idxmax()]
    return pm(float(row["value"]), float(row["se"]), digits), row


def _at_layer(found: tuple[str, Any]) -> str:
    text, row = found
    return f"{text}, layer {int(row['layer'])}" if row is not None else "not measurable"


def _sinks(rows: Mapping[str, pd.DataFrame], token: Any) -> dict[str, str]:
    first, row = _extreme(_plain(rows.get("sink_mass")), "value", 1, 3)
    result = {
        "first": f"{first}, layer {int(row['layer'])}, head {int(row['head'])}" if row is not None else "not measurable"
    }
    shares = rows.get("found_sinks")
    most, top = _extreme(_plain(shares), "value", 1, 3)
    if shares is None or top is None:
        return result | {"sinks": "not measurable", "where": ""}
    heads = _plain(shares)
    assert heads is not None
    strong = int((heads["value"] > SINK_MASS).sum())
    own = shares[(shares["layer"] == top["layer"]) & (shares["head"] == top["head"])]
    where = sink_names(own, token) if strong else "none"
    place = f"layer {int(top['layer'])}, head {int(top['head'])}"
    return result | {"sinks": f"{strong} of {len(heads)}; {most}, {place}", "where": where}


def _drain(rows: Mapping[str, pd.DataFrame]) -> str:
    drain = rows.get("value_drain")
    if drain is None:
        return "not measurable"
    own = drain[drain["site"] == "own_v"]
    drain = own if (own["layer"] > 0).any() else drain
    parts = {"": drain[drain["variant"].isna()], " found": drain[drain["variant"] == "found"]}
    return "; ".join(f"{_at_layer(_extreme(part, 'value', -1, 2))}{kind}" for kind, part in parts.items() if len(part))


def _identity(rows: pd.DataFrame | None) -> str:
    if rows is None:
        return "not measurable"
    own = rows[rows["site"] == "own_v"]
    rows = own if (own["layer"] > 0).any() else rows[rows["site"] == "v"]
    rows = rows[(rows["layer"] > 0) & (rows["layer"] >= (rows["layer"].max() + 1) / 2)].sort_values("layer")
    each = [pm(float(row["value"]), float(row["se"]), 2) for _, row in rows.iterrows()]
    return " to ".join(dict.fromkeys((each[0], each[-1]))) if each else "not measurable"


def _cost(rows: Mapping[str, pd.DataFrame], how: str) -> str:
    ablation = rows.get("deep_value_ablation")
    part = None if ablation is None else ablation[ablation["variant"] == how]
    return _extreme(part, "value", 1, 3)[0] or "not measurable"


def stored() -> list[dict[str, str]]:
    """Return the rows of the table, in order."""
    if not TABLE.exists():
        return []
    with TABLE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def page(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the page for these rows."""

    def cell(row: Mapping[str, str], column: str) -> str:
        text = row[column] + (f" @ {row['revision'][:8]}" if column == "model" and row["revision"] else "")
        return text.replace("|", "\\|").replace("\n", " ")

    table = [f"| {' | '.join(HEADINGS.values())} |", f"|{'---|' * len(HEADINGS)}"]
    table += [f"| {' | '.join(cell(row, column) for column in HEADINGS)} |" for row in rows]
    covered = [f"- {row['model']}: {row['coverage']}" for row in rows if row["coverage"]]
    tested = sum(int(row["shuffled"].split()[-1]) for row in rows)
    false = sum(int(row["shuffled"].split()[0]) for row in rows)
    calibration = (
        f"**False positives of the rule.** We permuted the weights within each row of the same patterns at random. Then {false} of "
        f"{tested:,} heads (eight documents per model) rested on a position. The rule allows 1 %.\n"
    )
    listed = "\n".join(f"| `{name}` | `{revision}` |" for name, revision in MODELS.items())
    commands = (
        "\n## Models to add\n\n`workbench xray NAME@REVISION --download` fetches one, and `python docs/strangers_page.py` then "
        "measures it. Llama needs an account of the Hub that accepted its licence. gpt-oss needs about 90 GB of memory in float32.\n\n"
        f"| name | revision |\n|---|---|\n{listed}\n"
    )
    parts = ["\n".join(table), READING + calibration]
    if covered:
        parts.append("\n".join(["**Coverage of observed models.**", "", *covered]))
    return ABOUT + "\n".join(parts) + commands


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the named models, or those in the cache and the shipped ones, and write table and page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="files, runs or Hub names; default all of `MODELS` in the cache"
    )
    parser.add_argument("--own-samples", action="store_true", help="measure on texts that the model writes")
    given = parser.parse_args(arguments)
    cached = [f"{name}@{revision}" for name, revision in MODELS.items()]
    names = given.models or [*SHIPPED, *(name for name in cached if hub.snapshot(name) is not None)]
    rows, failed = {row["model"]: row for row in stored()}, False
    for name in names:
        try:
            row = measure(name, given.own_samples)
        except WorkbenchError as error:
            say(f"{name}: {error}")
            failed = True
            continue
        rows[row["model"]] = row
        with TABLE.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows.values())
        PAGE.write_text(page(list(rows.values())), encoding="utf-8")
        say(f"{row['model']}: {row['sinks']} ({row['where']}); zero deep values {row['zero']} nats")
        gc.collect()
    for name in cached if not given.models else ():
        if hub.snapshot(name) is None:
            say(f"{name} is not in the cache: workbench xray {name} --download")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
