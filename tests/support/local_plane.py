"""A data plane outside of an actor, and a state store in memory."""

from __future__ import annotations

from typing import Any

from seamless_verl.data_plane.actor import DataPlane
from seamless_verl.data_plane.settings import PlaneSettings


class MemoryStore:
    """A state store for one process."""

    value: Any = None

    async def put(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value

    async def clear(self) -> None:
        self.value = None


class LocalDataPlane(DataPlane):
    """A data plane that its creator starts."""

    def __init__(self, settings: PlaneSettings) -> None:
        super().__init__(settings, store=MemoryStore(), paused_store=MemoryStore())  # type: ignore[arg-type]

    def set_up_process(self) -> None: ...
