"""What an actor needs after its restart, kept in Ray's own store, which outlives the actor."""

from __future__ import annotations

from typing import Any

import ray
from ray import cloudpickle
from ray.experimental import internal_kv

SPACE = "seamless_verl"


class Shelf:
    """One value under the name of its owner, in this job."""

    def __init__(self, name: str) -> None:
        self.key = f"{ray.get_runtime_context().get_job_id()}:{name}"

    def put(self, value: Any) -> None:
        """Kept when this returns; actor handles may be in it."""
        internal_kv._internal_kv_put(self.key, cloudpickle.dumps(value), overwrite=True, namespace=SPACE)

    def get(self) -> Any:
        """The last value that was put; None before the first."""
        raw = internal_kv._internal_kv_get(self.key, namespace=SPACE)
        return None if raw is None else cloudpickle.loads(raw)

    def clear(self) -> None:
        internal_kv._internal_kv_del(self.key, namespace=SPACE)
