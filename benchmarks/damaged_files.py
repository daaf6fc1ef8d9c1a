"""Thousands of damaged files of every kind that people hand in: each is read, or refused by name, at once and in little memory.

    nice -n 19 python benchmarks/damaged_files.py --each 500 [--seed 0] [--only text --only records]

Every form of `tests/damage.py` has a process of its own, with 2 GiB of address space beyond what its libraries take and
`--seconds` of processor time for each file (one that waits without computing is given up too). The table counts files that are
read all the same, refused, and those that end in another error, wait, want more memory or ask the network: these are kept under
`--out`, with the outcome of every file, from which the same command goes on. Linux: processes are forked.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from damage import FORMS

from workbench.checkpoints import transformers_modules
from workbench.errors import WorkbenchError
from workbench.models import build

MEMORY = 2 << 30  # bytes beyond the libraries
PATIENCE = 20  # a busy machine gives a process so many times less than it asks for
TINY = {"n_layers": 3, "d_model": 32, "n_heads": 4, "d_mlp": 48, "d_vocab": 61, "n_ctx": 128, "init_std": 0.2}
KINDS = ("read", "refused", "another error", "waited", "above 2 GiB", "asked the network", "died")
ASKING = ("socket.connect", "socket.getaddrinfo", "socket.sendto", "socket.gethostbyname")
WANTED_MORE = ("MemoryError", "allocate", "bad_alloc", "out of memory", "Cannot allocate")


asked_for = list[str]()
"""What a file made its reader ask the network for."""


def refuse_the_network(event: str, arguments: tuple[object, ...]) -> None:
    if event in ASKING:
        asked_for.append(f"{event} {arguments[1:]}")
        raise ConnectionRefusedError("a file may not ask the network")


class Waited(BaseException):
    """A file took longer than it may; no `except Exception` hears it."""


def tiny(architecture="transformer", **options):
    return build(architecture, TINY, seed=0, **options)


def outcome(act, file: Path, data: bytes, seconds: float) -> tuple[str, str]:
    """What one damaged file comes to: read, refused, or a fault with its traceback."""
    file.write_bytes(data)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE * seconds)
    try:
        act()
        return "read", ""
    except WorkbenchError as error:
        told = str(error)
        return ("above 2 GiB", told) if any(word in told for word in WANTED_MORE) else ("refused", told)
    except Waited:
        return "waited", traceback.format_exc()
    except BaseException as error:
        more = isinstance(error, MemoryError) or any(word in str(error) for word in WANTED_MORE)
        return "above 2 GiB" if more else "another error", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def hear(*_: object) -> None:
    raise Waited


def form_in_child(name: str, asked: argparse.Namespace, begin: int, outcomes: Path) -> None:
    """Damage a form again and again from a number on; each outcome is a line of a file, written once it is known."""
    signal.signal(signal.SIGALRM, hear)
    signal.signal(signal.SIGPROF, hear)
    faulthandler.enable()
    warnings.simplefilter("ignore")
    seen = SimpleNamespace(source={}, config=SimpleNamespace(d_vocab=61))
    transformers_modules.observe = lambda module, ids, **_: seen  # type: ignore[assignment]  # what is observed is sound
    make, damage = FORMS[name]
    with tempfile.TemporaryDirectory() as folder, outcomes.open("a", buffering=1) as told:
        file, act = make(tiny, Path(folder))
        good = file.read_bytes()
        sys.addaudithook(refuse_the_network)
        with contextlib.suppress(WorkbenchError):  # what is sound need not be a model of ours
            act()
        size = int(
            next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line).split()[1]
        )
        resource.setrlimit(resource.RLIMIT_AS, (size * 1024 + MEMORY,) * 2)
        for number in range(begin, asked.each):
            data = damage(good, random.Random(f"{asked.seed} {name} {number}"))
            asked_for.clear()
            kind, why = outcome(act, file, data, asked.seconds)
            if asked_for:
                kind, why = "asked the network", f"{asked_for}\n{why}"
            if kind not in KINDS[:2]:
                kept = f"{name.replace(' ', '_')}-{asked.seed}-{number}"
                (asked.out / f"{kept}.bytes").write_bytes(data)
                (asked.out / f"{kept}.txt").write_text(f"{kind}\n{why}")
            told.write(f"{kind}\n")


def form(name: str, asked: argparse.Namespace) -> Counter[str]:
    """Outcomes of one form, those of an earlier call too; a process that dies counts with the file it was at, and another goes on."""
    outcomes = asked.out / f"{name.replace(' ', '_')}-{asked.seed}.outcomes"
    outcomes.touch()
    while (begin := len(known := outcomes.read_text().splitlines())) < asked.each:
        if not (child := os.fork()):
            try:
                form_in_child(name, asked, begin, outcomes)
            except BaseException:  # before the first damaged file
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            outcomes.open("a").write("died\n")
    return Counter(known[: asked.each])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=500, help="files of each form (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=10, help="of processor time for one file (%(default)s)")
    parser.add_argument("--only", action="append", choices=FORMS)
    parser.add_argument("--out", type=Path, default=Path("damaged"))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(WorkbenchError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        FORMS["modded-nanogpt"][0](tiny, Path(folder))[
            1
        ]()  # what its libraries import late is there before processes are forked
    whole = Counter[str]()
    print(f"| form | {' | '.join(KINDS)} | s |\n|{'---|' * (len(KINDS) + 2)}")
    for name in asked.only or FORMS:
        begin = time.perf_counter()
        counts = form(name, asked)
        whole += counts
        row = " | ".join(str(counts[kind]) for kind in KINDS)
        print(f"| {name} | {row} | {time.perf_counter() - begin:.0f} |", flush=True)
    print(f"| all {sum(whole.values())} | {' | '.join(str(whole[kind]) for kind in KINDS)} | |")


if __name__ == "__main__":
    main()
