"""The commands of `seamless-verl`, each with its line in the help; a command's module has its name.

A module is imported when its command is run: a runner's machine has few packages.
"""

from __future__ import annotations

COMMANDS = {
    "check": "what a run with these KEY=VALUE would refuse: `python -m seamless_verl.check`",
    "doctor": "what is wrong with this machine and this environment before any run, and how to mend it",
    "plan": "where everything of a run would be, and what it would need, without starting anything",
    "calibrate": "fit the simulator's constants to a run, for `plan --optimize`",
    "compare": "verl's trainers and ours on one job, interleaved, with a report",
    "trajectories": "list, show and export the sessions in a run's journal",
    "view": "show a run on a page: devices over time, metrics, sessions with every token",
    "runner": "run agents on tasks of a run that uses RunnerAgentLoop",
}
