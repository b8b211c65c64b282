"""A thousand random events with a sampler: groups are submitted, end, are reopened, trained and dropped, and the run is
killed and resumed from its last checkpoint. Each generated token is trained, dropped with a reason, or in the queue."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.sampled_prompts import TRAIN, Loops, end, trainer

from seamless_verl.journal import GroupOutcome

pytestmark = [pytest.mark.integration, pytest.mark.long]
OPTIONS: dict[str, dict[str, Any]] = {"dars": {"most": 10}}
OUTSTANDING, BATCH = 6, 2
KINDS = {"submit": 4.0, "end": 8.0, "look": 2.0, "train": 4.0, "save": 1.0, "kill": 0.6}


@dataclass
class TokenBooks:
    """Where the tokens of the samples that have ended are: `rows` are those in the queue, by key."""

    generated: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    rows: dict[str, int] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)  # of trained groups

    def take(self, uid: str) -> list[int]:
        """The tokens of a group's rows, which leave the queue."""
        keys = [key for key in self.rows if key.rsplit("_", 2)[0] == uid]
        return [self.rows.pop(key) for key in keys]

    def check(self, queued: set[str]) -> None:
        assert self.generated == self.trained + self.dropped.total() + sum(self.rows.values())
        assert queued == self.rows.keys(), "a row was lost, or is there twice"


@dataclass
class Checkpoint:
    """What a checkpoint has: the queue's tags and columns, the sampler's state, the step; and the books of then."""

    step: int
    sampler: str
    tags: Mapping[str, Mapping[str, Any]]
    columns: list[tuple[list[str], Any]]
    books: TokenBooks


