"""The settings of the live view: `seamless.view`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from seamless_verl.runtime.fields import Doc, NotNegative, Text

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ViewConfig:
    """The page that shows a run, served by a process of its own on the machine that starts the run."""

    enabled: Annotated[bool, Doc("serve a page that shows what the run does; its address is printed to stderr")] = False
    host: Annotated[
        Text,
        Doc(
            "address of this machine at which it listens: `127.0.0.1` for this machine alone, `0.0.0.0` for all that "
            "reach it. The page shows all that agents read and wrote to whoever has its address, over plain HTTP"
        ),
    ] = LOOPBACK
    port: Annotated[NotNegative, Doc("where it listens; `0` is any free port")] = 0
