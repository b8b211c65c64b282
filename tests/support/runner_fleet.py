"""Many runner processes at little cost: one process imports what a runner needs, and forks them.

    runner_fleet.py COUNT [arguments of seamless-verl runner]

It prints the process id of each, one a line, and ends when they have ended.
"""

from __future__ import annotations

import os
import sys

from seamless_verl.cli.main import main


def fork_runners(count: int, arguments: list[str]) -> list[int]:
    pids = []
    for number in range(count):
        if (pid := os.fork()) == 0:
            os._exit(main(["runner", *arguments, "--name", f"runner-{number}"]))
        pids.append(pid)
    return pids


if __name__ == "__main__":
    for runner in (runners := fork_runners(int(sys.argv[1]), sys.argv[2:])):
        sys.stdout.write(f"{runner}\n")
    sys.stdout.flush()
    for runner in runners:
        os.waitpid(runner, 0)
