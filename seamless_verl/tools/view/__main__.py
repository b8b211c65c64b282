"""The process of a run's own view: `python -m seamless_verl.tools.view FOLDER`, started by `process.py`.

Its first line on stdout is the page's address. It runs at low priority, and ends with the process that started it.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path

from seamless_verl.errors import exits_on_config_error
from seamless_verl.runtime.process import end_with_process
from seamless_verl.tools.view.run import RunView
from seamless_verl.tools.view.server import address_of, listen, require, serve

NICENESS = 10


@exits_on_config_error
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m seamless_verl.tools.view")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ends-with", type=int, required=True, metavar="PID")
    args = parser.parse_args()
    end_with_process(args.ends_with)
    os.nice(NICENESS)
    require()
    listening, token = listen(args.host, args.port, key="seamless.view."), secrets.token_urlsafe(16)
    sys.stdout.write(f"{address_of(listening, token)}\n")
    sys.stdout.flush()
    serve(RunView(args.folder), listening, token)
    return 0


if __name__ == "__main__":
    sys.exit(main())
