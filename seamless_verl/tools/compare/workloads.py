"""Built-in jobs whose responses have forced lengths, so that all arms generate the same tokens count for count.

How long each response is and each tool takes is a function of the sample's place alone: a draw is seeded by
(workload, the prompt's index in the data set, the sample within its group, turn), never by time or arrival. Pure.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from seamless_verl.config.words import quoted
from seamless_verl.runtime.files import replaced_file

QUESTION_TOKENS = 64  # of the longest question
DEVICES, MINI_BATCH = 2, 16  # a mini-batch in samples
KV_CACHE_BYTES = 256 << 20  # 65,536 tokens of the small model
SPARE_STEPS = 16  # more steps of prompts, which asynchronous modes draw ahead; the data set never repeats
SAMPLES_FILE, LOOPS_FILE = "samples.jsonl", "loops.yaml"


@dataclass(frozen=True)
class Lognormal:
    """A lognormal distribution by its median and the standard deviation of its logarithm."""

    median: float
    sigma: float

    @property
    def mean(self) -> float:
        return self.median * math.exp(self.sigma**2 / 2)

    @classmethod
    def with_mean(cls, mean: float, sigma: float) -> Lognormal:
        return cls(mean / math.exp(sigma**2 / 2), sigma)

    def draw(self, seed: str) -> float:
        return self.median * math.exp(self.sigma * random.Random(seed).gauss(0.0, 1.0))


@dataclass(frozen=True)
class ForcedTurn:
    """One turn of a sample: tokens to generate, then the seconds a tool takes and the tokens of its result."""

    tokens: int
    wait_s: float = 0.0
    tool_tokens: int = 0


@dataclass(frozen=True)
class Workload:
    """Lengths of turns in tokens, from 1 to `longest`; `tool` in seconds between two turns of a sample.

    `system_tokens` stand before each question, the same in all prompts, as an agent's instructions and tools do.
    """

    name: str
    what: str
    tokens: Lognormal
    longest: int
    turns: int = 1
    tool: Lognormal | None = None
    tool_tokens: int = 0
    prompts: int = 16
    samples: int = 4
    seats: int = 64
    system_tokens: int = 0

    @property
    def step_samples(self) -> int:
        return self.prompts * self.samples

    @property
    def in_flight(self) -> int:
        """Samples of a step on each device."""
        return self.step_samples // DEVICES

    @property
    def prompt_tokens(self) -> int:
        """The longest prompt."""
        return self.system_tokens + QUESTION_TOKENS

    @property
    def response_tokens(self) -> int:
        """Longest response: the tokens of all turns and of their tools' results."""
        return self.turns * self.longest + (self.turns - 1) * self.tool_tokens

    @property
    def tool_tokens_of_step(self) -> int:
        """Response tokens of a step that no engine generated."""
        return self.step_samples * (self.turns - 1) * self.tool_tokens

    def turn(self, index: int, session: int, turn: int) -> ForcedTurn:
        """The `turn`-th turn of sample `session` of the prompt at `index`, all from 0."""
        seed = f"{self.name}/{index}/{session}/{turn}"
        tokens = min(self.longest, max(1, round(self.tokens.draw(f"{seed}/tokens"))))
        if self.tool is None or turn == self.turns - 1:
            return ForcedTurn(tokens)
        return ForcedTurn(tokens, self.tool.draw(f"{seed}/tool"), self.tool_tokens)

    def sample(self, index: int, session: int) -> list[ForcedTurn]:
        return [self.turn(index, session, turn) for turn in range(self.turns)]

    def turn_s(self, rates: Mapping[int, float]) -> float:
        """Seconds of a mean turn with a step's samples on all devices; `rates` are tokens/s by samples in flight."""
        return round(self.tokens.mean * self.in_flight / rates[self.in_flight], 3)

    def with_turn(self, turn_s: float) -> Workload:
        """The workload with tools that take `turn_s` on the mean, as long as a turn."""
        return self if self.tool is None else replace(self, tool=Lognormal.with_mean(turn_s, self.tool.sigma))

    def generated(self, prompts: range) -> int:
        """Tokens that all samples of the prompts at these indices generate."""
        samples = (self.sample(index, session) for index in prompts for session in range(self.samples))
        return sum(turn.tokens for turns in samples for turn in turns)


