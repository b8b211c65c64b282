"""`python -m seamless_verl.check [OPTION] ...`: refuses what `seamless_verl.main_ppo ...` would, and starts nothing.

With `--unmade`, missing data and models are expected to be made before the run. Recipes check so before they make them,
which takes longer than to refuse a mistyped setting. With `--platform accelerator`, a run for machines with GPUs is
checked on one without: what only those machines know is named and left out. The command leaves no files behind.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from tempfile import TemporaryDirectory

from seamless_verl.errors import exits_on_config_error

INTERRUPTED = 130
UNMADE, OPTION = "--unmade", "--platform"
OUTPUT_FOLDER = re.compile(r"\+*hydra\.(run|sweep)\.dir=")
SETTING = re.compile(r"[^-].*=")
HELP = {"--help", "-h"}
USAGE = """usage: python -m seamless_verl.check [--unmade] [--platform NAME] [KEY=VALUE ...]

Refuses what `python -m seamless_verl.main_ppo KEY=VALUE ...` would, with exit code 2, and starts nothing.

  --unmade          missing data and models are expected to be made before the run
  --platform NAME   `accelerator` checks for machines with GPUs, on one without them too; `cpu` for the CPU platform

Takes hydra's options besides, as main_ppo does; `python -m seamless_verl.main_ppo --help` shows every key.
"""


@exits_on_config_error
def main() -> int:
    """Exit code 0, or 2 with a message on standard error, as the run itself would end."""
    if HELP & set(sys.argv[1:]):
        sys.stdout.write(USAGE)
        return 0
    sys.argv[1:], platform = without_platform(sys.argv[1:])
    # Imported here, as hydra takes a second: Ctrl-C ends the command without a traceback from the first import on.
    from seamless_verl.main_ppo import PLATFORM, check, compose_and_run

    if platform is not None:
        os.environ[PLATFORM] = platform
    with TemporaryDirectory() as folder:
        arguments, unmade = with_output_folder(sys.argv[1:], folder), UNMADE in sys.argv
        sys.argv[1:] = arguments
        compose_and_run(lambda config: check(config, unmade=unmade, anywhere=True))
    return 0


def without_platform(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """The arguments without the option `--platform`, and its value; ConfigError for one that there is not."""
    from seamless_verl.config.composing import named_platform

    kept, value, given = list[str](), "", False
    rest = iter(arguments)
    for argument in rest:
        name, has_value, text = argument.partition("=")
        if name != OPTION:
            kept.append(argument)
            continue
        value, given = text if has_value else next(rest, ""), True
    return kept, named_platform(OPTION, value) if given else None


def with_output_folder(arguments: Sequence[str], folder: str) -> list[str]:
    """The arguments for hydra's command line, with `folder` for what it writes of a run.

    The folder is put beside the first setting: hydra takes no settings after an option that follows one.
    """
    from seamless_verl.config.words import quoted

    kept = [argument for argument in arguments if argument != UNMADE and OUTPUT_FOLDER.match(argument) is None]
    place = next((i for i, argument in enumerate(kept) if SETTING.match(argument)), len(kept))
    return [*kept[:place], *(f"hydra.{what}.dir={quoted(folder)}" for what in ("run", "sweep")), *kept[place:]]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda number, frame: sys.exit(INTERRUPTED))
    sys.exit(main())
