"""Checks of the gateway: the trainer mode it runs in, its ports, shards and journal files.

Sources: seamless_verl/data_plane/client.py, seamless_verl/journal/schema.py.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from urllib.parse import urlsplit

from seamless_verl.config.checks.agents import LOOPS, OURS, loops_of
from seamless_verl.config.paths import existing_folder, looking_at, write_error
from seamless_verl.config.roles import ENGINE_KWARGS, ROLLOUT_KEY, engines_parser, joins_cluster, option_of
from seamless_verl.config.schema import JOURNAL as JOURNAL_NAME
from seamless_verl.config.schema import LAST_PORT
from seamless_verl.config.settings import Problem, Settings, check
from seamless_verl.config.trace_exporter import chosen_exporter
from seamless_verl.errors import ConfigError, JournalError
from seamless_verl.journal.reader import check_file
from seamless_verl.runtime.locks import is_locked, lock_file, missing_locks

OTHERS = 0o077  # of a file's mode: what its group and all others may do
ENABLED = "seamless.gateway.enabled"
PORT, JOURNAL = "seamless.gateway.port", "seamless.gateway.journal"
SHARDS, CALLS = "seamless.gateway.shards", "actor_rollout_ref.rollout.max_num_seqs"
ADDRESS = "seamless.gateway.public_address"
SQLITE = b"SQLite format 3\0"


@check
def check_gateway(settings: Settings) -> list[Problem]:
    """The gateway runs in our trainer only; agent loops that run agents against it need it."""
    enabled, seamless = settings.seamless.gateway.enabled, settings.mode == "seamless"
    if enabled and not seamless:
        reason = "only the seamless trainer starts the gateway"
        return [Problem(ENABLED, True, reason, "Set trainer.v1.trainer_mode=seamless, or leave the gateway out")]
    path = settings.get(LOOPS)
    if path is None or enabled or not any(str(loop.get("_target_")).startswith(OURS) for loop in loops_of(settings)):
        return []
    return [Problem(LOOPS, path, "it names agent loops that need the gateway", f"Set {ENABLED}=true")]


@check
def check_port(settings: Settings) -> list[Problem]:
    """The ports, one for each shard, are free. In a cluster the gateway may run on another machine."""
    gateway = settings.seamless.gateway
    if not gateway.enabled or gateway.port == 0:
        return []
    way_out = f"Set {PORT} to another one, or to 0 for any that is free"
    if (last := gateway.port + gateway.shards - 1) > LAST_PORT:
        which = "is" if last == gateway.port else f"and those of the other shards, up to {last}:"
        return [Problem(PORT, gateway.port, f"{which} more than {LAST_PORT}, the last port there is", way_out)]
    if joins_cluster(settings):
        return []
    for port in range(gateway.port, last + 1):
        if why := listen_error(port):
            which = "" if port == gateway.port else f"needs {port} too, which "
            return [Problem(PORT, gateway.port, f"{which}cannot be listened to: {why}", way_out)]
    return []


def listen_error(port: int) -> str | None:
    """Why nothing can listen at this port of all addresses; None where it can."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


@check
def check_shards(settings: Settings) -> list[Problem]:
    """Each shard has room for a call on each replica."""
    shards = settings.seamless.gateway.shards
    if settings.mode != "seamless" or shards == 1 or shards <= (room := settings.integer(CALLS, shards)):
        return []
    reason = f"a replica runs {CALLS}={room} calls at once, less than one for each shard"
    return [Problem(SHARDS, shards, reason, f"Set {SHARDS}={room} or less")]


@check
def check_public_address(settings: Settings) -> list[Problem]:
    """It is a host, or a URL of the one gateway that there is."""
    gateway = settings.seamless.gateway
    address = gateway.public_address
    if address is None:
        return []
    if "://" not in address:
        way_out = f"Set {ADDRESS}=<host>, or a whole URL"
        bad = "/" in address or ":" in address or any(map(str.isspace, address))
        return [Problem(ADDRESS, address, "it is no host", way_out)] if bad else []
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        return [Problem(ADDRESS, address, "it is no URL of a server", f"Set {ADDRESS}=http://<host>:<port>")]
    if gateway.shards > 1:
        reason = f"each of {SHARDS}={gateway.shards} gateways has a port of its own, and a URL names one"
        return [Problem(ADDRESS, address, reason, f"Set {ADDRESS} to a host, or {SHARDS}=1")]
    return []


