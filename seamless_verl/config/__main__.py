"""`python -m seamless_verl.config` prints the folder of our configs, for verl's `--config-dir`.

With `--settings` it prints docs/settings.md, with `--yaml` seamless.yaml: both are made of the schema.
"""

from __future__ import annotations

import argparse
import sys

from seamless_verl.config.composing import HERE
from seamless_verl.config.settings_table import settings_page, settings_yaml


def main() -> None:
    """Print the folder, the page or the file of defaults."""
    parser = argparse.ArgumentParser(prog="python -m seamless_verl.config", description="Print the folder of configs.")
    parser.add_argument("--settings", action="store_true", help="print the table of settings, as Markdown, instead")
    parser.add_argument("--yaml", action="store_true", help="print the settings with their defaults instead")
    args = parser.parse_args()
    sys.stdout.write(settings_page() if args.settings else settings_yaml() if args.yaml else f"{HERE}\n")


if __name__ == "__main__":
    main()
