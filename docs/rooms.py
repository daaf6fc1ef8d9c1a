"""Draw docs/architecture.svg and the table of packages in docs/architecture.md from the imports.

Rows are the layers of the import contracts (pyproject.toml). An arrow points to an imported package, unless a longer path of
imports leads there.
"""

from __future__ import annotations

import ast
import re
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "docs" / "architecture.md", ROOT / "docs" / "architecture.svg"
BEGIN, END = "<!-- rooms: generated -->", "<!-- rooms: end -->"
WIDTH, ROW, BOX, GAP = 1000, 84, 40, 24
SHARED = "config, names, files, ..."


def layers() -> list[list[str]]:
    """Return packages by layer from the top. The shared modules count as one package."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = [[name.strip() for name in re.split(r"[|:]", row)] for row in contracts[0]["layers"]]
    folders = [[name for name in row if (folder(name) / "__init__.py").exists()] for row in rows]
    folders[-1].append(SHARED)
    return folders


def folder(room: str) -> Path:
    """Return the folder of a package."""
    return ROOT / room.replace(".", "/")


def files(room: str) -> list[Path]:
    """Return the Python files of a package."""
    if room == SHARED:
        return sorted((ROOT / "workbench").glob("*.py"))
    return sorted(folder(room).rglob("*.py"))


def room_of(module: str, rooms: list[str]) -> str | None:
    """Return the package of a module."""
    found = next((room for room in rooms if module == room or module.startswith(f"{room}.")), None)
    return found or (SHARED if module.startswith("workbench.") else None)


def arrows(rooms: list[str]) -> dict[str, set[str]]:
    """Return the packages that each package imports, late imports included."""
    found: dict[str, set[str]] = {room: set() for room in rooms}
    for room in rooms:
        for path in files(room):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = (
                        [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "workbench" else []
                    )
                    found[room] |= {r for name in names or [node.module] if (r := room_of(name, rooms))}
                elif isinstance(node, ast.Import):
                    found[room] |= {r for alias in node.names if (r := room_of(alias.name, rooms))}
        found[room].discard(room)
    found[SHARED] = set()  # the package's face names its functions' homes and imports none
    return found


def shortest(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Return the imports that no longer path replaces."""

    def reached(start: str, seen: set[str]) -> set[str]:
        for room in graph[start] - seen:
            seen.add(room)
            reached(room, seen)
        return seen

    return [
        (room, other)
        for room in graph
        for other in sorted(graph[room])
        if not any(other in reached(between, set()) for between in graph[room] - {other})
    ]


def picture(rows: list[list[str]]) -> str:
    """Return the packages by layer with their arrows as SVG."""
    rooms = [room for row in rows for room in row]
    places: dict[str, tuple[float, float, float]] = {}
    for height, row in enumerate(rows):
        wide = min(200.0, (WIDTH - GAP * (len(row) + 1)) / len(row))
        left = (WIDTH - len(row) * wide - (len(row) - 1) * GAP) / 2
        for index, room in enumerate(row):
            places[room] = left + index * (wide + GAP), 12 + height * ROW, wide
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {len(rows) * ROW - 20}" '
        'font-family="system-ui, sans-serif" role="img" aria-label="Packages by layer; arrows point to what is imported">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#8a94a6"/></marker></defs>',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for upper, lower in shortest(arrows(rooms)):
        x1, y1, w1 = places[upper]
        x2, y2, w2 = places[lower]
        x1, y1, x2, y2 = x1 + w1 / 2, y1 + BOX, x2 + w2 / 2, y2 - 2
        bend = (y2 - y1) / 2
        parts.append(
            f'<path d="M{x1:.0f} {y1} C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2}" fill="none" '
            'stroke="#8a94a6" stroke-width="1.4" marker-end="url(#tip)"/>'
        )
    for room, (x, y, wide) in places.items():
        name = room.removeprefix("workbench.")
        parts.append(
            f'<rect x="{x:.0f}" y="{y}" width="{wide:.0f}" height="{BOX}" rx="7" fill="#eef3fb" stroke="#4a6fa5"/>'
            f'<text x="{x + wide / 2:.0f}" y="{y + BOX / 2 + 5:.0f}" text-anchor="middle" font-size="16" fill="#16233a">'
            f"{escape(name)}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def table(rows: list[list[str]]) -> str:
    """Return one line per package: its folder, and the first sentence of its docstring."""
    lines = ["| package | content |", "|---|---|"]
    for room in (room for row in rows for room in row if room != SHARED):
        text = ast.get_docstring(ast.parse((folder(room) / "__init__.py").read_text(encoding="utf-8"))) or ""
        sentence = " ".join(text.split("\n\n")[0].split())
        lines.append(f"| `{room.replace('.', '/')}/` | {sentence} |")
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    """Return each generated file with its text."""
    rows, text = layers(), PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return {PICTURE: picture(rows), PAGE: f"{before}{BEGIN}\n{table(rows)}\n{END}{after}"}
