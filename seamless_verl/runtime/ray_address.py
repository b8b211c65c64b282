"""Which Ray cluster a run names, by its settings and the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

LOCAL = "local"  # starts a cluster, whatever runs already


def named_cluster(address: object, environ: Mapping[str, str] = os.environ) -> str:
    """The address by which `ray.init(address=...)` finds a cluster; empty where none is named.

    As Ray 2.60 does it: RAY_ADDRESS counts where `address` is absent or `auto`.
    """
    given = "" if address in (None, "", "auto") else str(address)
    return given or environ.get("RAY_ADDRESS") or str(address or "")
