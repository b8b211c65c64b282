"""`seamless-verl runner`: runs agents for a run, anywhere from where the run's gateway can be reached."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import shutil
from dataclasses import fields
from pathlib import Path
from socket import gethostname

import msgspec

from seamless_verl.agents.callable import load_agent
from seamless_verl.agents.command import AgentCommand
from seamless_verl.agents.limits import CommandLimits
from seamless_verl.cli.main import Commands, add_parser
from seamless_verl.client.admin_file import AdminFile
from seamless_verl.client.connection import RunConnection
from seamless_verl.client.http import checked_key, checked_url
from seamless_verl.client.runner import RunAgent, Runner, command_agent, function_agent, run_until_stopped
from seamless_verl.errors import ConfigError
from seamless_verl.runtime.fields import read

logger = logging.getLogger(__name__)
KEY_VARIABLE = "SEAMLESS_RUNNER_KEY"
DEFAULT = "default"
VARIABLE = re.compile("[A-Z0-9_]*[A-Z][A-Z0-9_]*")  # a name that the shell would take for that of a variable
LIMITS = [field.name for field in fields(CommandLimits) if field.name != "wall_s"]  # that one comes with each task


def add_command(commands: Commands) -> None:
    parser = add_parser(commands, "runner")
    parser.add_argument("--connect", metavar="URL", help="the gateway's address, or that of a proxy before it")
    parser.add_argument(
        "--admin-file",
        metavar="FILE",
        help=f"the run's <journal>.admin.json: address and key; without it the key is in ${KEY_VARIABLE}",
    )
    for option, metavar, text in (
        (
            "--agent",
            "[NAME=]PLACE:FUNCTION",
            f"a function agent(task, endpoint), as package.module:run or path/agent.py:run; else NAME is {DEFAULT!r}",
        ),
        (
            "--command",
            "[NAME=]TEXT",
            "an agent that is a command line for /bin/sh; {field} stands for a value of the task",
        ),
        ("--env", "NAME[=VALUE]", "a variable of each command; without a VALUE, the runner's own"),
        ("--limit", "KEY=NUMBER", f"a limit of each command: {', '.join(LIMITS)}"),
    ):
        parser.add_argument(option, action="append", default=[], metavar=metavar, help=text)
    parser.add_argument("--folder", help="copied to be the working folder of each command")
    parser.add_argument("--keep-failed", metavar="FOLDER", help="where the working folders of commands that failed go")
    parser.add_argument("--slots", type=int, default=1, help="tasks at a time")
    parser.add_argument("--tasks", type=int, metavar="N", help="end after N tasks; without it, at SIGINT or SIGTERM")
    parser.add_argument("--name", default=f"{gethostname()}-{os.getpid()}", help="how the run names this runner")
    parser.add_argument(
        "--ca-file", metavar="PEM", help="certificates to trust for https, besides none of the system's"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Runs until it is stopped; raises ConfigError for options that cannot work, OutsideApiError if it is refused."""
    url, key = place_of(args)
    agents = agents_of(args)
    for option, value, otherwise in (
        ("--slots", args.slots, "for one task at a time"),
        ("--tasks", args.tasks, "to run until SIGINT or SIGTERM"),
    ):
        if value is not None and value < 1:
            raise ConfigError(option, value, "must be at least 1", f"Leave it out {otherwise}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    asyncio.run(work(url, key, agents, args))


async def work(url: str, key: str, agents: dict[str, RunAgent], args: argparse.Namespace) -> None:
    async with RunConnection(url, key, runner=args.name, ca_file=args.ca_file) as connection:
        logger.info("asks %s for tasks of %s, %s at a time", connection.url, ", ".join(sorted(agents)), args.slots)
        await run_until_stopped(Runner(connection, agents, slots=args.slots), max_tasks=args.tasks)


def place_of(args: argparse.Namespace) -> tuple[str, str]:
    """The run's address and the key."""
    found = None if args.admin_file is None else AdminFile.read(Path(args.admin_file), key="--admin-file")
    url = args.connect or (found and found.url)
    given = os.environ.get(KEY_VARIABLE)
    key = given or (found and found.runner_key)
    if not url:
        raise ConfigError("--connect", None, "is missing", "Give the gateway's address, or --admin-file")
    if not key:
        way_out = "Set it to runner_key of the admin file, or give --admin-file"
        raise ConfigError(KEY_VARIABLE, given, "is not set" if given is None else "is empty", way_out)
    checked_url(url, name="--connect" if args.connect else "--admin-file")
    return url, checked_key(key, name=KEY_VARIABLE if given else "--admin-file")


def agents_of(args: argparse.Namespace) -> dict[str, RunAgent]:
    """The agents by name; raises ConfigError for one that cannot be loaded, and for none."""
    agents: dict[str, RunAgent] = {}
    for option, value in [
        *(("--agent", value) for value in args.agent),
        *(("--command", value) for value in args.command),
    ]:
        name, place = split_name(value)
        if option == "--command" and VARIABLE.fullmatch(name) and not _begins_a_command(place):
            reason = f"{name}= is taken for the agent's name, and no command begins with {place.split()[:1]}"
            way_out = f"If it is a variable of the shell, write {DEFAULT}={name}=..., or --env {name}=..."
            raise ConfigError(option, value, reason, way_out)
        if name in agents:
            raise ConfigError(option, value, f"there is another agent {name!r}", "Give each a NAME= of its own")
        agents[name] = (
            function_agent(load_agent(place, key=option))
            if option == "--agent"
            else command_agent(command_of(place, args))
        )
    if not agents:
        raise ConfigError("--agent", None, "is missing", "Name one as package.module:run, or give a --command")
    of_commands = {"--folder": args.folder, "--env": args.env, "--limit": args.limit, "--keep-failed": args.keep_failed}
    for option, given in of_commands.items():
        if given and not args.command:
            raise ConfigError(option, given, "is for commands, and there is none", "Leave it out, or give a --command")
    return agents


def _begins_a_command(text: str) -> bool:
    """Whether its first word is a program, or the path of one."""
    first = next(iter(text.split()), "")
    return "/" in first or shutil.which(first) is not None


def command_of(text: str, args: argparse.Namespace) -> AgentCommand:
    """A command with the folders, variables and limits of the options.

    Raises ConfigError for a variable without a value here, a limit that there is not, and a bad value of one.
    """
    env: dict[str, str] = {}
    for given in args.env:
        name, equals, value = given.partition("=")
        if not name or not (equals or name in os.environ):
            raise ConfigError(
                "--env", given, "has no value", "Write NAME=VALUE, or NAME of a variable that is set here"
            )
        env[name] = value if equals else os.environ[name]
    limits: dict[str, object] = {}
    for given in args.limit:
        name, _, value = given.partition("=")
        if name not in LIMITS:
            raise ConfigError("--limit", given, f"there is no limit {name!r} to set", f"Valid: {', '.join(LIMITS)}")
        try:
            limits[name] = msgspec.json.decode(value)  # a number
        except msgspec.DecodeError:
            limits[name] = value
    read_limits = read(CommandLimits, limits, key="--limit")
    return AgentCommand(text, folder=args.folder, env=env, limits=read_limits, keep_failed=args.keep_failed)


def split_name(value: str) -> tuple[str, str]:
    """NAME=rest; a NAME has only letters, digits, `-` and `_`, as a command line rarely begins."""
    name, equals, rest = value.partition("=")
    if equals and name and name.replace("-", "").replace("_", "").isalnum():
        return name, rest
    return DEFAULT, value
