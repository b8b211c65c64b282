"""`python -m seamless_verl.simulator` simulates a scenario and prints what came of it."""

from __future__ import annotations

import sys

from seamless_verl.simulator.command import main

if __name__ == "__main__":
    sys.exit(main())
