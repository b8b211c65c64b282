"""Runs an agent that is a command line, in a folder, an environment and processes of its own. Linux only.

It is no sandbox: the command has this user's rights. It gets the task as JSON on standard input and in `task.json`, the
session's address and key in environment variables, and returns its exit code and, optionally, a reward in `reward.json`
or posted to the session.

Invariant: when `run_command` ends, in whatever way, no process of the command runs and its folder is deleted, but for
what `keep_failed` has moved away. If this process is killed, Linux kills the command's first process with it.
"""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from seamless_verl.agents import template
from seamless_verl.agents.callable import in_thread, wait_uncancelled
from seamless_verl.agents.endpoint import MODEL_VARIABLES, Endpoint, environment
from seamless_verl.agents.failures import EXIT_CODES
from seamless_verl.agents.limits import CommandLimits
from seamless_verl.agents.outcome import ERROR_CHARS, AgentOutcome, AgentStatus
from seamless_verl.agents.own_time import OwnTime, PausedSeconds
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

    command: a string for `/bin/sh`, or a list of arguments; `{field}` stands for the task's value (see template.py),
        or for one of `question` (the text of the last user message), `prompt_file` (a file with that text) and
        `session` (the session's id), where the task has no field of that name.
    folder: copied to become the working directory; None starts in an empty one. It may have fields, too, so that each
        task has the folder that a column of the data names.
    env: further variables, beside INHERITED of this process's own.
    keep_failed: a folder to which the working folder is moved when the run is not FINISHED; the error names it.
    """

    command: str | Sequence[str]
    folder: Path | str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    limits: CommandLimits = field(default_factory=CommandLimits)
    keep_failed: Path | str | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("command", self.command, "is empty", "Write a shell string or a list of arguments")
        if self.folder is not None and not names_fields(self.folder) and not Path(self.folder).is_dir():
            raise ConfigError("folder", str(self.folder), "is no folder", "Make it, or leave it out")
        if self.keep_failed is not None and Path(self.keep_failed).is_file():
            raise ConfigError("keep_failed", str(self.keep_failed), "is a file", "Name a folder, or leave it out")
        for name in sorted({*self.env} & OURS):
            raise ConfigError("env", name, "is set for each session", "Leave it out, or set it in the command itself")
        pieces = self._pieces()
        if isinstance(self.command, str):
            template.check_shell(pieces[0], key="command", text=self.command)

    def limited(self, wall_s: float) -> AgentCommand:
        """The same with another time limit."""
        return replace(self, limits=replace(self.limits, wall_s=wall_s))

    def _pieces(self) -> list[list[template.Piece]]:
        texts = [self.command] if isinstance(self.command, str) else self.command
        return [template.parse(text, key="command") for text in texts]

    def arguments(self, task: Mapping[str, Any]) -> list[str]:
        """The arguments for one task; raises ConfigError for a field that the task does not have."""
        shell = isinstance(self.command, str)
        filled = [template.fill(pieces, task, key="command", shell=shell) for pieces in self._pieces()]
        return [SHELL, "-c", *filled] if shell else filled

    def folder_of(self, task: Mapping[str, Any]) -> Path | None:
        """The folder that is copied for one task; raises ConfigError for a field that the task does not have."""
        if self.folder is None or not names_fields(self.folder):
            return None if self.folder is None else Path(self.folder)
        pieces = template.parse(str(self.folder), key="folder")
        return Path(template.fill(pieces, task, key="folder", shell=False))

    def environment(self, endpoint: Endpoint, scratch: Scratch, mark: str) -> dict[str, str]:
        """All variables of the command: those that it inherits, the user's, the scratch folder's, the session's."""
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        return (
            inherited | MODEL_VARIABLES | dict(self.env) | scratch.environment() | environment(endpoint) | {MARK: mark}
        )


def names_fields(folder: Path | str) -> bool:
    """Whether the folder differs by task; raises ConfigError for braces that are no fields."""
    return any(name is not None for _, name in template.parse(str(folder), key="folder"))


def question_of(task: Mapping[str, Any]) -> str | None:
    """The text of the task's last user message; None when it has none."""
    messages = task.get("prompt")
    if isinstance(messages, str):
        return messages
    for message in reversed(messages if isinstance(messages, list) else []):
        if isinstance(message, Mapping) and message.get("role") == "user":
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            return "\n".join(str(part["text"]) for part in parts if isinstance(part, Mapping) and part.get("text"))
    return None


async def run_command(
    command: AgentCommand, task: Mapping[str, Any], endpoint: Endpoint, *, paused: PausedSeconds | None = None
) -> AgentOutcome:
    """Runs the command on the task to a terminal outcome; its time limit does not count the seconds of `paused`.

    A cancellation of the caller is raised again, after the clean-up. Raises ConfigError for a template field that the
    task does not have, TypeError for a task that is not JSON.
    """
    task_json, question = json.dumps(dict(task)), question_of(task)
    scratch = Scratch.make()
    try:
        more = {"session": endpoint.session_id}
        if question is not None:
            more |= {"question": question, "prompt_file": str(scratch.prompt_file)}
        arguments = command.arguments(more | dict(task))
        fill = partial(scratch.fill, command.folder_of(task), task_json, question)
        outcome = await run_in(scratch, command, arguments, fill, endpoint, paused)
        if command.keep_failed is not None and outcome.status is not AgentStatus.FINISHED:
            keep = partial(scratch.keep_work, Path(command.keep_failed), endpoint.session_id)
            kept = await wait_uncancelled(in_thread(keep, daemon=False))
            outcome = replace(outcome, error=f"{outcome.error}; {kept}"[-ERROR_CHARS:])
    finally:
        await wait_uncancelled(in_thread(scratch.remove, daemon=False))
    return outcome


async def run_in(
    scratch: Scratch,
    command: AgentCommand,
    arguments: Sequence[str],
    fill: Callable[[], None],
    endpoint: Endpoint,
    paused: PausedSeconds | None,
) -> AgentOutcome:
    """Runs the command in its folder, after `fill` has filled that; it is left for the caller to remove."""
    mark, limits = uuid.uuid4().hex, command.limits
    env = command.environment(endpoint, scratch, mark)
    began, own_time = time.monotonic(), OwnTime(paused)  # with the copying: the session is open, and would end first
    try:
        await wait_uncancelled(in_thread(fill, daemon=False))
        child = Child(arguments, cwd=scratch.work, env=env, stdin=scratch.work / TASK, limits=limits)
    except (OSError, ValueError) as error:  # a full disk, no such folder, arguments too long or with a NUL
        return AgentOutcome(AgentStatus.TOOL_FAILED, error=f"could not be started: {error}"[:ERROR_CHARS])
    survivors, exit_code = [child.pid], None
    try:
        status = await child.end(own_time, limits.wall_s)
        duration = time.monotonic() - began
    finally:
        entry = f"{MARK}={mark}".encode()
        try:
            ending = in_thread(partial(end_processes, child.pid, entry, limits.grace_s), daemon=False)
            survivors = await wait_uncancelled(ending)
        finally:
            exit_code = child.close()
    paused_s = own_time.paused_s if status is AgentStatus.TIMED_OUT else 0.0
    outcome = AgentOutcome(status or AgentStatus.FINISHED, duration, exit_code, child.tail, paused_s=paused_s)
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
        status = EXIT_CODES.get(code, AgentStatus.FAILED)
        error = f"exit code {code}" if code > 0 else f"ended by signal {signal_name(-code)}"
    else:
        try:
            reward, info = scratch.reward()
            outcome = replace(outcome, reward=reward, reward_info=info)
        except ValueError as wrong:
            status, error = AgentStatus.INVALID_REWARD, str(wrong)
    if survivors:
        error = f"{error}; processes {survivors} do not end though killed".removeprefix("; ")
    return replace(outcome, status=status, error=error[:ERROR_CHARS])


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else str(number)
