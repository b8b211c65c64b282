"""Generation calls, each of which runs to its end over as many replicas and pauses as it takes.

Invariants:
- Every call that began is running or has exactly one outcome; one whose client left is CANCELLED.
- A call holds a slot from before its request is sent until the engine has ended it or it was aborted.
- Calls wait in the order of precedence.py, also after a cut.
- `produced` has the ids of all chunks in order, after those that the call began with. The prompt of each request is the
  call's prompt and `produced`, and its budgets are those of the call less what is produced.
- A call's `finish` is set once.
- The time in which a call of a session waits for a slot, or is on a paused replica, is counted for its session.

A continuation does not carry everything. The engine sees the produced tokens as prompt, so presence and frequency
penalties restart unless it reads `resumed_tokens`. A grammar is carried only with `grammars_resume`, by which engines
advance a new one over these tokens; without it, a call that was cut within a grammar fails with that reason.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from seamless_verl.errors import (
    CallError,
    CallGrammarError,
    CallLossesError,
    CallRefusedError,
    IntegrityError,
    ReplicaLostError,
)
from seamless_verl.rollout.engine import EngineRequest
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.observation import CallWait, LengthForecast, ReplicaLoad, RolloutObservation
from seamless_verl.rollout.paused_time import PausedTime, WaitingCall
from seamless_verl.rollout.precedence import CallOrder, Precedence
from seamless_verl.rollout.replica import DEAD, SERVING, Slot
from seamless_verl.rollout.shared_samples import SharedSample, SharedSamples
from seamless_verl.trajectory.records import Finish, TokenChunk, empty_chunk, tokens

AFFINITY_TOKENS = 256  # tokens of the prompt that identify it: system prompt and tools distinguish agents
ENDS = (Finish.STOP, Finish.LENGTH, Finish.CANCELLED, Finish.FAILED)
SILENT_CUT = empty_chunk(Finish.CUT)  # for an engine that ends its stream without a finish reason


@dataclass(slots=True)
class Reading:
    """What a call's reader says of it: that it `ended`, as at a stop string, which engines do not look for."""

    ended: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A generation that an agent requested: prompt_ids int32 [P], and vLLM's sampling fields as plain values.

    Calls with the same `key`, a session's name, prefer the same replica; without a key the beginning of the prompt is
    used. `group` is the prompt whose samples the trainer takes together, "" for none. `produced` int32 has what the
    call generated before the process that ran it died: it continues after these tokens, within its budget. `timed`
    calls are of a session whose agent has a time limit, those of a `validation` are counted apart as well. `media` go
    to the engine as they are. `routes_from` asks for routes, as in EngineRequest; where tokens were `produced`, for
    those of the tokens that follow.
    """

    call_id: str
    prompt_ids: array[int]
    sampling: Mapping[str, Any]
    key: str = ""
    produced: array[int] = field(default_factory=lambda: tokens(()))
    timed: bool = False
    group: str = ""
    validation: bool = False
    media: bytes = b""
    routes_from: int | None = None
    traceparent: str = ""  # of the agent's request, by which its traces and ours are one
    reading: Reading = field(default_factory=Reading, compare=False)

    @property
    def affinity(self) -> str:
        return self.key or blake2b(self.prompt_ids[:AFFINITY_TOKENS].tobytes(), digest_size=8).hexdigest()


@dataclass(slots=True)
class AttemptTimes:
    """A request to a replica, in seconds since the epoch: when it was to wait for a slot, got one, and ended."""

    asked: float
    granted: float = 0.0
    ended: float = 0.0
    replica: str = ""


@dataclass(frozen=True, slots=True)
class CallTimes:
    """A call that has ended, and its requests; of `prompt` and `generated` tokens, the last of weights of `version`."""

    key: str
    call_id: str
    began: float
    ended: float
    attempts: Sequence[AttemptTimes]
    finish: str
    prompt: int
    generated: int
    version: int
    traceparent: str = ""


class CallProgress:
    """The state of one call: what it has produced, and what its next request to a replica is."""

    def __init__(
        self, call: Call, place: Precedence, first_prompt: str, *, max_losses: int, grammars_resume: bool
    ) -> None:
        self.call, self._place, self.first_prompt = call, place, first_prompt
        self.produced = call.produced[:]
        self.finish: Finish | None = None
        self._max_losses, self._grammars_resume = max_losses, grammars_resume
        self._attempts = self._resumed_tokens = self._losses = self._version = 0
        self._replica = ""
        self.replicas = set[str]()  # that have generated some of it
        self.holds = ""  # the replica on which it has a slot
        self.since = time.monotonic()  # its last token, else its last request, else its begin
        self.began, self.attempts = time.time(), list[AttemptTimes]()

    @property
    def place(self) -> Precedence:
        """Its place where it waits next."""
        return self._place.continuing() if self.produced else self._place

    def next_request(self) -> EngineRequest:
        """The prompt with all that is produced, and the remaining budget."""
        name = f"{self.call.call_id}#{self._attempts}"
        self._attempts, self._resumed_tokens = self._attempts + 1, len(self.produced)
        self.since = time.monotonic()
        prompt_ids, sampling, routes_from = self.call.prompt_ids, self.call.sampling, self.call.routes_from
        if self.produced:
            prompt_ids, sampling = prompt_ids + self.produced, self._remaining_sampling()
            routes_from = routes_from and len(prompt_ids)  # what is produced keeps its routes
        beside = (len(self.produced), self.call.key, self.place.priority, self.call.media, routes_from)
        return EngineRequest(name, prompt_ids, sampling, *beside, self.first_prompt)

    def add(self, chunk: TokenChunk) -> TokenChunk | None:
        """Adds an engine's chunk; returns the chunk for the caller, None if it has nothing for the caller."""
        if chunk.ids:
            self._version, self._replica, self.since = chunk.version, chunk.replica, time.monotonic()
            self.replicas.add(chunk.replica)
            self.produced.extend(chunk.ids)
        if chunk.finish_reason is Finish.CUT:  # a cut does not end the call
            return replace(chunk, finish_reason=None, stop_reason=None) if chunk.ids else None
        self.finish = chunk.finish_reason
        if self.finish is Finish.FAILED:
            reason = f"replica {chunk.replica} says: {chunk.stop_reason}"
            return replace(chunk, stop_reason=None, error=CallRefusedError(self.call.call_id, reason))
        return chunk if chunk.ids or self.finish else None

    def end_if_cannot_continue(self, unexplained: str | None) -> TokenChunk | None:
        """After a cut: the call's last chunk if it cannot continue.

        `unexplained` describes a cut that no command explains. Too many of these in a row without a token fail the
        call.
        """
        if self.finish is not None:
            return None
        if self.budget() == 0:
            return self._end(Finish.LENGTH)
        if self.produced and self.call.sampling.get("structured_outputs") and not self._grammars_resume:
            reason = f"cut after {len(self.produced)} tokens of a grammar, which cannot be resumed elsewhere"
            return self._end(Finish.FAILED, CallGrammarError(self.call.call_id, reason))
        if len(self.produced) > self._resumed_tokens:
            self._losses = 0
        elif unexplained is not None:
            self._losses += 1
        if self._losses > self._max_losses:
            reason = f"{self._losses} times in a row without a token, last: {unexplained}"
            return self._end(Finish.FAILED, CallLossesError(self.call.call_id, reason))
        return None

    def _end(self, finish: Finish, error: CallError | None = None) -> TokenChunk:
        self.finish = finish
        return empty_chunk(finish, version=self._version, replica=self._replica, error=error)

    def times(self) -> CallTimes:
        """Of a call that ends now."""
        call = self.call
        return CallTimes(
            call.key,
            call.call_id,
            self.began,
            time.time(),
            self.attempts,
            finish=str(self.finish or Finish.FAILED),
            prompt=len(call.prompt_ids),
            generated=len(self.produced) - len(call.produced),
            version=self._version,
            traceparent=call.traceparent,
        )

    def budget(self) -> int | None:
        """Tokens that may still be generated; None: as many as the model's length allows."""
        limit = self.call.sampling.get("max_tokens")
        return None if limit is None else max(0, limit - len(self.produced))

    def _remaining_sampling(self) -> dict[str, Any]:
        sampling = {**self.call.sampling, "max_tokens": self.budget()}
        if sampling.get("min_tokens"):
            sampling["min_tokens"] = max(0, sampling["min_tokens"] - len(self.produced))
        if sampling.get("seed") is not None:
            sampling["seed"] = derived_seed(sampling["seed"], len(self.produced))
        return sampling


