"""TransferQueue, for the tests of what the trainer does with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def queue() -> Iterator[Any]:
    """TransferQueue in a Ray of its own."""
    import ray
    import transfer_queue as tq

    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)  # each storage unit asks for one
    try:
        tq.init()
        yield tq
        tq.close()
    finally:
        ray.shutdown()


@pytest.fixture
def clean(queue: Any) -> Iterator[Any]:
    yield queue
    for partition, items in (queue.kv_list() or {}).items():
        if items:
            queue.kv_clear(keys=list(items), partition_id=partition)
