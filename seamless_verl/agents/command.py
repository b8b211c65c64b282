"""Runs an agent that is a command line, in a folder, an environment and processes of its own.

It is no sandbox: the command has this user's rights, and can reach the network and the file system. It gets the
task as JSON on standard input and in `task.json`, the session's address and key in environment variables, and a
HOME and a TMPDIR of its own. It returns its exit code and, optionally, a reward in `reward.json` or posted to the
session. Linux only: /proc and pidfds are used to find and end all its processes.

Invariants: when `run_command` ends, in whatever way, no process of the command runs and its folder is deleted,
unless it was to be kept. If this process is killed, Linux kills the command's first process with it; its other
processes, and the folder, are left to the program that started this process.
"""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from seamless_verl.agents import template
from seamless_verl.agents.callable import in_thread, wait_uncancelled
from seamless_verl.agents.endpoint import Endpoint, environment
from seamless_verl.agents.limits import CommandLimits
from seamless_verl.agents.outcome import ERROR_CHARS, AgentOutcome, AgentStatus
from seamless_verl.agents.processes import Child, end_processes
from seamless_verl.agents.scratch import TASK, Scratch
from seamless_verl.errors import ConfigError

INHERITED = (
    *("PATH", "LD_LIBRARY_PATH", "USER", "LOGNAME", "SHELL", "TERM", "TZ"),
    *("LANG", "LC_ALL", "LC_CTYPE", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
MARK = "SEAMLESS_RUN_MARK"  # by which its processes are found; unlike a session's id it is never used twice
OURS = {*environment(Endpoint("http://host", "key", "id")), MARK, "HOME", "TMPDIR"}
SHELL = "/bin/sh"


@dataclass(frozen=True)
class AgentCommand:
    """A command line and its surroundings; raises ConfigError for mistakes that show before any task.

    command: a string for `/bin/sh`, or a list of arguments; `{field}` stands for the task's value (see template.py).
    folder: copied to become the working directory; None starts in an empty one.
    env: further variables. inherit: names of this process's variables that the command gets too.
    keep, keep_failed: keep the working folder, always or when the run is not FINISHED; the outcome names it.
    """

    command: str | Sequence[str]
    folder: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    inherit: Sequence[str] = INHERITED
    limits: CommandLimits = field(default_factory=CommandLimits)
    keep: bool = False
    keep_failed: bool = False

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("command", self.command, "is empty", "Write a shell string or a list of arguments")
        if self.folder is not None and not self.folder.is_dir():
            raise ConfigError("folder", str(self.folder), "is no folder", "Make it, or leave it out")
        for name in sorted({*self.env, *self.inherit} & OURS):
            raise ConfigError("env", name, "is set for each session", "Leave it out, or set it in the command itself")
        pieces = self._pieces()
        if isinstance(self.command, str):
            template.check_shell(pieces[0], key="command", text=self.command)

    def _pieces(self) -> list[list[template.Piece]]:
        texts = [self.command] if isinstance(self.command, str) else self.command
        return [template.parse(text, key="command") for text in texts]

    def arguments(self, task: Mapping[str, Any]) -> list[str]:
        """The arguments for one task; raises ConfigError for a field that the task does not have."""
        shell = isinstance(self.command, str)
        filled = [template.fill(pieces, task, key="command", shell=shell) for pieces in self._pieces()]
        return [SHELL, "-c", *filled] if shell else filled

    def environment(self, endpoint: Endpoint, scratch: Scratch, mark: str) -> dict[str, str]:
        """All variables of the command: those named in `inherit`, the user's, the scratch folder's, the session's."""
        inherited = {name: os.environ[name] for name in self.inherit if name in os.environ}
        return inherited | dict(self.env) | scratch.environment() | environment(endpoint) | {MARK: mark}


async def run_command(command: AgentCommand, task: Mapping[str, Any], endpoint: Endpoint) -> AgentOutcome:
    """Run the command on the task to a terminal outcome.

    A cancellation of the caller is raised again, after the clean-up.

    Raises:
        ConfigError: a template field that the task does not have. TypeError: a task that is not JSON.
    """
    argv, task_json = command.arguments(task), json.dumps(dict(task))
    scratch = Scratch.make()
    kept = command.keep
    try:
        outcome = await run_in(scratch, command, argv, task_json, endpoint)
        kept = kept or (command.keep_failed and outcome.status != AgentStatus.FINISHED)
    finally:
        if not kept:
            await wait_uncancelled(in_thread(scratch.remove, daemon=False))
    return replace(outcome, kept=str(scratch.work)) if kept else outcome


async def run_in(
    scratch: Scratch, command: AgentCommand, argv: Sequence[str], task: str, endpoint: Endpoint
) -> AgentOutcome:
    mark, limits = uuid.uuid4().hex, command.limits
    env = command.environment(endpoint, scratch, mark)
    try:
        await wait_uncancelled(in_thread(partial(scratch.fill, command.folder, task), daemon=False))
        began = time.monotonic()
        child = Child(argv, cwd=scratch.work, env=env, stdin=scratch.work / TASK, limits=limits)
    except (OSError, ValueError) as error:  # a full disk, arguments too long or with a NUL, no more processes
        return AgentOutcome(AgentStatus.FAILED, error=f"could not be started: {error}"[:ERROR_CHARS])
    survivors, exit_code = [child.pid], None
    try:
        status = await child.end(limits.wall_s)
        duration = time.monotonic() - began
    finally:
        entry = f"{MARK}={mark}".encode()
        try:
            ending = in_thread(partial(end_processes, child.pid, entry, limits.grace_s), daemon=False)
            survivors = await wait_uncancelled(ending)
        finally:
            exit_code = child.close()
    outcome = AgentOutcome(status or AgentStatus.FINISHED, duration, exit_code, child.tail)
    return complete(outcome, child.flooded, survivors, limits, scratch)


def complete(
    outcome: AgentOutcome, flooded: bool, survivors: list[int], limits: CommandLimits, scratch: Scratch
) -> AgentOutcome:
    """The outcome with its reward or its error; `survivors` are processes that did not end though killed."""
    status, code, error = outcome.status, outcome.exit_code, ""
    if status == AgentStatus.TIMED_OUT:
        error = f"its {limits.wall_s:g} s are over"
    elif flooded:
        status, error = AgentStatus.OUTPUT_LIMIT, f"it wrote more than {limits.output_bytes} bytes"
    elif code:
        status = AgentStatus.FAILED
        error = f"exit code {code}" if code > 0 else f"ended by signal {signal_name(-code)}"
    else:
        try:
            reward, info = scratch.reward()
            outcome = replace(outcome, reward=reward, reward_info=info)
        except ValueError as wrong:
            status, error = AgentStatus.FAILED, str(wrong)
    if survivors:
        error = f"{error}; processes {survivors} do not end though killed".removeprefix("; ")
    return replace(outcome, status=status, error=error[:ERROR_CHARS])


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else str(number)
