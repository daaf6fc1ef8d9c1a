"""Where things go in a wheel: `app/`, `analyses/` and `data/` lie beside the library here, and inside it once installed.

All else is in `pyproject.toml`, which cannot look for packages in folders that get another name (docs/decisions/015).
"""

from setuptools import find_namespace_packages, setup

INSIDE = {"app": "app", "analyses": "analyses", "data": "shipped"}

setup(
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
)