TURN_S = 0.38
"""Seconds of generation of a mean turn of `w3` where it was not measured: 83 tokens at 4.6 ms."""
W2_HEAVY_WHAT = "a heavier tail: half of all tokens are in samples of 390 or more"
W3_WHAT = "four turns, between them tools that take as long as a turn"
W3_TOOL = Lognormal.with_mean(TURN_S, 0.8)
AGENTS = Workload(
    "agents", "a long system prompt, four turns with tools between them, eight samples of a prompt", Lognormal(40, 0.6),
    longest=256, turns=4, tool=W3_TOOL, tool_tokens=32, prompts=8, samples=8, system_tokens=480,
)  # fmt: skip
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("w1", "even lengths", Lognormal(60, 0.3), longest=256),
        Workload("w2", "a long tail, a whole step in flight at once", Lognormal(50, 1.3), longest=1792),
        Workload("w2_heavy", W2_HEAVY_WHAT, Lognormal(40, 1.6), longest=1920),
        Workload("w3", W3_WHAT, Lognormal(60, 0.8), longest=448, turns=4, tool=W3_TOOL, tool_tokens=16),
        AGENTS,
        Workload("alone", "one sample of a prompt: nothing is shared", Lognormal(60, 0.3), 256, prompts=64, samples=1),
    )
}


def workload_overrides(workload: Workload, data: Path) -> tuple[str, ...]:
    """The settings of every arm: model, data, batches and engine; `data` is the folder that `make_data` fills."""
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    settings: dict[str, object] = {
        "data.train_files": data / "train.parquet",
        "data.val_files": data / "val.parquet",
        "data.train_batch_size": workload.prompts,
        "data.max_prompt_length": workload.prompt_tokens,
        "data.max_response_length": workload.response_tokens,
        "data.dataloader_num_workers": 0,
        "data.shuffle": False,
        "algorithm.adv_estimator": "grpo" if workload.samples > 1 else "reinforce_plus_plus",
        "algorithm.rollout_correction.bypass_mode": True,
        "actor_rollout_ref.model.path": data / "model",
        f"{actor}.ppo_mini_batch_size": MINI_BATCH // workload.samples,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": 2048,
        f"{actor}.optim.lr": 1e-4,
        f"{rollout}.n": workload.samples,
        f"{rollout}.max_model_len": workload.prompt_tokens + workload.response_tokens,
        f"{rollout}.max_num_seqs": workload.seats,
        f"{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes": KV_CACHE_BYTES,
        f"{rollout}.agent.default_agent_loop": "forced",
        f"{rollout}.agent.agent_loop_config_path": data / LOOPS_FILE,
        "reward.custom_reward_function.path": "pkg://seamless_verl.tools.compare.forced_loop",
        "reward.custom_reward_function.name": "compute_score",
        "trainer.n_gpus_per_node": DEVICES,
    }
    return tuple(f"{key}={quoted(str(value)) if isinstance(value, Path) else value}" for key, value in settings.items())


def make_data(workload: Workload, steps: int, folder: Path) -> None:
    """Writes the model, and numbered prompts for so many steps; the same for the same sizes."""
    from seamless_verl.tiny import make_arithmetic, make_model

    if not (folder / "model").exists():
        make_model("small", 0, folder / "model")
    make_arithmetic(folder, 0, (steps + SPARE_STEPS) * workload.prompts, workload.prompts)


def write_loops(workload: Workload, folder: Path) -> None:
    """Writes the agent loop's entry. YAML, of which JSON is a part."""
    target = "seamless_verl.tools.compare.forced_loop.ForcedLengthLoop"
    loop: dict[str, object] = {"name": "forced", "_target_": target, "workload": workload.name}
    if workload.tool is not None:
        loop["turn_s"] = workload.tool.mean
    with replaced_file(folder / LOOPS_FILE) as temporary:
        temporary.write_text(json.dumps([loop]))