class EventsRun:
    """One run: each event is a method whose name is in `KINDS`."""

    def __init__(self, tq: Any, name: str, draw: random.Random) -> None:
        self.tq, self.name, self.draw = tq, name, draw
        self.books, self.events = TokenBooks(), Counter[str]()
        self.made = self.new_trainer()
        self.save()

    def new_trainer(self) -> Any:
        made = trainer(self.name, **OPTIONS.get(self.name, {}))
        made.replay_buffer.wait = lambda: pytest.fail("training waits for groups that are there")
        made.replay_buffer.refill_fn = lambda number: None  # as an event of its own
        return made

    @property
    def loops(self) -> Loops:
        loops: Loops = self.made.agent_loop_manager
        return loops

    def event(self) -> None:
        possible = {
            "submit": self.made.replay_buffer.outstanding() < OUTSTANDING,
            "end": bool(self.loops.given),
            "train": self.may_train(),
        }
        kinds = [kind for kind in KINDS if possible.get(kind, True)]
        [kind] = self.draw.choices(kinds, [KINDS[kind] for kind in kinds])
        getattr(self, kind)()
        self.events[kind] += 1
        self.check()

    def submit(self) -> None:
        self.made._add_prompts_to_generate(self.draw.randint(1, 3))

    def end(self) -> None:
        """Some group's sessions end, of which one in ten failed, but not all."""
        uid, samples, first, _ = self.loops.given.pop(self.draw.randrange(len(self.loops.given)))
        chance = self.draw.choice((0.0, 0.1, 0.3, 0.6, 1.0))
        rewards: list[float | None] = [
            None if self.draw.random() < 0.1 else float(self.draw.random() < chance) for _ in range(samples)
        ]
        kept = self.draw.randrange(samples)
        rewards[kept] = rewards[kept] or 0.0
        for i, reward in enumerate(rewards):
            if reward is not None:
                key, tokens = f"{uid}_{first + i}_0", self.draw.randint(1, 9)
                assert key not in self.books.rows, "an extra session has the number of another"
                self.books.rows[key] = tokens
                self.books.generated += tokens
        end(self.tq, self.made, uid, *rewards, first=first)

    def look(self) -> None:
        self.made.replay_buffer.outstanding()

    def may_train(self) -> bool:
        buffer, step = self.made.replay_buffer, self.made.global_steps
        buffer.outstanding()
        ready = buffer.finished_keys[TRAIN] - set(buffer.unwanted()) - buffer._stale_terminal_keys(step, TRAIN)
        return bool(buffer._has_enough_samples(step, TRAIN, BATCH, ready))

    def train(self) -> None:
        """One step; what is taken leaves the queue, as do groups that the sampler or the bound dropped."""
        step, buffer = self.made.global_steps, self.made.replay_buffer
        batch, _ = buffer.sample(global_steps=step, partition_id=TRAIN, batch_size=BATCH)
        self.tq.kv_clear(keys=batch.keys, partition_id=TRAIN)
        for group in buffer.take_decided(step, {}, {}):
            tokens = self.books.take(group.uid)
            if group.outcome is GroupOutcome.TRAINED:
                self.books.trained += sum(tokens)
                self.books.sizes.append(len(tokens))
            else:
                self.books.dropped[f"{group.outcome}: {group.details.get('reason', '')[:6]}"] += sum(tokens)
        self.made.global_steps += 1

    def save(self) -> None:
        tags = copy.deepcopy((self.tq.kv_list(TRAIN) or {}).get(TRAIN, {}))
        parts = [[key for key in tags if bool(tags[key].get("is_prompt")) is prompts] for prompts in (True, False)]
        columns = [(keys, self.tq.kv_batch_get(keys=keys, partition_id=TRAIN)) for keys in parts if keys]
        state = json.dumps(self.made.sampled.sampling.state_dict())
        self.saved = Checkpoint(self.made.global_steps, state, tags, columns, copy.deepcopy(self.books))

    def kill(self) -> None:
        """Nothing of the process is left; another goes on from the checkpoint."""
        if there := list((self.tq.kv_list(TRAIN) or {}).get(TRAIN, {})):
            self.tq.kv_clear(keys=there, partition_id=TRAIN)
        for keys, fields in self.saved.columns:
            self.tq.kv_batch_put(
                keys=keys, partition_id=TRAIN, fields=fields, tags=[dict(self.saved.tags[key]) for key in keys]
            )
        self.books, self.made = copy.deepcopy(self.saved.books), self.new_trainer()
        self.made.global_steps = self.saved.step
        self.made.sampled.sampling.load_state_dict(json.loads(self.saved.sampler))
        self.made._reissue_inflight_prompts()
        reopened = {uid for uid in self.made.sampled.sampling.reopened if self.saved.tags[uid]["status"] != "finished"}
        assert {uid for uid, _, first, _ in self.loops.given if first} == reopened, "their extra samples run again"

    def check(self) -> None:
        tags = (self.tq.kv_list(TRAIN) or {}).get(TRAIN, {})
        self.books.check({key for key, tag in tags.items() if not tag.get("is_prompt")})
        self.made.sampled.sampling.check_integrity()
        assert self.made.sampled.sampling.counts["lost"] == 0

    def finish(self) -> None:
        """All that was submitted ends and is trained or dropped; a prompt more where a batch is not full."""
        while self.books.rows or self.loops.given:
            if self.may_train():
                self.train()
            elif self.loops.given:
                self.end()
            else:
                assert self.made.replay_buffer.outstanding() < 2 * OUTSTANDING, "a group was reopened and does not run"
                self.submit()
            self.check()


@pytest.mark.parametrize(("name", "number"), [("dars", 1000), ("gdro", 200), ("srpo", 200), ("xrpo", 200)])
def test_each_token_is_trained_or_dropped_whatever_happens(clean: Any, name: str, number: int) -> None:
    run = EventsRun(clean, name, random.Random(f"events/{name}"))
    for _ in range(number):
        run.event()
    run.finish()
    books, counts = run.books, run.made.sampled.sampling.counts
    assert books.generated == books.trained + books.dropped.total() > 0 and not books.rows
    assert set(run.events) == set(KINDS) and not run.made.sampled.sampling.reopened
    assert counts["judged"] == counts["trained"] + counts["dropped"]
    if name == "dars":
        assert max(books.sizes) > 4 and {reason.partition(":")[0] for reason in books.dropped} >= {"filtered"}
