"""Tables of everything that has a name: architectures, metrics, interventions, presets, claims, studies, runs."""

from __future__ import annotations

import ast
import functools
import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from workbench.errors import refuse_unknown
from workbench.places import HERE, SHIPPED, plugins, studies

Rows = list[dict[str, Any]]
LISTINGS = ("architectures", "metrics", "interventions", "presets", "claims", "studies", "runs")


def listing(kind: str, runs: Path | None = None) -> tuple[Rows, list[str]]:
    """Return the rows of a table and notes about it. Raises `UnknownName` for an unknown kind."""
    rows, notes = list[dict[str, Any]](), list[str]()
    refuse_unknown("listing", kind, LISTINGS)
    if kind in ("metrics", "interventions"):
        return _registered(kind.removesuffix("s"), kind), []
    if kind == "architectures":
        from workbench.models import ARCHITECTURES

        for name, a in ARCHITECTURES.items():
            options = ", ".join(f"{k}={v}" for k, v in a.options.items())
            rows.append({"architecture": name, "options": options, "summary": a.summary})
        notes.append("a+b combines two architectures that do not define the same part")
    elif kind == "presets":
        from workbench.config import PRESETS

        for name, preset in PRESETS.items():
            m, t = preset.model, preset.train
            body = m.n_layers * (2 * m.d_model**2 + 2 * m.d_model * m.d_key_value + 3 * m.d_model * m.d_mlp)
            parameters = 2 * m.d_vocab * m.d_model + body + (2 * m.n_layers + 1) * m.d_model
            sizes = {k: v for k, v in asdict(m).items() if k in ("n_layers", "d_model", "n_heads", "d_mlp", "d_vocab")}
            training = {"steps": t.steps, "tokens_per_step": t.batch * t.T, "lr": t.lr}
            rows.append({"preset": name, "parameters": parameters, **sizes, **training})
    elif kind == "claims":
        from workbench.claims.judging import chosen

        rows = [{"question": c.question, "claim": c.name, "text": c.text, "checkable at": c.scale} for c in chosen()]
        notes.append("`workbench analyze RUN... --question NAME` judges these claims on runs")
    elif kind == "studies":
        from workbench.studies.study_file import read_study

        for name, path in studies().items():
            study = read_study(path)
            ships = any((SHIPPED / place / name).is_dir() for place in ("evidence", "."))
            rows.append({
                "study": name, "question": study.question, "runs": len(study.cells) * len(study.seeds), "preset": study.preset,
                "outcome": study.outcome, "shipped": "yes" if ships else "",
            })  # fmt: skip
        notes.append("`workbench study NAME` trains a study; `--quick` tries it in seconds")
    else:
        from workbench.runs.run import is_locked, list_runs, runs_folder

        folder = runs_folder(runs)
        readable, problems = list_runs(folder)
        for run in readable:
            state = "finished" if run.finished else "training" if is_locked(run.path) else "stopped"
            facts = {"run": run.name, "architecture": run.architecture, "seed": run.seed, "steps": run.progress}
            rows.append(facts | {"state": state})
        if not rows:
            models = ", ".join(run.name for run in list_runs(SHIPPED / "models")[0])
            notes += [
                f"no runs under {folder}; make some with `workbench demo` or `workbench train`",
                f"shipped models open by name: {models}; `analyze` also takes names of shipped studies, and `evidence` for all",
            ]
        notes += [f"{name}: {problem}" for name, problem in problems.items()]
    return rows, notes


def runs_by(by: list[str], runs: Path | None = None) -> tuple[Rows, list[str]]:
    """Return a row for each group of runs, as the dashboard's table of runs groups them, and notes about runs left out."""
    from workbench.runs.run import runs_folder
    from workbench.views.source import Source
    from workbench.views.start_runs import grouped_runs, runs_table

    source = Source(runs_folder(runs))
    rows = grouped_runs(runs_table(source), by).to_dict("records")
    return cast(Rows, rows), [f"{run}: {problem}" for run, problem in source.problems.items()]


def measures() -> list[str]:
    """Return the names of all metrics and interventions without importing PyTorch."""
    return [row[kind] for kind in ("metric", "intervention") for row in _registered(kind, f"{kind}s")]


@functools.cache
def _registered(decorator: str, folder: str) -> Rows:
    """Return what `@metric` or `@intervention` registers, read from the source: an import takes seconds."""
    rows = []
    specs = (importlib.util.find_spec(module) for module in plugins(folder))
    others = [Path(spec.origin) for spec in specs if spec and spec.origin]
    for path in [*sorted((HERE / folder).rglob("*.py")), *others]:
        nodes: Any = ast.parse(path.read_text(encoding="utf-8")).body
        for node in nodes:
            for call in getattr(node, "decorator_list", ()):
                if ast.unparse(getattr(call, "func", call)) != decorator:
                    continue
                given = {k.arg: k.value for k in call.keywords}
                words = {key: ast.literal_eval(given[key]) for key in ("unit", "reading")}
                if decorator == "metric":
                    per_sequence = isinstance(node, ast.FunctionDef) and "Float" in ast.unparse(node.returns or node)
                    form = "accumulated" if isinstance(node, ast.ClassDef) else "derived"
                    form = "per_sequence" if per_sequence else form
                    sites = ast.literal_eval(given["sites"]) if "sites" in given else ()
                    words = {"form": form, **words, "sites": ", ".join(sites)}
                own = "".join(f"_{c.lower()}" if c.isupper() else c for c in node.name).lstrip("_")
                name = ast.literal_eval(given["name"]) if "name" in given else own
                summary = (ast.get_docstring(node) or "").split("\n", 1)[0]
                rows.append({decorator: name, **words, "summary": summary})
    return rows
