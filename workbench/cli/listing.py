"""Tables of everything that can be named: architectures, metrics, interventions, presets, claims, studies, runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pandas as pd

from workbench.errors import UnknownName
from workbench.places import SHIPPED, studies

LISTINGS = ("architectures", "metrics", "interventions", "presets", "claims", "studies", "runs")


def listing(what: str, runs: Path) -> tuple[pd.DataFrame, list[str]]:
    """A table and further lines to say; raises `UnknownName` for anything else."""
    if what not in LISTINGS:
        raise UnknownName("listing", what, LISTINGS)
    return {
        "architectures": _architectures,
        "metrics": _metrics,
        "interventions": _interventions,
        "presets": _presets,
        "claims": _claims,
        "studies": _studies,
    }.get(what, lambda: _runs(runs))()


def _architectures() -> tuple[pd.DataFrame, list[str]]:
    from workbench.models import ARCHITECTURES

    rows = [
        {"architecture": name, "options": ", ".join(f"{k}={v}" for k, v in a.options.items()), "summary": a.summary}
        for name, a in ARCHITECTURES.items()
    ]
    return pd.DataFrame(rows), ["a+b composes two of them where they do not define the same thing"]


def _metrics() -> tuple[pd.DataFrame, list[str]]:
    from workbench.metrics import METRICS

    rows = [
        {
            "metric": m.name,
            "form": m.form,
            "unit": m.unit,
            "reading": m.reading,
            "sites": ", ".join(m.sites),
            "summary": m.summary,
        }
        for m in METRICS.values()
    ]
    return pd.DataFrame(rows), []


def _interventions() -> tuple[pd.DataFrame, list[str]]:
    from workbench.interventions import INTERVENTIONS

    rows = [
        {"intervention": i.name, "unit": i.unit, "reading": i.reading, "summary": i.summary}
        for i in INTERVENTIONS.values()
    ]
    return pd.DataFrame(rows), []


def _presets() -> tuple[pd.DataFrame, list[str]]:
    from workbench.config import PRESETS

    rows = []
    for name, preset in PRESETS.items():
        m, t = preset.model, preset.train
        body = m.n_layers * (2 * m.d_model**2 + 2 * m.d_model * m.d_key_value + 3 * m.d_model * m.d_mlp)
        parameters = 2 * m.d_vocab * m.d_model + body + (2 * m.n_layers + 1) * m.d_model
        kept = {k: v for k, v in asdict(m).items() if k in ("n_layers", "d_model", "n_heads", "d_mlp", "d_vocab")}
        rows.append(
            {
                "preset": name,
                "parameters": parameters,
                **kept,
                "steps": t.steps,
                "tokens_per_step": t.batch * t.T,
                "lr": t.lr,
            }
        )
    return pd.DataFrame(rows), []


def _claims() -> tuple[pd.DataFrame, list[str]]:
    from workbench.claims import CLAIMS, QUESTIONS

    rows = [
        {"question": question, "claim": c.name, "text": c.text, "checkable at": c.scale}
        for question in QUESTIONS
        for c in CLAIMS.values()
        if c.question == question
    ]
    return pd.DataFrame(rows), ["`workbench analyze RUN... --question NAME` says what runs decide of them"]


def _studies() -> tuple[pd.DataFrame, list[str]]:
    from workbench.studies.study_file import read_study

    rows = []
    for name, path in studies().items():
        study = read_study(path)
        ships = any((SHIPPED / place / name).is_dir() for place in ("evidence", "."))
        rows.append({
            "study": name, "question": study.question, "runs": len(study.cells) * len(study.seeds), "preset": study.preset,
            "outcome": study.outcome, "shipped": "yes" if ships else "",
        })  # fmt: skip
    return pd.DataFrame(rows), ["`workbench study NAME` trains one; `--quick` sees in seconds that it works"]


def _runs(folder: Path) -> tuple[pd.DataFrame, list[str]]:
    from workbench.runs.run import is_locked, list_runs

    runs, problems = list_runs(folder)
    columns = ["run", "architecture", "seed", "steps", "state"]
    rows = []
    for run in runs:
        state = "finished" if run.finished else "training" if is_locked(run.path) else "stopped"
        rows.append(
            {"run": run.name, "architecture": run.architecture, "seed": run.seed, "steps": run.progress, "state": state}
        )
    notes = [f"{name}: {problem}" for name, problem in problems.items()]
    if not rows:
        notes.insert(0, f"no runs under {folder}; make some with `workbench demo` or `workbench train`")
        ships = ", ".join(run.name for run in list_runs(SHIPPED / "models")[0])
        notes.insert(
            1, f"what ships opens by its name: {ships}; for `analyze` the studies too, and evidence for all of them"
        )
    return pd.DataFrame(rows, columns=columns), notes
