"""The commands of `seamless-verl`: what each is, in a line, and its module.

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
TOOLS = "seamless_verl.tools"
MODULES = {name: f"seamless_verl.cli.{name}" for name in COMMANDS} | {
    "calibrate": f"{TOOLS}.simulator.calibrate_command",
    "compare": f"{TOOLS}.compare.command",
    "doctor": f"{TOOLS}.doctor.command",
    "view": f"{TOOLS}.view.command",
}
OPTIMIZE = f"{TOOLS}.simulator.optimize_command"
"""What `plan --optimize` runs."""
