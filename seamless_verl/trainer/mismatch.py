"""Compares trainer and engines in each step on one sample, and names what is likely at fault where they differ.

A sample that is trained is read again by one engine, whose weights are of the version that the trainer's first
mini-batch has. So the two logprobs of a token are of the same weights, however old the token is; the difference is
what kernels and precisions make, unless weights, tokens or positions are not the same. The engine's own earlier record
of those of its tokens that are of this version tells whether sampling is at fault. Replicas take turns: one that goes
on generating while training computes reads meanwhile; one whose device training needs reads before that.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import ray
import transfer_queue as tq
from numpy.typing import NDArray

from seamless_verl.agent_loops.assignments import TRAIN
from seamless_verl.trainer.token_mask import AGREEMENT, ENGINE, RECORD, figures
from seamless_verl.trajectory.elimination import KV, OF_ENGINE, OF_RECORD, SAMPLING, Form, Logprobs, form_of

logger = logging.getLogger(__name__)
OPEN, UNREAD = "open", "unread"
SHARE = 0.005  # of a step, for which training waits until a sample is read
LEARNED, LEARNED_OF_RECORD = 8, 2  # comparisons from which a run learns what is usual; one engine's own vary less
USUAL = 4.0  # times the median of those is still usual
LEAST, MOST = 0.03, 0.1
"""Nats, of the mean |difference|: bfloat16 makes less, which is never remarked; no precision makes more."""
OF_RECORD_MEAN = (0.01, 0.05)
"""The same of what one engine recorded and reads, whose kernels are the same."""
OF_TOKEN = (4.0, 12.0)
"""And of its largest |difference|."""
DOUBT_S = 20.0  # for what a replica is asked when something is not usual, while training waits
ANOTHER = "only this replica differs"
ALL = (
    "all replicas that were asked differ: engine and trainer read positions, masks or precisions otherwise, or the"
    " weights are exported wrongly"
)
FIRST = "no replica agreed yet: compare both models' settings, above all positions (RoPE), dtype and quantization"
BROKEN = "weights: it has not those that were sent ({0})"
SEALED = "its weights are those that were sent, to the bit: look at its kernels, and at what else is loaded there"
UNSEALED = "most likely its weights, which could not be compared with those that were sent"
WHERE = "docs/right.md says how to go on from here"


@dataclass
class Band:
    """What |difference| in nats is usual in this run, between two bounds of what ever is."""

    least: float = LEAST
    most: float = MOST
    learned: int = LEARNED
    seen: list[float] = field(default_factory=list)
    inside: bool = True

    def limit(self) -> float:
        if len(self.seen) < self.learned:
            return self.most
        return min(self.most, max(self.least, USUAL * median(self.seen)))

    def leaves(self, difference: float, *, learns: bool = True) -> bool:
        """Takes one more; whether it is the first of those that are not usual."""
        usual = difference <= self.limit()
        if learns and usual and len(self.seen) < self.learned:
            self.seen.append(difference)
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


@dataclass
class ComparedSample:
    """One sample by the weights of one version: what the replica replies, and what the trainer's update had."""

    version: int
    replica: str
    sample: StoredSample
    reply: Any
    trainer: Logprobs | None = None  # [R], once the update has computed them
    judged: bool = False


