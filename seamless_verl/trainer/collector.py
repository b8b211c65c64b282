"""The garbage collector in Ray's processes.

A full collection visits every object there is, a million of imported modules. That takes a second of an idle core and
several of a busy one, in which the process answers nobody: calls wait, hand-overs wait, finished samples wait.
"""

from __future__ import annotations

import gc


def spare_imports() -> None:
    """Leave alone what this process has by now, in all later collections. Again adds what came since."""
    gc.collect()  # or what nothing needs would stay, too
    gc.freeze()
