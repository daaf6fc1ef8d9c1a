"""Run the notebooks and store their outputs: python docs/notebooks.py [--check NAME].

Cells run in order in one namespace, as in a kernel, and the last value of a cell is shown. No Jupyter is needed. A browser draws figures as
SVG. `--check` runs one notebook in the current folder and prints its outputs as JSON, without drawing figures.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
FOLDER = Path(__file__).parents[1] / "analyses" / "notebooks"
SVG = "image/svg+xml"
WIDTH = 860  # pixels of a figure, which a page of nbconvert does not cut


def executed(notebook: dict[str, Any], draw: bool) -> list[list[dict[str, Any]]]:
    """Return the outputs of each code cell."""
    names: dict[str, Any] = {"__name__": "__main__"}
    sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [_outputs(source, number, names, draw) for number, source in enumerate(sources, 1)]


def _outputs(source: str, number: int, names: dict[str, Any], draw: bool) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), names)
        shown = None if last is None else eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
    if shown is not None:
        here = f"{Path.cwd()}/"
        data = {kind: text.replace(here, "").splitlines(keepends=True) for kind, text in _shown(shown, draw).items()}
        outputs.append({"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data})
    return outputs


def _shown(thing: Any, draw: bool) -> dict[str, str]:
    import plotly.graph_objects as go

    if isinstance(thing, go.Figure):
        from workbench import plots

        return {SVG: _drawn(thing) if draw else "", "text/plain": plots.alt_text(thing)}
    html = {"text/html": thing._repr_html_()} if hasattr(thing, "_repr_html_") else {}
    return html | {"text/plain": repr(thing)}


def _drawn(figure: Any) -> str:
    from workbench.views.writing import picture

    with tempfile.TemporaryDirectory() as folder:
        text = picture(figure, Path(folder) / "figure.svg").read_text(encoding="utf-8")
    text = re.sub(r"<style>@font-face.*?</style>", "", text, flags=re.DOTALL)  # the font is larger than all outputs
    size = re.search(r' width="(\d+)" height="(\d+)"', text)
    assert size, "the size of the drawing"
    return text.replace(size[0], f' width="{WIDTH}" height="{int(size[2]) * WIDTH // int(size[1])}"', 1)


def keep(path: Path) -> None:
    """Run a notebook in a new folder and write the outputs into the notebook."""
    from workbench.file_io import write_text

    told = json.loads(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        kept = iter(enumerate(executed(told, draw=True), 1))
    for cell in told["cells"]:
        if cell["cell_type"] == "code":
            cell["execution_count"], cell["outputs"] = next(kept)
    write_text(path, json.dumps(told, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    if "--check" in sys.argv:
        name = sys.argv[-1]
        print(json.dumps(executed(json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")), draw=False)))
    elif "--keep" in sys.argv:
        keep(FOLDER / f"{sys.argv[-1]}.ipynb")
    else:
        for notebook in sorted(FOLDER.glob("*.ipynb")):  # each in a process of its own: metrics are registered once
            subprocess.run([sys.executable, __file__, "--keep", notebook.stem], check=True)
