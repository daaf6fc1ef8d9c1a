"""What a type checker sees of the public interface: right uses pass, wrong names, arguments and results are rejected."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import workbench
from workbench import prompts

FILES = Path(__file__).parent / "typing"


@pytest.mark.slow
def test_a_type_checker_accepts_right_uses_and_rejects_each_wrong_one():
    command = [sys.executable, "-m", "mypy", *sorted(FILES.iterdir())]  # with the cache of `make types`
    told = subprocess.run(command, cwd=FILES.parents[1], capture_output=True, text=True, check=False).stdout
    errors = set(re.findall(r"(\w+\.py):(\d+): error", told))
    lines = (FILES / "wrong.py").read_text().splitlines()
    wrong = {("wrong.py", str(n)) for n, line in enumerate(lines, 1) if "workbench." in line}
    assert errors == wrong, told


def test_every_public_name_is_listed_and_found():
    assert set(workbench.__all__) == {*workbench._HOMES, "metrics", "plots", "prompts", "sklearn"}
    assert set(prompts.__all__) == set(prompts._HOMES)
    assert workbench.prompts is prompts
    with pytest.raises(AttributeError, match="mesure"):
        workbench.mesure  # noqa: B018
