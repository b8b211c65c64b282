"""`python -m seamless_verl.config` prints the folder of our configs, for verl's `--config-dir`.

With `--settings` it prints docs/settings.md: a table of all settings of the `seamless:` node.
"""

from __future__ import annotations

import argparse
import sys

from seamless_verl.config.composing import HERE
from seamless_verl.config.settings_table import settings_page


def main() -> None:
    """Print the folder, or the page."""
    parser = argparse.ArgumentParser(prog="python -m seamless_verl.config", description="Print the folder of configs.")
    parser.add_argument("--settings", action="store_true", help="print the table of settings, as Markdown, instead")
    sys.stdout.write(settings_page() if parser.parse_args().settings else f"{HERE}\n")


if __name__ == "__main__":
    main()