@check
def check_journal(settings: Settings) -> list[Problem]:
    """This run can write the files, and no other run does. In a cluster they may be on another machine."""
    gateway = settings.seamless.gateway
    if not gateway.enabled or joins_cluster(settings):
        return []
    key = JOURNAL if gateway.journal else "trainer.default_local_dir"
    value = gateway.journal or settings.text(key)
    paths = [gateway.journal_of(shard, value) for shard in range(gateway.shards)]
    with looking_at(key, value):
        for path in paths:
            _check_journal_file(key, value, path)
        return [_read_by_others(key, value, path) for path in paths if _mode(path) & OTHERS]


def _mode(path: Path) -> int:
    """The mode of a journal that is continued; 0 of one that is made."""
    return stat.S_IMODE(path.stat().st_mode) if path.exists() and path.stat().st_size else 0


def _read_by_others(key: str, value: str, path: Path) -> Problem:
    reason = f"others can read the journal {path} (mode {_mode(path):o}), which has what agents and people wrote"
    return Problem(key, value, reason, f"Make it yours alone: chmod 600 {path}", warning=True)


def _check_journal_file(key: str, value: str, path: Path) -> None:
    way_out = f"Set {JOURNAL} to a file in a folder of yours"
    _writable(key, value, path, way_out)
    if path.is_file() and not _is_database(path):
        raise ConfigError(key, value, f"{path} is no journal", f"{way_out}, or move that file away")
    if why := missing_locks(existing_folder(lock_file(path).parent)):
        reason = f"its file system has no locks ({why}), which keep two runs from writing one journal"
        raise ConfigError(key, value, reason, f"Set {JOURNAL} to a file on a local disk")
    if is_locked(path):
        way_out = f"Wait for it or stop it, or give this run its own: {JOURNAL}=<file>"
        raise ConfigError(key, value, f"another run is writing the journal {path}", way_out)
    try:
        check_file(path)
    except (ConfigError, JournalError) as error:
        another = f"Give this run its own: {JOURNAL}=<file>"
        raise ConfigError(key, value, f"the journal {path} cannot be continued: {error}", another) from error


def _writable(key: str, value: str, path: Path, way_out: str) -> None:
    if path.is_dir():
        raise ConfigError(key, value, f"{path} is a folder", f"{way_out}, such as {path / JOURNAL_NAME}")
    parent = existing_folder(path.absolute().parent)
    if not parent.is_dir():
        raise ConfigError(key, value, f"{parent} is a file, so no folder can be made there", way_out)
    if (why := write_error(parent)) is not None:
        raise ConfigError(key, value, f"{parent} cannot be written: {why}", way_out)
    for file in (path, lock_file(path)):
        if file.exists() and not os.access(file, os.W_OK):
            raise ConfigError(key, value, f"{file} cannot be written", way_out)


def _is_database(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(SQLITE)) in (SQLITE, b"")


VIEW = "seamless.view"


@check
def check_view(settings: Settings) -> list[Problem]:
    """The view shows what our trainer writes, where this machine can listen."""
    address = settings.seamless.view_address
    if address is None:
        return []
    if settings.mode != "seamless":
        reason = "only the seamless trainer writes what the view shows"
        return [Problem(VIEW, settings.seamless.view, reason, f"Set trainer.v1.trainer_mode=seamless, or {VIEW}=null")]
    found = [] if settings.host.elsewhere else _cannot_listen(settings, *address)
    if joins_cluster(settings):
        reason = "the view runs where this command runs, and the trainer may write its folder on another machine"
        way_out = "Set trainer.default_local_dir to a folder that all machines share"
        found.append(Problem(VIEW, settings.seamless.view, reason, way_out, warning=True))
    return found


