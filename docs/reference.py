"""The reference pages: every public name of the library and every command, from signatures and docstrings."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path

import typer

import workbench
from workbench import prompts
from workbench.cli import app

ESTIMATORS = (
    "as_matrix", "as_matrices", "StreamedPCA", "SoftmaxProbe", "StreamedProbe", "TokenMap", "token_map", "aligned", "separation",
    "neighbourhood_purity", "head_features", "group_heads", "HeadGroups",
)  # fmt: skip
"""Names of `workbench.sklearn`, which takes a second to import."""

ROOT = Path(__file__).parents[1]
Defined = ast.FunctionDef | ast.ClassDef
GROUPS = {
    "Models": ("load", "build", "observe", "equal", "series", "read_state"),
    "Measuring and editing": ("measure", "diff", "plot", "xray", "decompose", "edited"),
    "Training": ("train", "Recorder", "RecorderCallback", "Run", "ModelConfig", "TrainConfig"),
    "Errors": ("WorkbenchError", "ArchitectureAssumed"),
}
REGISTRIES = {
    "ARCHITECTURES": "[Architectures](models.md)", "METRICS": "[Metrics](metrics.md)",
    "INTERVENTIONS": "[Interventions](metrics.md#interventions)", "PRESETS": "`workbench list presets`",
}  # fmt: skip
FURTHER = {
    "Functions of one prompt": ("workbench.prompts", [name for name in prompts._HOMES if name.islower()]),
    "Activations in scikit-learn": ("workbench.sklearn", list(ESTIMATORS)),
    "Differences": (
        "workbench.reports.diff_of_checkpoints",
        ["Differences", "MatrixChange", "matrix_change", "weight_changes"],
    ),
    "Interventions": ("workbench.interventions", ["replaced", "Edit", "token_means", "intervention"]),
    "Models": ("workbench.models.hooked", ["HookedModel"]),
}


PYTHON = """After this page you can look up every public function and class.

    import workbench

    model = workbench.load("models-resformer-s0")
    frame = workbench.measure("models-resformer-s0", "sink_mass", n=16)

`import workbench` imports nothing heavy. Each name imports its dependencies at its first use.
"""
ARGUMENTS = r"(?m)^Args:\n((?:    .+\n?)+)"


def python_page() -> str:
    """Return the page of all names in `workbench` and of further modules."""
    parts = ["# Python\n\n" + PYTHON]
    for group, names in GROUPS.items():
        parts.append(f"\n## {group}\n")
        for name in names:
            parts.append(_entry(*_found(name, workbench._HOMES[name]), f"workbench.{name}"))
    parts.append("\n## Registries\n\n| name | content |\n|---|---|\n")
    parts += [f"| `workbench.{name}` | {where} |\n" for name, where in REGISTRIES.items()]
    for title, (module, names) in FURTHER.items():
        parts.append(f"\n## {title}\n")
        for name in names:
            parts.append(_entry(*_found(name, module), f"{module.removeprefix('workbench.')}.{name}"))
    return "".join(parts)


def commands_page() -> str:
    """Return the page of all commands with their arguments and options."""
    parts = [
        "# Commands\n\nAfter this page you can run every command with its options.\n\n"
        "    workbench xray models-resformer-s0\n    workbench list metrics | head\n\n"
        "`workbench COMMAND --help` prints the same, and `workbench --install-completion` completes names and options. In a pipe, "
        "tables are TSV. Errors have exit code 2, unexpected errors 1, and Ctrl-C 130; `--debug` prints the traceback.\n"
    ]
    for name, command in typer.main.get_command(app).commands.items():
        parts.append(f"\n## workbench {name}\n\n{inspect.cleandoc(command.help or '')}\n")
        parts.append("\n| argument or option | meaning | default |\n|---|---|---|\n")
        for given in (p for p in command.params if p.name != "help"):
            flags = (
                [*given.opts, *given.secondary_opts] if given.param_type_name == "option" else [str(given.name).upper()]
            )
            text = (getattr(given, "help", None) or "").replace("<", "&lt;")
            default = "" if given.default in (None, False) or callable(given.default) else f"`{given.default}`"
            parts.append(f"| {', '.join(f'`{f}`' for f in flags)} | {text} | {default} |\n")
    return "".join(parts)


def _tree(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _found(name: str, module: str) -> tuple[Defined, str]:
    """Return the definition of a name and its module, through packages that import it."""
    for node in ast.walk(_tree(module)):
        if isinstance(node, Defined) and node.name == name:
            return node, module
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and name in {alias.asname or alias.name for alias in node.names}
        ):
            return _found(name, node.module)
    raise LookupError(f"{module} neither defines {name} nor imports it")


def _entry(node: Defined, module: str, title: str) -> str:
    text = re.sub(ARGUMENTS, _listed, ast.get_docstring(node) or "")
    written = textwrap.fill(_signature(node), 100, subsequent_indent="    ", break_long_words=False)
    head = f"\n### {title}\n\n```text\n{written}\n```\n\n{text}\n\nDefined in `{module}`.\n"
    if isinstance(node, ast.FunctionDef):
        return head
    rows = [
        f"- `{_signature(part)}`: {' '.join((ast.get_docstring(part) or '').split(chr(10) * 2)[0].split())}\n"
        for part in node.body
        if isinstance(part, ast.FunctionDef) and not part.name.startswith("_") and ast.get_docstring(part)
    ]
    return head + ("\n" + "".join(rows) if rows else "")


def _listed(found: re.Match[str]) -> str:
    """Return the arguments of a docstring as a list."""
    lines = re.sub(r"^    (\w+): ", r"- `\1`: ", found[1], flags=re.MULTILINE)
    return re.sub(r"\n {5,}", "\n  ", lines)


def _signature(node: Defined) -> str:
    if isinstance(node, ast.FunctionDef):
        shown = ", ".join(part for part in ast.unparse(node.args).split(", ") if part not in ("self", "cls"))
        if any(getattr(d, "id", "") in ("property", "cached_property") for d in node.decorator_list):
            return f"{node.name}: {ast.unparse(node.returns)}" if node.returns else node.name
        return f"{node.name}({shown}){f' -> {ast.unparse(node.returns)}' if node.returns else ''}"
    made = next((part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)
    if made is not None:
        return f"{node.name}{_signature(made).removeprefix('__init__').removesuffix(' -> None')}"
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
    return f"{node.name}({', '.join(ast.unparse(part) for part in fields)})" if fields else node.name
