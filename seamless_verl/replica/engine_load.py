"""Loads a version into an engine while it is paused, and again where it then does not hold what was staged."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from vllm.platforms import current_platform

from seamless_verl.errors import SealError, shorten
from seamless_verl.replica.worker_extension import check_replies
from seamless_verl.runtime.console import show_line

logger = logging.getLogger(__name__)
REAL_TIME_PRIORITY = "real_time_priority"  # of a platform whose processes share cores: a context manager
Step = Callable[[], Awaitable[None]]


async def load_sealed(engine: Any, weights: Any, replica: int, *, load: Step, end: Callable[[], None]) -> None:
    """Has the engine's workers map the weights and loads them; twice if the seal does not fit, then the server ends.

    Where the staged weights are not what the trainer had another load would not help.
    """
    for then in ("It loads again", "It is ended"):
        try:
            check_replies(await engine.collective_rpc("map_staged", args=(pickle.dumps(weights),)))
        except Exception as error:
            show_broken_seal(replica, error, "It waits for the next version")
            raise
        try:
            await load()
            return
        except Exception as error:
            show_broken_seal(replica, error, then)
    end()


async def broken_seal(engine: Any, weights: Any) -> str | None:
    """What the engine holds and was not staged, "" if nothing; None if that cannot be seen. It may generate meanwhile,
    but its step waits for the comparison of all that was loaded."""
    try:
        sealed = check_replies(await engine.collective_rpc("verify_weights", args=(pickle.dumps(weights),)))
    except Exception as error:  # its text is what the trainer says
        if SealError.__name__ in str(error):
            return shorten(error)
        logger.warning("its weights could not be compared with those that were staged: %s", shorten(error))
        return None
    return "" if all(sealed) else None


def show_broken_seal(replica: int, error: Exception, then: str) -> None:
    """One line on the run's console for a seal that does not fit; any other error is raised again.

    A worker's error is text when it has left the engine's processes.
    """
    if SealError.__name__ not in str(error):
        raise error
    show_line(f"replica-{replica}: {shorten(error)}. {then}")


async def load_paused(
    engine: Any,
    arguments: tuple[int, int],
    *,
    pause: Step,
    commit: Step,
    resume: Step,
    loading: Callable[[], AbstractContextManager[Any]],
    agreed: bool,
) -> float:
    """Pauses, loads the mapped version with these arguments of the workers' method, commits it and resumes.

    Returns the seconds from the load's beginning to the resume, both on the clock of the first worker. From the pause
    to the commit it is `loading`. With `agreed` data-parallel engines agree on the step after which all of them pause.
    """
    with ExitStack() as until_resumed:
        with ExitStack() as until_committed:

            async def pause_at_last_step() -> None:
                await pause()
                until_resumed.enter_context(getattr(type(current_platform), REAL_TIME_PRIORITY, nullcontext)())
                until_committed.enter_context(loading())  # the engine's last step is over

            began = await pause_and_load(engine, arguments, pause_at_last_step, agreed)
            await commit()
        return await resume_and_time(engine, resume) - began


async def pause_and_load(engine: Any, arguments: tuple[int, int], pause: Step, agreed: bool) -> float:
    """Returns the time at which the engine began to load. The load is sent right behind the pause, and the engine runs
    both in this order; with `agreed` it is sent when all have paused."""
    if agreed:
        await pause()
        began = await engine.collective_rpc("load_staged", args=arguments)  # verl's own returns no replies
    else:
        _, began = await gather_all(pause(), engine.collective_rpc("load_staged", args=arguments))
    return float(check_replies(began)[0])


async def resume_and_time(engine: Any, resume: Step) -> float:
    """Resumes; returns the time of the resume. The clock is requested before it: requested after it, the reply would
    come after the next step."""
    times, _ = await gather_all(engine.collective_rpc("clock"), resume())
    return float(times[0])


async def gather_all(*awaitables: Awaitable[Any]) -> list[Any]:
    """Their results, when all have ended; raises the first error among them."""
    outcomes = await asyncio.gather(*awaitables, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes
