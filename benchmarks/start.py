"""How long the first word takes: `import workbench` and `workbench --help`, neither of which may load torch.

    python benchmarks/start.py [--slack 1.5]

Fresh processes, wall time beside a bare `python -c pass` of the same interpreter; medians. Exits with 1 where a limit is
broken.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

ROUNDS = 9
IMPORT_LIMIT, HELP_LIMIT = 0.050, 0.300  # seconds; the import beside the bare interpreter, the help as a whole
HEAVY = ("torch", "transformer_lens", "transformers", "pandas", "streamlit")
IMPORT = "import workbench"
HELP = """
import runpy, sys
sys.argv = ["workbench", "--help"]
try:
    runpy.run_module('workbench', run_name="__main__")
except SystemExit as stop:
    assert not stop.code, stop.code
"""
LOADED = f"\nimport sys; print('loaded:', *[name for name in {HEAVY} if name in sys.modules])"


def run(*command: str) -> str:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True).stdout


def seconds(*command: str) -> float:
    start = time.perf_counter()
    run(*command)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slack", type=float, default=1.0, help="factor on the limits, for a noisy machine")
    slack = parser.parse_args().slack

    commands = {
        "python -c pass": ("-c", "pass"),
        "import workbench": ("-c", IMPORT),
        "workbench --help": ("-m", "workbench", "--help"),
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(ROUNDS + 1):  # the first round warms the file cache
        for name, command in commands.items():
            times[name].append(seconds(*command))
    median = {name: statistics.median(found[1:]) for name, found in times.items()}
    beside = statistics.median(
        a - b for a, b in zip(times["import workbench"][1:], times["python -c pass"][1:], strict=True)
    )

    broken = []
    for name, value in median.items():
        print(f"{name:<20} {1e3 * value:7.0f} ms")
    print(f"{'import, beside bare':<20} {1e3 * beside:7.0f} ms   limit {1e3 * IMPORT_LIMIT:.0f}")
    if beside > IMPORT_LIMIT * slack:
        broken.append(f"import workbench takes {1e3 * beside:.0f} ms")
    if median["workbench --help"] > HELP_LIMIT * slack:
        broken.append(f"workbench --help takes {1e3 * median['workbench --help']:.0f} ms, limit {1e3 * HELP_LIMIT:.0f}")
    for name, code in (("import workbench", IMPORT), ("workbench --help", HELP)):
        loaded = run("-c", code + LOADED).rsplit("loaded:", 1)[-1].split()
        print(f"{name:<20} loads {', '.join(loaded) or 'nothing heavy'}")
        broken += [f"{name} loads {module}" for module in loaded]
    print("\n" + ("\n".join(broken) or "all limits hold"))
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
