"""A trainer with a sampler over a real TransferQueue, and agent loops that only record what they are given."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from seamless_verl.algorithms.samplers import PromptSampling, make_sampler
from seamless_verl.config.schema import SeamlessConfig
from seamless_verl.runtime.sample_lengths import LengthRecord

TRAIN = "train"
QUESTIONS = [f"{number}+1=" for number in range(6)]


class Loops:
    """Records the prompts of each call: uid, number of samples, number of the first session and step."""

    def __init__(self) -> None:
        self.given: list[tuple[str, int, int, int]] = []

    def generate_sequences(self, batch: Any) -> None:
        from verl.utils import tensordict_utils as tu

        first = tu.get(batch, "__first_session__") or [0] * len(batch)
        columns = zip(tu.get(batch, "uid"), tu.get(batch, "__rollout_n__"), first, strict=True)
        self.given += [(uid, int(number), int(one), tu.get(batch, "global_steps")) for uid, number, one in columns]


def trainer(name: str = "dars", **options: Any) -> Any:
    """A trainer with a buffer, data of six questions and no engines, in step 3."""
    from omegaconf import OmegaConf

    from seamless_verl.trainer import setup as module
    from seamless_verl.trainer.trainer import SeamlessTrainer

    made = object.__new__(SeamlessTrainer)
    made.seamless, made.lengths = SeamlessConfig(max_staleness=2), LengthRecord(Path(os.devnull))
    made.config = OmegaConf.create(
        {
            "data": {"train_batch_size": 2, "gen_batch_size": 1},
            "actor_rollout_ref": {"rollout": {"n": 4}},
            "trainer": {"v1": {"sampler": {"sampler_kwargs": {}}}},
            "algorithm": {},
            "skip": {"rollout_tq": {"enable": False}},
        }
    )
    made.trainer_mode, made.parameter_sync_step, made.local_trigger_step = "seamless", 1, 0
    made.global_steps, made.agent_loop_manager = 3, Loops()
    made.commit = SimpleNamespace(wait=lambda reach: None)
    made.train_dataset, made.train_dataloader_it = QUESTIONS, None
    made.train_dataloader = [row(i) for i in range(len(QUESTIONS))]
    sampling = PromptSampling(name, make_sampler(name, options), samples=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "sampling_of", lambda *_: sampling)
        made.replay_buffer = made._build_replay_buffer()
    made.replay_buffer.wait = lambda: None
    made.sampled.reissued = True
    return made


def resumed_after(stopped: Any) -> Any:
    """A trainer that goes on from what the stopped one saved."""
    made = trainer()
    made.sampled.sampling.load_state_dict(stopped.sampled.sampling.state_dict())
    made.sampled.reissued = False
    return made


def row(i: int) -> dict[str, Any]:
    """A batch of one prompt, as verl's loader gives it."""
    messages = [{"role": "user", "content": QUESTIONS[i]}]
    columns = {"raw_prompt": messages, "data_source": "sums", "index": i, "agent_name": "scripted"}
    return {name: array_of(value) for name, value in columns.items()}


def array_of(value: Any) -> Any:
    array = np.empty(1, dtype=object)
    array[0] = value
    return array


def end(tq: Any, made: Any, uid: str, *rewards: float | None, first: int = 0) -> None:
    """The group's sessions from `first` on end with these rewards, as the agent loops write them; None: it failed."""
    import torch
    from tensordict import TensorDict

    found = {f"{uid}_{first + i}_0": reward for i, reward in enumerate(rewards) if reward is not None}
    prompt, keys = names(made)[uid], list(found)
    tag = {"status": "success", "global_steps": 3, "prompt": prompt, "response_len": 5}
    tags = [{**tag, "reward": reward} for reward in found.values()]
    fields = TensorDict({"x": torch.zeros(len(keys), 1)}, batch_size=len(keys))
    tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=tags)
    tq.kv_put(key=uid, partition_id="train", tag={"status": "finished"})


def names(made: Any) -> dict[str, str]:
    """What the sampler knows the prompts in the queue by, from their columns there."""
    import transfer_queue as tq
    from verl.utils import tensordict_utils as tu

    uids = [uid for uid, tag in tq.kv_list("train")["train"].items() if tag.get("is_prompt")]
    return dict(zip(uids, tu.get(tq.kv_batch_get(keys=uids, partition_id="train"), "__sampler_prompt__"), strict=True))


def statuses(tq: Any) -> dict[str, tuple[str, int]]:
    items = tq.kv_list("train")["train"].items()
    return {key: (tag["status"], tag["global_steps"]) for key, tag in items if tag.get("is_prompt")}
