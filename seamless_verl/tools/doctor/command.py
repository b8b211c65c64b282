"""The command `seamless-verl doctor`: what is wrong with this machine and environment, and how to mend it; of a run,
whether what it recorded is what its checkpoints compute."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from seamless_verl.cli.main import COMMANDS, Commands
from seamless_verl.cli.output import escape, format_count, write
from seamless_verl.errors import ConfigError
from seamless_verl.tools.doctor import machine, network, software
from seamless_verl.tools.doctor.facts import Facts, Finding, Judgement, Level

ABOUT = COMMANDS["doctor"]
FORMAT = 1
"""Of the JSON: a reader of another one is to be changed."""
FOUND_ERRORS = 1
LAST_PORT = 65535
PROBES: tuple[tuple[str, Callable[[Facts], list[Judgement]]], ...] = (
    ("system", software.probe_system),
    ("python", software.probe_python),
    ("package", software.probe_package),
    ("versions", software.probe_versions),
    ("vllm", software.probe_vllm_name),
    ("stack", software.probe_stack),
    ("platform", software.probe_platform),
    ("devices", machine.probe_devices),
    ("memory", machine.probe_memory),
    ("shared memory", machine.probe_shared_memory),
    ("open files", machine.probe_open_files),
    ("processes", machine.probe_processes),
    ("locked memory", machine.probe_locked_memory),
    ("TMPDIR", machine.probe_temporary),
    ("disk", machine.probe_disks),
    ("network", network.probe_connections),
    ("proxies", network.probe_proxies),
    ("ports", network.probe_ports),
    ("Ray", network.probe_ray),
)
"""By subject, in the order in which findings are mended: later ones often follow from earlier ones."""


def add_command(commands: Commands) -> None:
    """Adds the command to the tree of subcommands."""
    parser = commands.add_parser("doctor", help=ABOUT, description=f"Says {ABOUT}. Exit code 1 if a run would fail.")
    parser.add_argument("--json", action="store_true", help="the findings as JSON")
    parser.add_argument(
        "--port", type=int, action="append", default=[], metavar="N", help="try it: seamless.gateway.port, for one"
    )
    parser.add_argument("--folder", type=Path, default=Path(), help="where a run would put its files")
    parser.add_argument(
        "folder_of_run",
        nargs="?",
        type=Path,
        metavar="RUN",
        help="a run's trainer.default_local_dir: not the machine, but whether recorded tokens have the logprobs that"
        " its checkpoints give them",
    )
    parser.add_argument("--calls", type=int, default=32, metavar="N", help="of RUN, for each checkpoint. Default: 32")
    parser.set_defaults(run=show_findings)


def show_findings(args: argparse.Namespace) -> int:
    """Returns the exit code: 0 if there is no error; raises ConfigError for options that cannot be meant."""
    for port in args.port:
        if not 0 < port <= LAST_PORT:
            raise ConfigError("--port", port, f"is not between 1 and {LAST_PORT}", "Give a port to be tried")
    if args.folder_of_run is not None:
        from seamless_verl.tools.doctor.rescore import rescore

        scored, differs = rescore(args.folder_of_run, args.calls)
        write("\n".join(map(escape, scored)))
        return FOUND_ERRORS if differs else 0
    from seamless_verl.tools.doctor.gather import gather

    findings = diagnose(gather(args.folder, args.port))
    errors, warnings = (sum(one.level is level for one in findings) for level in (Level.ERROR, Level.WARNING))
    if args.json:
        shown = [
            {"subject": one.subject, "level": str(one.level), "text": one.text, "way_out": one.way_out or None}
            for one in findings
        ]
        write(json.dumps({"format": FORMAT, "errors": errors, "warnings": warnings, "findings": shown}, indent=2))
    else:
        write("\n".join(lines(findings)))
        write(f"\n{format_count(errors, 'error')}, {format_count(warnings, 'warning')}")
    return FOUND_ERRORS if errors else 0


def diagnose(facts: Facts) -> list[Finding]:
    """Every finding, those that are in order too."""
    return [Finding(subject, *judgement) for subject, probe in PROBES for judgement in probe(facts)]


def lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Lines for a terminal: each finding with its way out below."""
    width = max(len(level) for level in Level)
    for finding in findings:
        yield f"{finding.level:<{width}}  {finding.subject}: {escape(finding.text)}"
        if finding.way_out:
            yield f"{'':<{width}}  -> {escape(finding.way_out)}"
