"""Two processes of one launch as `torchrun` starts them, from one import of torch: `python two.py SCRIPT ARGUMENTS`."""

import os
import runpy
import socket
import sys

import accelerate  # noqa: F401  what the two would import for seconds each

import workbench.measurement.measuring
import workbench.training.loop  # noqa: F401


def main(script, *arguments):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        launch = {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
        }
    started = []
    for rank in ("0", "1"):
        started.append(os.fork())
        if not started[-1]:
            os.environ |= launch | {"RANK": rank, "LOCAL_RANK": rank}
            sys.argv = [script, *arguments]
            runpy.run_path(script, run_name="__main__")
            return 0
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid in started)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
