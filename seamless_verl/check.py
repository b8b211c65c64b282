"""`python -m seamless_verl.check [--unmade] ...`: refuses what `seamless_verl.main_ppo ...` would, and starts nothing.

With `--unmade` data and models that are not there are taken for not made yet: so recipes ask before they make
them, which takes longer than to refuse a mistyped setting. It leaves nothing behind.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from tempfile import TemporaryDirectory

from seamless_verl.errors import refusing
from seamless_verl.main_ppo import check, compose_and

UNMADE = "--unmade"
FOLDER = re.compile(r"\+*hydra\.(run|sweep)\.dir=")
SETTING = re.compile(r"[^-].*=")
HELP = {"--help", "-h"}
USAGE = """usage: python -m seamless_verl.check [--unmade] [KEY=VALUE ...]

Refuses what `python -m seamless_verl.main_ppo KEY=VALUE ...` would, with exit code 2, and starts nothing.

  --unmade    data and models that are not there are taken for not made yet

Takes hydra's options besides, as main_ppo does; `python -m seamless_verl.main_ppo --help` shows every key.
"""


@refusing
def main() -> int:
    """Exit code 0, or 2 with a message on standard error, as the run itself would end."""
    if HELP & set(sys.argv[1:]):
        sys.stdout.write(USAGE)
        return 0
    with TemporaryDirectory() as folder:
        arguments, unmade = elsewhere(sys.argv[1:], folder), UNMADE in sys.argv
        sys.argv[1:] = arguments
        compose_and(lambda config: check(config, unmade=unmade))
    return 0


def elsewhere(arguments: Sequence[str], folder: str) -> list[str]:
    """The arguments of hydra's command line, with another folder for what it writes of a run.

    That stands with the other settings: hydra takes none after an option that follows one.
    """
    kept = [one for one in arguments if one != UNMADE and FOLDER.match(one) is None]
    place = next((i for i, one in enumerate(kept) if SETTING.match(one)), len(kept))
    return [*kept[:place], f"hydra.run.dir='{folder}'", f"hydra.sweep.dir='{folder}'", *kept[place:]]


if __name__ == "__main__":
    sys.exit(main())
