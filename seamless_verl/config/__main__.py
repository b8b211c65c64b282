"""`python -m seamless_verl.config` prints the folder of our configs, for verl's `--config-dir`."""

from __future__ import annotations

import sys

from seamless_verl.config.composing import HERE

if __name__ == "__main__":
    sys.stdout.write(f"{HERE}\n")
