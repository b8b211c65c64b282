"""One check in a process of its own: `python -m gpu.one MODULE:FUNCTION PLATFORM LINES`. Exits with 1 if it failed."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from pathlib import Path

from gpu.catalog import find
from gpu.place import Place, SkippedError


def main() -> int:
    target, platform, lines = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="g") as folder:  # a short path, for sockets
        place = Place(platform, Path(folder), Path(lines))
        os.environ.update(place.environment() | {"TMPDIR": folder})
        tempfile.tempdir = None  # what the check starts writes there, too
        try:
            find(target)(place)
        except SkippedError as reason:
            place.report("skipped", reason=str(reason))
        except Exception as error:  # its text belongs into the result file, and its trace into the log
            traceback.print_exc()
            place.report("failed", reason=f"{type(error).__name__}: {error}"[:2000])
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