def derived_seed(seed: int, produced: int) -> int:
    """The seed of a continuation after `produced` tokens, 0 to 2^63 - 1; the call's own would repeat its noise."""
    digest = blake2b(f"{seed}#{produced}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Calls:
    """Runs calls over a fleet.

    A call fails when `max_losses` + 1 replicas in a row are lost during it, or cut it without a command, and give no
    token. `grammars_resume`: the engines advance a grammar over the resumed tokens of a request. With `shares`, samples
    that ended are kept for engines that draft. `validation_first`: training waits for validations.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        max_losses: int = 8,
        grammars_resume: bool = False,
        shares: bool = False,
        validation_first: bool = True,
    ) -> None:
        self._fleet, self._max_losses, self._grammars_resume = fleet, max_losses, grammars_resume
        self._order, self._validation_first = CallOrder(), validation_first
        self._running: set[CallProgress] = set()
        self._begun = self._tokens = self._validation_tokens = 0
        self._tokens_of: Counter[str] = Counter()  # by replica
        self._last_token: dict[str, float] = {}  # when a replica gave one, on the monotonic clock
        self._ended: Counter[Finish] = Counter()
        self._lengths = LengthForecast()
        self._samples = SharedSamples() if shares else None
        self.paused_time = PausedTime()
        self.on_ended: Callable[[CallTimes], None] | None = None  # for traces

    async def stream(self, call: Call) -> AsyncGenerator[TokenChunk, None]:
        """The call's tokens as they arrive; the last chunk has the finish reason, and the `error` if it is FAILED.

        Closing the generator ends the call as CANCELLED, or as STOP if its reader found an end. Other errors than a
        lost replica, such as a defect of an engine, are raised, and the call counts as FAILED.
        """
        place, prompt = self._order.enter(
            call.prompt_ids,
            key=call.key,
            group=call.group,
            version=self._fleet.committed,
            first=call.validation and self._validation_first,
        )
        first_prompt = "" if self._samples is None else prompt or self._order.first_prompt(call.key)
        progress = CallProgress(
            call, place, first_prompt, max_losses=self._max_losses, grammars_resume=self._grammars_resume
        )
        waiting = self.paused_time.begin(call.key, counted=call.timed)
        self._begun += 1
        self._running.add(progress)
        try:
            if progress.produced and (last := progress.end_if_cannot_continue(None)) is not None:
                yield last  # it used up its budget in an earlier process
            while progress.finish is None:
                async with aclosing(self._attempt(progress, prompt, waiting)) as chunks:
                    async for chunk in chunks:
                        self._tokens += len(chunk.ids)
                        self._validation_tokens += len(chunk.ids) * call.validation
                        self._tokens_of[chunk.replica] += len(chunk.ids)
                        if chunk.ids:
                            self._last_token[chunk.replica] = progress.since
                        yield chunk
        except (GeneratorExit, asyncio.CancelledError):
            progress.finish = progress.finish or Finish.CANCELLED
            raise
        finally:
            self._running.remove(progress)
            self._ended[progress.finish or Finish.FAILED] += 1
            if self.on_ended is not None:
                self.on_ended(progress.times())
            if progress.finish in (Finish.STOP, Finish.LENGTH):
                self._lengths.add(len(progress.produced))
                if self._samples is not None and first_prompt:
                    self._samples.add(first_prompt, call.prompt_ids, progress.produced, progress.replicas)

    def group_began(self, group: str) -> None:
        """A session of this group was opened: its calls are as old as the version that is committed now."""
        self._order.group_began(group, self._fleet.committed)

    def session_ended(self, key: str) -> None:
        """No further call of this session comes."""
        self.paused_time.forget(key)
        self._order.conversation_ended(key)

    def metrics(self) -> dict[str, float]:
        ended = {f"calls/{finish}": float(self._ended[finish]) for finish in ENDS}
        return ended | {
            "calls/begun": float(self._begun),
            "calls/running": float(len(self._running)),
            "calls/tokens": float(self._tokens),
            "calls/validation_tokens": float(self._validation_tokens),
        }

    def observe(self, urgent: Collection[str], finished: int) -> RolloutObservation:
        """The load of each replica, with the calls of `urgent` groups counted, and `finished` groups."""
        running: Counter[str] = Counter()
        urgently: Counter[str] = Counter()
        longest: dict[str, float] = {}
        for progress in self._running:
            if name := progress.holds:
                running[name] += 1
                urgently[name] += progress.call.group in urgent
                expected = self._lengths.remaining(len(progress.produced), progress.budget())
                longest[name] = max(longest.get(name, 0.0), expected)
        loads = tuple(
            ReplicaLoad(
                view.replica_id,
                running[view.replica_id],
                urgently[view.replica_id],
                0 if view.state is DEAD else view.capacity,
                self._tokens_of[view.replica_id],
                longest.get(view.replica_id, 0.0),
                view.state is SERVING,
            )
            for view in self._fleet.view
        )
        return RolloutObservation(loads, self._fleet.slots.waiting, finished)

    def take_samples(self, replica_id: str) -> list[SharedSample]:
        """Samples of other replicas, of those first prompts that this one has calls of now; each once."""
        first_prompts = {one.first_prompt for one in self._running if one.holds == replica_id and one.first_prompt}
        return [] if self._samples is None else self._samples.take(replica_id, first_prompts)

    def replica_began(self, replica_id: str) -> None:
        """A new process is this replica: it has none of the samples that were taken for it."""
        if self._samples is not None:
            self._samples.forget_replica(replica_id)

    def waits(self) -> list[CallWait]:
        """All calls, as they wait now."""
        now = time.monotonic()
        return [
            CallWait(one.call.call_id, one.call.key, one.call.group, one.holds, now - one.since)
            for one in self._running
        ]

    def token_s(self, replica_id: str) -> float:
        """Seconds since a call got a token of this replica; infinite if none did."""
        last = self._last_token.get(replica_id)
        return math.inf if last is None else time.monotonic() - last

    def check_integrity(self) -> None:
        """Raises IntegrityError unless calls begun = running + ended."""
        if self._begun != (accounted := len(self._running) + self._ended.total()):
            raise IntegrityError("calls running + ended", self._begun, accounted)

    async def _attempt(
        self, progress: CallProgress, prompt: str, waiting: WaitingCall
    ) -> AsyncGenerator[TokenChunk, None]:
        """The chunks of one replica, until the call's end or a cut; `waiting` counts its waiting time."""
        slot: Slot | None = None
        finish_reason, unexplained = None, None
        progress.attempts.append(attempt := AttemptTimes(time.time()))
        try:
            waiting.set(True)
            slot = await self._fleet.slots.acquire(progress.call.affinity, progress.place, prompt)
            waiting.set(slot.replica.state is not SERVING)
            slot.on_pause = waiting.set
            if not slot.attached:  # dropped between the grant and this task's next turn
                return
            progress.holds = attempt.replica = slot.replica.replica_id
            attempt.granted = time.time()
            async with aclosing(slot.engine.generate(progress.next_request())) as chunks:
                while finish_reason is None:
                    chunk = await anext(chunks, SILENT_CUT)
                    visible = progress.add(chunk)
                    if (finish_reason := chunk.finish_reason) is not None:
                        self._learn_length(progress, prompt)
                        replica = slot.replica.replica_id
                        unexplained = f"cut by replica {replica}, which was not paused" if slot.unexplained else None
                        progress.holds, attempt.ended = "", time.time()
                        slot.release()  # a slow reader holds no slot
                    if visible is not None:
                        yield visible
        except GeneratorExit:
            if progress.finish is None and progress.call.reading.ended:
                progress.finish = Finish.STOP
                self._learn_length(progress, prompt)
            raise
        except ReplicaLostError as loss:
            assert slot is not None
            self._fleet.lost(slot.replica.replica_id, loss.reason, engine=slot.engine)
            unexplained = str(loss)
        finally:
            progress.holds = ""
            attempt.ended = attempt.ended or time.time()
            attempt.granted = attempt.granted or attempt.ended
            waiting.set(False)
            if slot is not None:
                slot.on_pause = None
                slot.release()
        if (last := progress.end_if_cannot_continue(unexplained)) is not None:
            yield last

    def _learn_length(self, progress: CallProgress, prompt: str) -> None:
        """Of a call that ended: others of its prompt may be as long."""
        if prompt and progress.finish in (Finish.STOP, Finish.LENGTH):
            self._order.lengths.add(prompt, len(progress.produced))
            self._fleet.slots.foresee(prompt, self._order.lengths.shortness(prompt))
