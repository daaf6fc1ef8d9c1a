"""Tables of everything that has a name: architectures, metrics, interventions, presets, claims, studies, runs."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workbench.errors import UnknownName
from workbench.places import HERE, SHIPPED, plugins, studies

Rows = list[dict[str, Any]]


def listing(kind: str, runs: Path | None = None) -> tuple[Rows, list[str]]:
    """Return the rows of a table and notes about it. Raises `UnknownName` for an unknown kind."""
    if kind not in LISTINGS:
        raise UnknownName("listing", kind, LISTINGS)
    return _runs(runs) if kind == "runs" else LISTINGS[kind]()


def measures() -> list[str]:
    """Return the names of all metrics and interventions without importing PyTorch."""
    return [
        row[kind]
        for kind, folder in (("metric", "metrics"), ("intervention", "interventions"))
        for row in _registered(kind, folder)
    ]


@functools.cache
def _registered(decorator: str, folder: str) -> Rows:
    """Return what `@metric` or `@intervention` registers, read from the source: an import takes seconds."""
    rows = []
    specs = (importlib.util.find_spec(module) for module in plugins(folder))
    for path in [
        *sorted((HERE / folder).rglob("*.py")),
        *(Path(spec.origin) for spec in specs if spec and spec.origin),
    ]:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for node in body:
            for call in getattr(node, "decorator_list", ()):
                if ast.unparse(getattr(call, "func", call)) == decorator:
                    rows.append(_row(decorator, node, {k.arg: k.value for k in call.keywords}))
    return rows


def _row(decorator: str, node: Any, given: dict[str, ast.expr]) -> dict[str, Any]:
    words = {key: ast.literal_eval(given[key]) for key in ("unit", "reading")}
    if decorator == "metric":
        per_sequence = isinstance(node, ast.FunctionDef) and "Float" in ast.unparse(node.returns or node)
        form = "per_sequence" if per_sequence else "accumulated" if isinstance(node, ast.ClassDef) else "derived"
        sites = ast.literal_eval(given["sites"]) if "sites" in given else ()
        words = {"form": form, **words, "sites": ", ".join(sites)}
    own = "".join(f"_{c.lower()}" if c.isupper() else c for c in node.name).lstrip("_")
    name = ast.literal_eval(given["name"]) if "name" in given else own
    return {decorator: name, **words, "summary": (ast.get_docstring(node) or "").split("\n", 1)[0]}


def _architectures() -> tuple[Rows, list[str]]:
    from workbench.models import ARCHITECTURES

    rows = [
        {"architecture": name, "options": ", ".join(f"{k}={v}" for k, v in a.options.items()), "summary": a.summary}
        for name, a in ARCHITECTURES.items()
    ]
    return rows, ["a+b combines two architectures that do not define the same part"]


def _presets() -> tuple[Rows, list[str]]:
    from workbench.config import PRESETS

    rows = []
    for name, preset in PRESETS.items():
        m, t = preset.model, preset.train
        body = m.n_layers * (2 * m.d_model**2 + 2 * m.d_model * m.d_key_value + 3 * m.d_model * m.d_mlp)
        parameters = 2 * m.d_vocab * m.d_model + body + (2 * m.n_layers + 1) * m.d_model
        sizes = {k: v for k, v in asdict(m).items() if k in ("n_layers", "d_model", "n_heads", "d_mlp", "d_vocab")}
        training = {"steps": t.steps, "tokens_per_step": t.batch * t.T, "lr": t.lr}
        rows.append({"preset": name, "parameters": parameters, **sizes, **training})
    return rows, []


def _claims() -> tuple[Rows, list[str]]:
    from workbench.claims import CLAIMS, QUESTIONS

    rows = [
        {"question": question, "claim": c.name, "text": c.text, "checkable at": c.scale}
        for question in QUESTIONS
        for c in CLAIMS.values()
        if c.question == question
    ]
    return rows, ["`workbench analyze RUN... --question NAME` judges these claims on runs"]


def _studies() -> tuple[Rows, list[str]]:
    from workbench.studies.study_file import read_study

    rows = []
    for name, path in studies().items():
        study = read_study(path)
        ships = any((SHIPPED / place / name).is_dir() for place in ("evidence", "."))
        rows.append({
            "study": name, "question": study.question, "runs": len(study.cells) * len(study.seeds), "preset": study.preset,
            "outcome": study.outcome, "shipped": "yes" if ships else "",
        })  # fmt: skip
    return rows, ["`workbench study NAME` trains a study; `--quick` tries it in seconds"]


def _runs(runs: Path | None) -> tuple[Rows, list[str]]:
    from workbench.runs.run import is_locked, list_runs, runs_folder

    folder = runs_folder(runs)
    readable, problems = list_runs(folder)
    rows = []
    for run in readable:
        state = "finished" if run.finished else "training" if is_locked(run.path) else "stopped"
        rows.append(
            {"run": run.name, "architecture": run.architecture, "seed": run.seed, "steps": run.progress, "state": state}
        )
    notes = [f"{name}: {problem}" for name, problem in problems.items()]
    if not rows:
        models = ", ".join(run.name for run in list_runs(SHIPPED / "models")[0])
        notes[:0] = [
            f"no runs under {folder}; make some with `workbench demo` or `workbench train`",
            f"shipped models open by name: {models}; `analyze` also takes names of shipped studies, and `evidence` for all",
        ]
    return rows, notes


LISTINGS: dict[str, Callable[[], tuple[Rows, list[str]]]] = {
    "architectures": _architectures, "metrics": lambda: (_registered("metric", "metrics"), []),
    "interventions": lambda: (_registered("intervention", "interventions"), []), "presets": _presets,
    "claims": _claims, "studies": _studies, "runs": lambda: _runs(None),
}  # fmt: skip
