"""Which of Ray's errors say that an actor is gone, and why it is, in words.

Ray fails a call of a dead actor with an error for the cause of the death, and not all of these are RayActorErrors: one
that its memory monitor has killed raises OutOfMemoryError, and one that could not start, or start again, raises
ActorUnschedulableError or RuntimeEnvSetupError (`GetErrorInfoFromActorDeathCause` in Ray's source, 2.60). Those of lost
workers and nodes (WorkerCrashedError, NodeDiedError, LocalRayletDiedError) are of Ray's tasks, of which a run has none.
"""

from __future__ import annotations

import re

from ray.exceptions import ActorUnschedulableError, OutOfMemoryError, RayActorError, RuntimeEnvSetupError

from seamless_verl.errors import shorten

ACTOR_GONE: tuple[type[Exception], ...] = (
    RayActorError,
    OutOfMemoryError,
    ActorUnschedulableError,
    RuntimeEnvSetupError,
)
"""The actor has died, or cannot be reached. Who tells these apart catches ActorUnavailableError first: it may live."""
KILLED = "it was killed: its node was short of memory"
SILENT = "connection error code 2. End of file"  # Ray's words for a process that ended, of whose end it knows no more
ENDED = (
    "its process ended at once. A signal killed it (the kernel's when memory is short, which `dmesg` shows), its code "
    "crashed, or code called os._exit"
)
MEMORY_USE = re.compile(r"Memory on the node[^;\n]*")  # the one clause that says how short; pages of advice follow


def death_reason(error: BaseException) -> str:
    """Why the actor is gone: what Ray says, or for a kill by its memory monitor one line that names it."""
    if not isinstance(error, OutOfMemoryError):
        return str(error)
    use = MEMORY_USE.search(str(error))
    return f"{KILLED}. {shorten(error) if use is None else use[0].strip()}"


def last_line(error: BaseException) -> str:
    """The last line of the reason: there Ray has the cause, below the actor's class, id and address."""
    line = death_reason(error).strip().splitlines()[-1].strip()
    return ENDED if SILENT in line else line
