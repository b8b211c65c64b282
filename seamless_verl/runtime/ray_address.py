"""Which Ray cluster a run names, by its settings and the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

LOCAL = "local"  # starts a cluster, whatever runs already
TOKEN, TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def named_cluster(address: object, environ: Mapping[str, str] = os.environ) -> str:
    """The address by which `ray.init(address=...)` finds a cluster; empty where none is named.

    As Ray 2.60 does it: RAY_ADDRESS counts where `address` is absent or `auto`.
    """
    given = "" if address in (None, "", "auto") else str(address)
    return given or environ.get("RAY_ADDRESS") or str(address or "")


def send_token(environ: MutableMapping[str, str] = os.environ) -> None:
    """Has Ray show a cluster that it joins the token that is kept here. Called before Ray is imported.

    Ray 2.60 makes one for a cluster of its own, with which `ray start` makes one that wants it; but `ray.init` shows
    it only where RAY_AUTH_MODE says so. A cluster that wants none does not look at it.
    """
    kept = environ.get(TOKEN_PATH) or Path(environ.get("HOME") or "~").expanduser() / ".ray" / "auth_token"
    if environ.get(TOKEN) or Path(kept).is_file():
        environ.setdefault("RAY_AUTH_MODE", "token")