class Mismatch:
    """Compares once a version, and judges what came of it. Owned state: the comparison, bands and means.

    `servers` are the replicas that may be asked, by name, of which `lasting` generate while training computes;
    `finished` are keys of rows that are trained next, the oldest first; `staged` is what the replicas have loaded.
    """

    def __init__(
        self,
        servers: Callable[[], Mapping[str, Any]],
        finished: Callable[[], Sequence[str]],
        *,
        lasting: Callable[[], Sequence[str]] = tuple,
        staged: Callable[[], Any] = tuple,
        temperature: float = 1.0,
    ) -> None:
        self.servers, self.finished, self.lasting, self.staged = servers, finished, lasting, staged
        self.temperature = temperature
        self.now: ComparedSample | None = None
        self.last: tuple[int, float] | None = None  # the version asked for, and when
        self.step_s = 0.0
        self.of_engine, self.of_record = Band(), Band(*OF_RECORD_MEAN, learned=LEARNED_OF_RECORD)
        self.of_token = Band(*OF_TOKEN, learned=LEARNED_OF_RECORD)
        self.means = dict[str, float]()  # of trainer and engine, by replica, as last seen
        self.of_one_version: bool | None = None  # whether the last record without older tokens was usual

    def ask(self, version: int) -> bool:
        """While training waits for groups: asks a replica that it will take the device of; False: no sample has ended.

        A replica that paused before it had read it is asked for another. A pause waits for it for SHARE of a step.
        """
        lasting, replica = self.lasting(), self._in_turn(list(self.servers()), version)
        if replica in lasting or self._is_open(version):
            return True
        keys = self.finished()
        return bool(replica and keys) and self._ask(version, replica, keys[0])

    def begin_update(self, version: int, rows: Mapping[str, Mapping[str, Any]]) -> str:
        """The key of the row whose logprobs the update is to keep, or ""; `rows` are of its first mini-batch, tags by
        key. Asks a replica that goes on generating, unless another was asked for one of these."""
        now, lasting = self.now, self.lasting()
        if (now is None or now.sample.key not in rows or not self._is_open(version)) and lasting and rows:
            own = [key for key, tag in rows.items() if tag.get("max_global_steps") == version]
            behind_older = [key for key in own if rows[key].get("min_global_steps") != version]
            likely = (behind_older if version % 2 else sorted({*own} - {*behind_older})) or own or list(rows)
            self._ask(version, self._in_turn(lasting, version), random.Random(version).choice(likely))
        now = self.now
        return now.sample.key if now is not None and now.version == version and now.sample.key in rows else ""

    def end_update(self, found: Iterable[Logprobs]) -> None:
        """What the workers kept of the row, each of them or none."""
        assert self.now is not None
        length = self.now.sample.response
        self.now.trainer = next((one[:length] for one in found if len(one) >= length), None)

    def _in_turn(self, replicas: Sequence[str], version: int) -> str:
        return sorted(replicas)[version % len(replicas)] if replicas else ""

    def _is_open(self, version: int) -> bool:
        """Whether a replica was asked by the weights of this version, and may have read."""
        return self.now is not None and self.now.version == version and not self._is_unread()

    def _ask(self, version: int, replica: str, key: str) -> bool:
        if (sample := stored_sample(key)) is not None:
            patience_s = SHARE * self._step_s(version)
            reply = self.servers()[replica].reread.remote(sample.ids, version, patience_s, self.temperature)
            self.now = ComparedSample(version, replica, sample, reply)
        return True

    def _step_s(self, version: int) -> float:
        """The seconds since a replica was asked by the weights of an earlier version, for each version since then."""
        now = time.monotonic()
        if self.last is None or self.last[0] != version:
            steps = 1 if self.last is None else version - self.last[0]
            self.step_s = 0.0 if self.last is None else (now - self.last[1]) / steps
            self.last = version, now
        return self.step_s

    def _read(self) -> Logprobs | str:
        """What the replica has read, OPEN as long as it has not, UNREAD if it will not; waits for nothing."""
        assert self.now is not None
        if not ray.wait([self.now.reply], timeout=0)[0]:
            return OPEN
        try:
            read: Logprobs | None = ray.get(self.now.reply)
        except ray.exceptions.RayError as error:  # the replica's death is said elsewhere
            logger.debug("%s did not read: %s", self.now.replica, error)
            return UNREAD
        return UNREAD if read is None or len(read) < len(self.now.sample.ids) - 1 else read

    def _is_unread(self) -> bool:
        return isinstance(read := self._read(), str) and read == UNREAD

    def judge(self) -> dict[str, float]:
        """What came of it, as metrics, once both have computed; says what is likely at fault. Waits for nothing but
        what a replica is asked in doubt. Called while its weights are those that are staged."""
        now = self.now
        if now is None or now.judged or now.trainer is None or isinstance(read := self._read(), str):
            return {}
        now.judged, read = True, read[-now.sample.response :]
        return self._judge_engine(now, read) | self._judge_record(now, read) | {f"{AGREEMENT}usual": self._usual()}

    def _usual(self) -> float:
        return float(self.of_engine.inside and self.of_record.inside and self.of_token.inside)

    def _judge_engine(self, now: ComparedSample, read: Logprobs) -> dict[str, float]:
        assert now.trainer is not None
        trained = now.sample.trained
        found = figures(ENGINE, np.abs(now.trainer - read)[trained])
        if not found:
            return {}
        mean = self.means[now.replica] = found[f"{ENGINE}mean"]
        limit = self.of_engine.limit()
        if self.of_engine.leaves(mean):
            others = [m for name, m in self.means.items() if name != now.replica]
            cause = ANOTHER if any(m <= limit for m in others) else ALL if others else FIRST
            form = form_of(now.trainer[trained], read[trained], limit, self._reader(now, trained))
            cause += f". {OF_ENGINE[form.form].format(form.number)}" if form.form in OF_ENGINE else ""
            self._say(now, found.values(), "the trainer gives", limit, f"{cause}; {self._weights(now)}")
        return found

    def _judge_record(self, now: ComparedSample, read: Logprobs) -> dict[str, float]:
        own = now.sample.trained & (now.sample.versions == now.version)
        found = figures(RECORD, np.abs(read - now.sample.recorded)[own])
        if not found:
            return {}
        mean, largest, limit = found[f"{RECORD}mean"], found[f"{RECORD}max"], self.of_record.limit()
        behind_older = bool((now.sample.versions[now.sample.trained] < now.version).any())
        in_token = self.of_token.leaves(largest, learns=not behind_older)  # else kept KV would become usual
        left = self.of_record.leaves(mean, learns=not behind_older) or in_token
        if left and self.of_engine.inside:  # else the engine reads wrongly
            form = form_of(now.sample.recorded[own], read[own], limit, self._reader(now, own))
            cause = OF_RECORD.get(form.form, SAMPLING).format(form.number)
            # A temperature that is not applied would have shown in samples of one version, too.
            unlike = form.form is Form.ALL and self.of_one_version is None
            if behind_older and (unlike or (self.of_one_version and form.form in (Form.ALL, Form.SCALED))):
                cause = KV.format(now.version)
            self._say(now, found.values(), "it recorded when it generated", limit, cause)
        if not behind_older:
            self.of_one_version = self.of_record.inside and self.of_token.inside
        return found

    def _reader(self, now: ComparedSample, of: NDArray[np.bool_]) -> Callable[[float], Logprobs | None]:
        def read(times: float) -> Logprobs | None:
            server = self.servers()[now.replica]
            found = in_doubt(server.reread.remote(now.sample.ids, now.version, 0.0, self.temperature * times))
            return None if found is None else found[-now.sample.response :][of]

        return read

    def _weights(self, now: ComparedSample) -> str:
        """What the replica's weights are, by its seal."""
        broken = in_doubt(self.servers()[now.replica].verify_weights.remote(now.version, self.staged()))
        return UNSEALED if broken is None else BROKEN.format(broken) if broken else SEALED

    def _say(self, now: ComparedSample, found: Iterable[float], other: str, limit: float, cause: str) -> None:
        logger.warning(
            "%s gives tokens of sample %s other logprobs than %s, by the same weights of version %d: over %d tokens"
            " %.3f nats on the mean, %.2f at most, where a mean up to %.3f is usual. Likely %s. %s",
            *(now.replica, now.sample.key, other, now.version, *found, limit, cause, WHERE),
        )


def in_doubt(reply: Any) -> Any:
    """The reply of a replica, None if it has none in DOUBT_S, or has died."""
    try:
        return ray.get(reply, timeout=DOUBT_S)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(reply)  # else it would read later, for nobody
        return None
    except ray.exceptions.RayError as error:  # the replica's death is said elsewhere
        logger.debug("a replica in doubt did not reply: %s", error)
        return None


def stored_sample(key: str) -> StoredSample | None:
    """A row of TransferQueue that is to be trained; None where an agent loop of the user's recorded no logprobs."""
    fields = ["prompts", "responses", "rollout_log_probs", "weight_version", "response_mask"]
    row = tq.kv_batch_get(keys=[key], partition_id=TRAIN, select_fields=fields)[0]
    if not set(fields) <= set(row.keys()):
        return None
    prompt, response, recorded, versions, mask = (row[name] for name in fields)
    ids = [*prompt.tolist(), *response.tolist()]
    return StoredSample(key, ids, recorded.float().numpy(), versions.numpy(), mask.bool().numpy())
