"""Checks of the live view: the trainer mode it is for, and its address.

Sources: seamless_verl/runtime/view_process.py, seamless_verl/runtime/run_description.py.
"""

from __future__ import annotations

import socket

from seamless_verl.config.checks.gateway import LAST_PORT
from seamless_verl.config.checks.roles import joins_cluster
from seamless_verl.config.checks.settings import Problem, Settings, check

ENABLED, HOST, PORT = "seamless.view.enabled", "seamless.view.host", "seamless.view.port"
FOLDER = "trainer.default_local_dir"


@check
def check_view(settings: Settings) -> list[Problem]:
    """The view shows what our trainer writes, in a folder that the machine that starts the run can read."""
    if not settings.seamless.view.enabled:
        return []
    if settings.mode != "seamless":
        reason = "only the seamless trainer writes what the view shows"
        return [Problem(ENABLED, True, reason, "Set trainer.v1.trainer_mode=seamless, or leave the view out")]
    if not joins_cluster(settings):
        return []
    reason = "the view runs where this command runs, and the trainer may write its folder on another machine"
    way_out = f"Set {FOLDER} to a folder that all machines share"
    return [Problem(ENABLED, True, reason, way_out, warning=True)]


@check
def check_view_address(settings: Settings) -> list[Problem]:
    """This machine has the address, and the port is free there, also of the gateway's ports."""
    view, gateway = settings.seamless.view, settings.seamless.gateway
    if not view.enabled:
        return []
    way_out = f"Set {PORT} to another one, or to 0 for any that is free"
    if view.port > LAST_PORT:
        return [Problem(PORT, view.port, f"is more than {LAST_PORT}, the last port there is", way_out)]
    if view.port and gateway.enabled and view.port in range(gateway.port, gateway.port + gateway.shards):
        return [Problem(PORT, view.port, "is a port of the gateway", way_out)]
    try:
        socket.create_server((view.host, 0)).close()
    except OSError as error:
        reason = f"this machine cannot listen there: {error.strerror or error}"
        return [Problem(HOST, view.host, reason, f"Set {HOST}=127.0.0.1, or 0.0.0.0 for every address")]
    try:
        socket.create_server((view.host, view.port)).close()
    except OSError as error:
        return [Problem(PORT, view.port, f"cannot be listened to: {error.strerror}", way_out)]
    return []
