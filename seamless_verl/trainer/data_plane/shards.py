"""Which of a job's planes a session or a call belongs to: a function of its name, the same for everybody."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import ray
from omegaconf import DictConfig

from seamless_verl.config.schema import SeamlessConfig

NAME = "seamless_data_plane"  # of the first plane's actor, in the job's namespace
_found: dict[tuple[str, str], list[Any]] = {}  # a job's planes, by its cluster's session and its id there


def plane_name(shard: int) -> str:
    return f"{NAME}-{shard}" if shard else NAME


def shard_of(key: str, shards: int) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") % shards


def plane_of(config: DictConfig, key: str) -> Any:
    """The actor for a session or a call of this name, in a job of this config.

    A process asks Ray once for its job's planes: an actor that Ray starts again after a death keeps its handle.
    """
    context = ray.get_runtime_context()
    job = (context.get_session_name(), context.get_job_id())  # a driver may come to see several
    if job not in _found:
        shards = SeamlessConfig.parse(config.get("seamless")).gateway.shards
        _found[job] = [ray.get_actor(plane_name(shard)) for shard in range(shards)]
    return _found[job][shard_of(key, len(_found[job]))]


def share_of(whole: int, shard: int, shards: int) -> int:
    """What a plane has of something countable; all shares add up to the whole."""
    return (whole + shards - 1 - shard) // shards
