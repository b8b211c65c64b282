"""`python -m seamless_verl.check [--unmade] ...`: refuses what `seamless_verl.main_ppo ...` would, and starts nothing.

With `--unmade`, missing data and models are expected to be made before the run. Recipes check so before they make them,
which takes longer than to refuse a mistyped setting. The command leaves no files behind.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from tempfile import TemporaryDirectory

from seamless_verl.errors import exits_on_config_error
from seamless_verl.main_ppo import check, compose_and_run

UNMADE = "--unmade"
OUTPUT_FOLDER = re.compile(r"\+*hydra\.(run|sweep)\.dir=")
SETTING = re.compile(r"[^-].*=")
HELP = {"--help", "-h"}
USAGE = """usage: python -m seamless_verl.check [--unmade] [KEY=VALUE ...]

Refuses what `python -m seamless_verl.main_ppo KEY=VALUE ...` would, with exit code 2, and starts nothing.

  --unmade    missing data and models are expected to be made before the run

Takes hydra's options besides, as main_ppo does; `python -m seamless_verl.main_ppo --help` shows every key.
"""


@exits_on_config_error
def main() -> int:
    """Exit code 0, or 2 with a message on standard error, as the run itself would end."""
    if HELP & set(sys.argv[1:]):
        sys.stdout.write(USAGE)
        return 0
    with TemporaryDirectory() as folder:
        arguments, unmade = with_output_folder(sys.argv[1:], folder), UNMADE in sys.argv
        sys.argv[1:] = arguments
        compose_and_run(lambda config: check(config, unmade=unmade))
    return 0


def with_output_folder(arguments: Sequence[str], folder: str) -> list[str]:
    """The arguments for hydra's command line, with `folder` for what it writes of a run.

    The folder is put beside the first setting: hydra takes no settings after an option that follows one.
    """
    kept = [argument for argument in arguments if argument != UNMADE and OUTPUT_FOLDER.match(argument) is None]
    place = next((i for i, argument in enumerate(kept) if SETTING.match(argument)), len(kept))
    return [*kept[:place], f"hydra.run.dir='{folder}'", f"hydra.sweep.dir='{folder}'", *kept[place:]]


if __name__ == "__main__":
    sys.exit(main())
