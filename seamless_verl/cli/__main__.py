"""`python -m seamless_verl.cli` is the command `seamless-verl`."""

from __future__ import annotations

import sys

from seamless_verl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
