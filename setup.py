"""Where things go in a wheel: `app/`, `analyses/` and `data/` lie beside the library here, and inside it once installed.

All else is in `pyproject.toml`, which cannot look for packages in folders that get another name (docs/decisions/015). The wheel leaves
out `LARGE` studies and all but the last weights of the shipped models; `workbench data` adds them. The description on a package index
is `README.md` with the links of `described`.
"""

import re
import tomllib
from pathlib import Path

from setuptools import find_namespace_packages, setup

INSIDE = {"app": "app", "analyses": "analyses", "data": "shipped"}
LARGE = (
    "induction_settings", "losses", "losses100", "routing", "sinks_long", "sinks_remedies", "sinks_settings", "value_paths"
)  # fmt: skip
HERE = Path(__file__).parent


def early_steps() -> list[str]:
    """Return the patterns of all weights but the last ones of each shipped model."""
    runs = (sorted(run.glob("step_*")) for run in (HERE / "data" / "models").glob("*/"))
    return [f"{step.relative_to(HERE / 'data').as_posix()}/*" for steps in runs for step in steps[:-1]]


def described(readme: str, urls: dict[str, str]) -> str:
    """Return the README with relative links made absolute, or taken off where no address of the repository is known."""
    if address := urls.get("Repository", "").rstrip("/"):
        readme = re.sub(r"(!\[[^\]]*\])\((?!https?:)([^)]+)\)", rf"\1({address}/raw/main/\2)", readme)
        return re.sub(r"(?<!!)(\[[^\]]+\])\((?!https?:)([^)]+)\)", rf"\1({address}/blob/main/\2)", readme)
    readme = re.sub(
        r"!\[[^\]]*\]\((?!https?:)[^)]+\)\n+\*.*?\*\n\n", "", readme, flags=re.DOTALL
    )  # a figure and its caption
    return re.sub(r"\[([^\]]+)\]\((?!https?:)([^)]+)\)", r"\1 (`\2`)", readme)


setup(
    long_description=described(
        (HERE / "README.md").read_text(encoding="utf-8"),
        tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {}),
    ),
    long_description_content_type="text/markdown",
    package_dir={f"workbench.{name}": folder for folder, name in INSIDE.items()},
    packages=[
        *find_namespace_packages(include=["workbench", "workbench.*"]),
        *(f"workbench.{name}" for name in INSIDE.values()),
        *(f"workbench.{p}" for p in find_namespace_packages(include=["app.*", "analyses.*"])),
    ],
    package_data={
        "workbench": ["py.typed"],
        "workbench.app": ["*.toml", "*.css", "*.js"],
        "workbench.app.elements": ["*.css", "*.js"],
        "workbench.shipped": ["**/*"],
        "workbench.analyses": ["studies/**/*", "notebooks/*.ipynb"],
    },
    exclude_package_data={"workbench.shipped": [*early_steps(), *(f"evidence/{study}/*" for study in LARGE)]},
)
