"""What benches of a user's own job have in common on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from seamless_verl.errors import ConfigError


def job_parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser of a job; read with `parse_intermixed_args`, since overrides may stand anywhere."""
    parser = argparse.ArgumentParser(prog=f"python -m seamless_verl.tools.bench.{name}", description=description)
    parser.add_argument("target", nargs="*", help="a recipe or a config file, then overrides KEY=VALUE")
    return parser


def new_folder(out: Path) -> Path:
    """The folder of `--out`, made; ConfigError if there is something in it."""
    out = out.absolute()
    if out.exists() and any(out.iterdir()):
        raise ConfigError("--out", str(out), "is not empty", "Give another folder, or remove it")
    out.mkdir(parents=True, exist_ok=True)
    return out
