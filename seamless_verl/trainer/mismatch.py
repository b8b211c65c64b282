"""Compares trainer and engines in each step on one sample, and names what is likely at fault where they differ.

A sample that is to be trained is read again by one engine, whose weights are of the version that the trainer's first
mini-batch has. So the two logprobs of a token are of the same weights, however old the token is; the difference is
what kernels and precisions make, unless weights, tokens or positions are not the same. The engine's own earlier record
of those of its tokens that are of this version tells whether sampling is at fault. Replicas take turns.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import ray
import transfer_queue as tq
from numpy.typing import NDArray

from seamless_verl.agent_loops.assignments import TRAIN
from seamless_verl.trainer.token_mask import AGREEMENT, ENGINE, RECORD, figures

logger = logging.getLogger(__name__)
OPEN, UNREAD = "open", "unread"
SHARE = 0.005  # of a step, for which training waits until a sample is read
LEARNED = 8  # comparisons from which a run learns what difference is usual
USUAL = 4.0  # times the median of those is still usual
LEAST, MOST = 0.01, 0.1
"""Nats, of the mean |difference|: bfloat16 makes less, which is never remarked; no precision makes more."""
ANOTHER = "only this replica differs: its weights are not those that were sent"
ALL = (
    "all replicas that were asked differ: engine and trainer read positions, masks or precisions otherwise, or the"
    " weights are exported wrongly"
)
FIRST = "no replica agreed yet: compare both models' settings, above all positions (RoPE), dtype and quantization"
SAMPLING = (
    "the trainer agrees with what the engine reads now: what it recorded while it generated is at fault. Look at"
    " temperature, penalties and grammars, and at KV kept from older weights"
)
WHERE = 'docs/failures.md, "Is what I train on right?", says how to go on from here'


@dataclass
class Band:
    """What mean |difference| in nats is usual in this run."""

    seen: list[float] = field(default_factory=list)
    inside: bool = True

    def limit(self) -> float:
        if len(self.seen) < LEARNED:
            return MOST
        return min(MOST, max(LEAST, USUAL * median(self.seen)))

    def leaves(self, mean: float) -> bool:
        """Takes one more; whether it is the first of those that are not usual."""
        usual = mean <= self.limit()
        if usual and len(self.seen) < LEARNED:
            self.seen.append(mean)
        left, self.inside = self.inside and not usual, usual
        return left


class StoredSample(NamedTuple):
    """A row: its key, its ids, and of its response [R] what the engine recorded, the versions, and whether trained."""

    key: str
    ids: list[int]
    recorded: NDArray[np.float32]
    versions: NDArray[np.int64]
    trained: NDArray[np.bool_]

    @property
    def response(self) -> int:
        return len(self.recorded)


class RereadRequest(NamedTuple):
    version: int
    replica: str
    sample: StoredSample
    reply: Any


class Mismatch:
    """Asks a replica once a version, and judges what came of it. Owned state: the open question, bands and means.

    `servers` are the replicas that may be asked, by name; `finished` are keys of rows that are trained next, the oldest
    first.
    """

    def __init__(self, servers: Callable[[], Mapping[str, Any]], finished: Callable[[], Sequence[str]]) -> None:
        self.servers, self.finished = servers, finished
        self.asked: RereadRequest | None = None
        self.last: tuple[int, float] | None = None  # the version asked for, and when
        self.step_s = 0.0
        self.of_engine, self.of_record = Band(), Band()
        self.means = dict[str, float]()  # of trainer and engine, by replica, as last seen
        self.record: dict[str, float] = {}

    def ask(self, version: int) -> bool:
        """Asks a replica to read the oldest finished sample by this version's weights, unless one was; False: none is.

        A replica that paused before it had read it is asked for another. A pause waits for it for SHARE of a step.
        """
        if self.asked is not None and self.asked.version == version and not self._is_unread():
            return True
        keys, servers = self.finished(), self.servers()
        if not keys or not servers:
            return False
        replica = sorted(servers)[version % len(servers)]
        if (sample := stored_sample(keys[0])) is None:
            return True
        reply = servers[replica].reread.remote(sample.ids, version, SHARE * self._step_s(version))
        self.asked = RereadRequest(version, replica, sample, reply)
        return True

    def _step_s(self, version: int) -> float:
        """The seconds since a replica was asked by the weights of an earlier version, for each version since then."""
        now = time.monotonic()
        if self.last is None or self.last[0] != version:
            steps = 1 if self.last is None else version - self.last[0]
            self.step_s = 0.0 if self.last is None else (now - self.last[1]) / steps
            self.last = version, now
        return self.step_s

    def reply(self, version: int, keys: Sequence[str]) -> str:
        """For the update's workers: the reply to the question, if it is there and its sample is in the batch; or ""."""
        self.record, asked = {}, self.asked
        if asked is None or asked.version != version or asked.sample.key not in keys:
            return ""
        read = self._read()
        if not isinstance(read, np.ndarray) or len(read) < len(asked.sample.ids) - 1:
            return ""
        read = read[-asked.sample.response :]
        own = asked.sample.trained & (asked.sample.versions == version)
        self.record = figures(RECORD, np.abs(read - asked.sample.recorded)[own])
        return json.dumps({asked.sample.key: read.tolist()})

    def _read(self) -> NDArray[np.float32] | str:
        """What the replica has read, OPEN as long as it has not, UNREAD if it will not; waits for nothing."""
        assert self.asked is not None
        if not ray.wait([self.asked.reply], timeout=0)[0]:
            return OPEN
        try:
            read: NDArray[np.float32] | None = ray.get(self.asked.reply)
        except ray.exceptions.RayError as error:  # the replica's death is said elsewhere
            logger.debug("%s did not read: %s", self.asked.replica, error)
            return UNREAD
        return UNREAD if read is None else read

    def _is_unread(self) -> bool:
        return isinstance(read := self._read(), str) and read == UNREAD

    def judge(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """What came of it, as metrics beside those of the update's workers; says what is likely at fault."""
        mean = metrics.get(f"{ENGINE}mean")
        if mean is None or self.asked is None:
            return {}
        replica = self.asked.replica
        self.means[replica] = mean
        if self.of_engine.leaves(mean):
            others = [m for name, m in self.means.items() if name != replica]
            agree = [m <= self.of_engine.limit() for m in others]
            cause = ANOTHER if any(agree) else ALL if others else FIRST
            self._say(mean, self.of_engine, "the trainer gives", cause)
        fresh = self.record.get(f"{RECORD}mean")
        if fresh is not None and self.of_record.leaves(fresh) and self.of_engine.inside:
            self._say(fresh, self.of_record, "it recorded when it generated", SAMPLING)
        usual = self.of_engine.inside and self.of_record.inside
        return {**self.record, f"{AGREEMENT}usual": float(usual)}

    def _say(self, mean: float, band: Band, other: str, cause: str) -> None:
        assert self.asked is not None
        logger.warning(
            "%s gives the %d tokens of sample %s other logprobs than %s, by the same weights of version %d: %.3f nats"
            " on the mean, where up to %.3f is usual. Likely %s. %s",
            *(self.asked.replica, self.asked.sample.response, self.asked.sample.key, other, self.asked.version),
            *(mean, band.limit(), cause, WHERE),
        )


def stored_sample(key: str) -> StoredSample | None:
    """A row of TransferQueue that is to be trained; None where an agent loop of the user's recorded no logprobs."""
    fields = ["prompts", "responses", "rollout_log_probs", "weight_version", "response_mask"]
    row = tq.kv_batch_get(keys=[key], partition_id=TRAIN, select_fields=fields)[0]
    if not set(fields) <= set(row.keys()):
        return None
    prompt, response, recorded, versions, mask = (row[name] for name in fields)
    ids = [*prompt.tolist(), *response.tolist()]
    return StoredSample(key, ids, recorded.float().numpy(), versions.numpy(), mask.bool().numpy())
