"""The command `seamless-verl doctor`: what is wrong with this machine and environment, and how to mend it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from seamless_verl.cli.main import COMMANDS
from seamless_verl.cli.output import escape, format_count, write
from seamless_verl.errors import ConfigError, Finding, Level
from seamless_verl.tools.doctor import machine, network, software
from seamless_verl.tools.doctor.gather import Facts

ABOUT = COMMANDS["doctor"]
FORMAT = 1
"""Of the JSON: a reader of another one is to be changed."""
FOUND_ERRORS = 1
LAST_PORT = 65535
PROBES: tuple[Callable[[Facts], list[Finding]], ...] = (
    software.probe_system,
    software.probe_python,
    software.probe_package,
    software.probe_versions,
    software.probe_vllm_name,
    software.probe_stack,
    software.probe_platform,
    machine.probe_devices,
    machine.probe_memory,
    machine.probe_shared_memory,
    machine.probe_huge_pages,
    machine.probe_open_files,
    machine.probe_processes,
    machine.probe_locked_memory,
    machine.probe_temporary,
    machine.probe_disks,
    machine.probe_clock,
    network.probe_connections,
    network.probe_proxies,
    network.probe_ports,
    network.probe_ray,
)
"""In the order in which findings are mended: later ones often follow from earlier ones."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the tree of subcommands."""
    parser = commands.add_parser("doctor", help=ABOUT, description=f"Says {ABOUT}. Exit code 1 if a run would fail.")
    parser.add_argument("--json", action="store_true", help="the findings as JSON")
    parser.add_argument(
        "--port", type=int, action="append", default=[], metavar="N", help="try it: seamless.gateway.port, for one"
    )
    parser.add_argument("--folder", type=Path, default=Path(), help="where a run would put its files")
    parser.set_defaults(run=show_findings)


def show_findings(args: argparse.Namespace) -> int:
    """Returns the exit code: 0 if there is no error; raises ConfigError for options that cannot be meant."""
    for port in args.port:
        if not 0 < port <= LAST_PORT:
            raise ConfigError("--port", port, f"is not between 1 and {LAST_PORT}", "Give a port to be tried")
    from seamless_verl.tools.doctor.gather import gather

    findings = diagnose(gather(args.folder, args.port))
    write(json.dumps(as_json(findings), indent=2) if args.json else "\n".join(lines(findings)))
    return FOUND_ERRORS if count(findings, Level.ERROR) else 0


def diagnose(facts: Facts) -> list[Finding]:
    """Every finding, those that are in order too."""
    return [finding for probe in PROBES for finding in probe(facts)]


def lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Lines for a terminal: each finding with its way out below, then how many there are."""
    width = max(len(level) for level in Level)
    for finding in findings:
        yield f"{finding.level:<{width}}  {finding.subject}: {escape(finding.text)}"
        if finding.way_out:
            yield f"{'':<{width}}  -> {escape(finding.way_out)}"
    errors, warnings = count(findings, Level.ERROR), count(findings, Level.WARNING)
    yield ""
    yield f"{format_count(errors, 'error')}, {format_count(warnings, 'warning')}"


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """Plain values: the format, the numbers of errors and warnings, and all findings in order."""
    return {
        "format": FORMAT,
        "errors": count(findings, Level.ERROR),
        "warnings": count(findings, Level.WARNING),
        "findings": [
            {"subject": one.subject, "level": str(one.level), "text": one.text, "way_out": one.way_out or None}
            for one in findings
        ],
    }


def count(findings: Sequence[Finding], level: Level) -> int:
    return sum(finding.level is level for finding in findings)