def _cannot_listen(settings: Settings, host: str, port: int) -> list[Problem]:
    value, gateway = settings.seamless.view, settings.seamless.gateway
    way_out = f"Set {VIEW}={host}:0 for any port that is free"
    if port and gateway.enabled and port in range(gateway.port, gateway.port + gateway.shards):
        return [Problem(VIEW, value, "is a port of the gateway", way_out)]
    for tried in dict.fromkeys((0, port)):
        try:
            socket.create_server((host, tried)).close()
        except OSError as error:
            if not tried:
                way_out = f"Set {VIEW}=127.0.0.1:{port}, or 0.0.0.0:{port} for every address"
            return [Problem(VIEW, value, f"cannot be listened to: {error.strerror or error}", way_out)]
    return []


METRICS = "seamless.metrics_port"


@check
def check_metrics_port(settings: Settings) -> list[Problem]:
    """Our trainer serves metrics, at a port that is free. In a cluster it may run on another machine."""
    port, gateway = settings.seamless.metrics_port, settings.seamless.gateway
    if port is None:
        return []
    if settings.mode != "seamless":
        way_out = f"Set trainer.v1.trainer_mode=seamless, or {METRICS}=null"
        return [Problem(METRICS, port, "only the seamless trainer serves metrics", way_out)]
    way_out = f"Set {METRICS} to another one, or to 0 for any that is free"
    if port and gateway.enabled and port in range(gateway.port, gateway.port + gateway.shards):
        return [Problem(METRICS, port, "is a port of the gateway", way_out)]
    if settings.host.elsewhere or joins_cluster(settings):
        return []
    if port and settings.seamless.view_address and port == settings.seamless.view_address[1]:
        return [Problem(METRICS, port, f"is the port of {VIEW}", way_out)]
    why = listen_error(port)
    return [] if why is None else [Problem(METRICS, port, f"cannot be listened to: {why}", way_out)]


@check
def check_traces(settings: Settings) -> list[Problem]:
    """The variables of OpenTelemetry name an exporter that is installed here."""
    if settings.mode == "seamless" and settings.seamless.gateway.enabled:  # which has the sessions
        chosen_exporter(os.environ)
    return []


OPTIONS = "seamless.gateway.options"
AUTO_TOOLS, TOOL_PARSER = "--enable-auto-tool-choice", "--tool-call-parser"  # vLLM reads tool calls with both
OF_THE_RUN = {"--model": "actor_rollout_ref.model.path", "--max-model-len": f"{ROLLOUT_KEY}.max_model_len"}
OF_THE_RUN |= {"--dtype": f"{ROLLOUT_KEY}.dtype", "--host": "seamless.gateway.public_address", "--port": PORT}


@check
def check_options(settings: Settings) -> list[Problem]:
    """What vLLM's parser cannot know: options that the run sets, tool calls that nothing would read, other parsers."""
    given = list(settings.seamless.gateway.options)
    if not settings.seamless.gateway.enabled:
        return []
    named = [option.partition("=")[0].replace("_", "-") for option in given]
    found = [
        Problem(OPTIONS, option, "is set by the run, as its engines have it", f"Set {OF_THE_RUN[name]} for the run")
        for option, name in zip(given, named, strict=True)
        if name in OF_THE_RUN
    ]
    if TOOL_PARSER in named and not {AUTO_TOOLS, AUTO_TOOLS.replace("--", "--no-", 1)} & set(named):
        chosen = f"{TOOL_PARSER}={option_of(TOOL_PARSER, given)}"
        reason = f"reads no tool calls that the model chooses to make, without {AUTO_TOOLS}"
        found.append(Problem(OPTIONS, chosen, reason, f'Write \'{OPTIONS}=["{AUTO_TOOLS}","{chosen}"]\'', warning=True))
    engines, parser = engines_parser(settings), option_of("--reasoning-parser", given)
    if engines is not None and parser not in (None, engines):
        reason = f"engines have {engines}, and would start a grammar at another token than the gateway"
        way_out = f"Leave {ENGINE_KWARGS}.reasoning_parser to the gateway"
        found.append(Problem(OPTIONS, f"--reasoning-parser={parser}", reason, way_out))
    return found
