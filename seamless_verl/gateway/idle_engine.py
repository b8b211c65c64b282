"""An EngineClient without an engine of its own: what vLLM's serving classes ask besides `generate`.

The replicas behind it are run by the rollout manager; whatever would touch an engine directly is refused.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, NoReturn

from vllm.engine.protocol import EngineClient
from vllm.v1.engine.exceptions import EngineDeadError


def _elsewhere(what: str) -> NoReturn:
    raise NotImplementedError(f"{what} is the rollout manager's, not the gateway's")


class IdleEngineClient(EngineClient):
    """All of the protocol but `generate` and `abort`."""

    is_running = True
    is_stopped = False
    errored = False
    dead_error = EngineDeadError()

    async def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        _elsewhere("pooling")
        yield

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kwargs: Any) -> None: ...

    async def get_supported_tasks(self) -> tuple[Any, ...]:
        return ("generate",)

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None: ...

    async def check_health(self) -> None: ...

    async def start_profile(self) -> None:
        _elsewhere("profiling")

    async def stop_profile(self) -> None:
        _elsewhere("profiling")

    async def reset_mm_cache(self) -> None: ...

    async def reset_encoder_cache(self) -> None: ...

    async def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        _elsewhere("the prefix cache")

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        _elsewhere("sleep")

    async def wake_up(self, *args: Any, **kwargs: Any) -> None:
        _elsewhere("waking up")

    async def is_sleeping(self) -> bool:
        return False

    async def add_lora(self, *args: Any, **kwargs: Any) -> bool:
        _elsewhere("loading adapters")

    async def pause_generation(self, *args: Any, **kwargs: Any) -> None:
        _elsewhere("pausing")

    async def resume_generation(self) -> None:
        _elsewhere("resuming")

    async def is_paused(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None: ...
