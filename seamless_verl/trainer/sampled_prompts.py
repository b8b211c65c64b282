"""Submits as many samples of each prompt as `seamless.sampler` says, and reopens finished groups for more.

A group that is reopened keeps its rows in TransferQueue, and its prompt the step of its submission, so that the
staleness bound holds for it as for others. When its extra sessions have ended, all are trained together.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import transfer_queue as tq
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from seamless_verl.agent_loops.assignments import TRAIN, UNENDED
from seamless_verl.agent_loops.manager import SeamlessAgentLoopManager
from seamless_verl.agent_loops.row_keys import parts_of, prompt_of
from seamless_verl.agent_loops.rows import FIRST, PROMPT, SAMPLES, STORED
from seamless_verl.algorithms.samplers import EndedGroup, PromptSampling, make_sampler
from seamless_verl.config.schema import SeamlessConfig
from seamless_verl.errors import ConfigError
from seamless_verl.trainer.prompt_feed import RunCalls
from seamless_verl.trainer.prompt_names import by_step, pending
from seamless_verl.trainer.replay_buffer import SeamlessReplayBuffer

IDENTITY = ("raw_prompt", "data_source", "index")
"""Columns of a prompt that tell it from others; data may lack the last two."""
ROUNDS = 2  # so many times through the data without a prompt that is sampled, and the run ends


@dataclass(eq=False)
class SampledPrompts:
    """The prompts of a run with a sampler."""

    sampling: PromptSampling
    buffer: SeamlessReplayBuffer  # its looks review the groups that ended
    run: RunCalls
    _: KW_ONLY
    threshold: float | None = None  # of the sampler, for the message where it leaves every prompt out
    reissued = False  # what a resumed run goes on with is submitted

    def __post_init__(self) -> None:
        self.buffer.review, self.buffer.unwanted = self.review, self.sampling.dropped

    def next_batch(self, missing: int, draw: Callable[[int], TensorDict]) -> TensorDict:
        """So many prompts that the sampler does not leave out, with the number of samples of each."""
        parts, names, numbers, left_out = list[TensorDict](), list[str](), list[int](), 0
        while missing:
            offered = draw(missing)
            known = prompt_names(offered)
            chosen = self.sampling.choose(known)
            kept = [i for i, number in enumerate(chosen) if number]
            tu.pop(offered, "global_steps")
            if kept:
                parts.append(offered if len(kept) == len(known) else tu.index_select_tensor_dict(offered, kept))
            names += [known[i] for i in kept]
            numbers += [chosen[i] for i in kept]
            missing -= len(kept)
            left_out = 0 if kept else left_out + len(known)
            if left_out > ROUNDS * self.run.dataset_size():
                raise every_prompt_left_out(self.threshold)
        batch = tu.concat_tensordict(parts) if len(parts) > 1 else parts[0]
        tu.assign_non_tensor_stack(batch, SAMPLES, numbers)
        tu.assign_non_tensor_stack(batch, PROMPT, names)
        tu.assign_non_tensor_data(batch, "global_steps", self.run.step())
        return batch

    def review(self) -> list[str]:
        """Judges the groups that have ended since the last look; returns those that were reopened.

        Not in the looks of a validation before the run goes on: what would be reopened there would be submitted again.
        """
        if not self.reissued:
            return []
        self.sampling.keep_only(self.buffer.prompt_global_steps[TRAIN])
        fresh = self.buffer.finished_keys[TRAIN] - self.sampling.final.keys()
        verdicts = self.sampling.judge(ended_groups(self.buffer.partitions[TRAIN], fresh))
        reopened = [uid for uid, verdict in verdicts.items() if verdict.extra]
        self._run_again({uid: self.buffer.prompt_global_steps[TRAIN][uid] for uid in reopened})
        return reopened

    def _run_again(self, submitted: Mapping[str, int]) -> None:
        """Generates the extra samples of reopened groups; the steps in which they were submitted remain theirs."""
        for step, uids in by_step(submitted):
            parts, manager = [self.sampling.reopened[uid] for uid in uids], self.run.manager()
            batch = tq.kv_batch_get(keys=uids, partition_id=TRAIN)
            if isinstance(manager, SeamlessAgentLoopManager):
                manager.reopening(uids)
            tu.assign_non_tensor_stack(batch, SAMPLES, [part.extra for part in parts])
            tu.assign_non_tensor_stack(batch, FIRST, [part.next_session for part in parts])
            tu.assign_non_tensor_data(batch, "global_steps", step)
            tq.kv_batch_put(keys=uids, partition_id=TRAIN, tags=pending(uids, step))
            manager.generate_sequences(batch)

    def reissue(self, whole_groups: Callable[[], int]) -> int:
        """After a resume: `whole_groups` are run again as without a sampler, of reopened ones only the extra samples.

        A checkpoint may have been saved while a group's extra rows were put: TransferQueue has such rows, without tags.
        """
        reopened = self.sampling.reopened
        items = (tq.kv_list(TRAIN) or {}).get(TRAIN, {}) if reopened else {}
        running = {uid: items[uid] for uid in reopened if items.get(uid, {}).get("status") in UNENDED}
        if running:
            tq.kv_batch_put(keys=list(running), partition_id=TRAIN, tags=[{"status": "finished"}] * len(running))
        reissued = whole_groups()
        whole = {key: tag for key, tag in items.items() if tag.get("is_prompt") or tag.get("status") == STORED}
        sessions = sessions_of(whole)
        again = {  # a group puts its extra rows at once: where there is one that is whole, all are
            uid: int(tag["global_steps"])
            for uid, tag in running.items()
            if max(sessions[uid]) < reopened[uid].next_session
        }
        if halves := [key for key in items.keys() - whole.keys() if prompt_of(key) in running]:
            tq.kv_clear(keys=halves, partition_id=TRAIN)
        self._run_again(again)
        self.reissued = True
        return reissued + len(again)

    def extra_sessions(self) -> int:
        """Those of reopened groups beyond the default number: what samplers give others is that on the mean."""
        return sum(part.extra - self.sampling.samples for part in self.sampling.reopened.values())


def sessions_of(items: Mapping[str, Mapping[str, Any]]) -> dict[str, set[int]]:
    """The numbers of the sessions that have rows in the queue, by their prompts' uids; -1 stands for a prompt's row."""
    found = defaultdict[str, set[int]](set)
    for key, tag in items.items():
        uid, session, _ = (key, "-1", "") if tag.get("is_prompt", False) else parts_of(key)
        found[uid].add(int(session))
    return found


def sampling_of(settings: SeamlessConfig, samples: int) -> PromptSampling | None:
    """What runs the sampler of these settings; `samples` is what a prompt gets by default. None without a sampler."""
    chosen = settings.sampler
    if chosen.name is None:
        return None
    return PromptSampling(
        chosen.name, make_sampler(chosen.name, chosen.options), samples=samples, success=chosen.success
    )


def every_prompt_left_out(threshold: float | None) -> ConfigError:
    key = "seamless.sampler.threshold"
    return ConfigError(key, threshold, "every prompt of the data is left out", "Set it higher, or train on harder data")


def prompt_names(batch: TensorDict) -> list[str]:
    """What each prompt of a batch is known by: a digest of its messages, its data source and its index.

    It is the same in each epoch and after a resume. Images count by their type alone.
    """
    columns = [list(column) for name in IDENTITY if (column := tu.get(batch, name)) is not None]
    return [
        digest([value.item() if hasattr(value, "item") else value for value in row])
        for row in zip(*columns, strict=True)
    ]


def digest(values: list[Any]) -> str:
    text = json.dumps(values, sort_keys=True, default=lambda one: type(one).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def ended_groups(rows: Mapping[str, Mapping[str, Any]], uids: Iterable[str]) -> list[EndedGroup]:
    """These groups, from the tags of their rows by key; without those submitted before there was a sampler."""
    wanted = set(uids)
    if not wanted:  # as at most looks
        return []
    rewards, prompts = defaultdict[str, dict[int, float]](dict), dict[str, str]()
    for key, tag in rows.items():
        uid, session, _ = parts_of(key)
        if uid in wanted and tag.get("prompt"):
            rewards[uid][int(session)] = float(tag["reward"])
            prompts[uid] = tag["prompt"]
    return [
        EndedGroup(uid, prompts[uid], tuple(reward for _, reward in sorted(found.items())), max(found) + 1)
        for uid, found in sorted(rewards.items())
    ]
