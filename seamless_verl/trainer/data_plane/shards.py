"""Which of a job's planes a session or a call belongs to: a function of its name, the same for everybody."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import ray
from omegaconf import DictConfig

from seamless_verl.config.schema import SeamlessConfig

NAME = "seamless_data_plane"  # of the first plane's actor, in the job's namespace


def plane_name(shard: int) -> str:
    return f"{NAME}-{shard}" if shard else NAME


def shard_of(key: str, shards: int) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") % shards


def plane_of(config: DictConfig, key: str) -> Any:
    """The actor for a session or a call of this name, in a job of this config."""
    shards = SeamlessConfig.parse(config.get("seamless")).gateway.shards
    return ray.get_actor(plane_name(shard_of(key, shards)))


def share_of(whole: int, shard: int, shards: int) -> int:
    """What a plane has of something countable; all shares add up to the whole."""
    return (whole + shards - 1 - shard) // shards
