"""What the training bench takes from verl: its buffers' poll, its agent loops' contract, the names it logs under."""

from __future__ import annotations

import asyncio
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap
from verl.trainer.ppo import metric_utils
from verl.trainer.ppo.v1 import replay_buffer, trainer_base
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.utils.import_utils import load_extern_object as load_extern
from verl.utils.tracking import FileLogger
from verl.workers.rollout.replica import TokenOutput

from seamless_verl.tiny import make_tokenizer
from seamless_verl.tools.compare.arms import POLLING, SHORT_POLL_S, parse_arm, with_short_poll
from seamless_verl.tools.compare.forced_loop import ForcedLengthLoop
from seamless_verl.tools.compare.forced_work import read_samples
from seamless_verl.tools.compare.report import VERLS_POLL_S
from seamless_verl.tools.compare.workloads import WORKLOADS

W3 = WORKLOADS["w3"]


def test_a_comparison_names_the_poll_with_which_verl_is_shipped() -> None:
    shipped = {inspect.signature(one).parameters["poll_interval"].default for one in (ReplayBuffer, ReplayBufferAsync)}
    assert shipped == {VERLS_POLL_S}


BATCHES = {"max_num_gen_batches": 0, "max_inflight_gen_batches": 3}


class Trainer:
    """As much of verl's trainer as makes its buffer."""

    _build_replay_buffer = trainer_base.PPOTrainer._build_replay_buffer
    _resolve_filter_groups_metric = trainer_base.PPOTrainer._resolve_filter_groups_metric

    def __init__(self, mode: str, **given: Any) -> None:
        sampler = {"max_off_policy_threshold": 8, "max_off_policy_strategy": "drop", "sampler_kwargs": {}}
        sampler |= {"sync_refill_failed_groups": False, "custom_sampler": {"path": None, "name": None}}
        config = {
            "algorithm": {"filter_groups": {"enable": False, "metric": "acc", **BATCHES}},
            "data": {"train_batch_size": 8, "gen_batch_size": None},
            "reward": {"reward_model": {"enable": False}},
            "trainer": {"v1": {"sampler": sampler, mode: {"parameter_sync_step": 1}}},
        }
        self.trainer_mode, self.config = mode, OmegaConf.create(config)
        OmegaConf.set_struct(self.config, True)
        for key, value in given.items():
            OmegaConf.update(self.config, key, value)

    def _add_prompts_to_generate(self, prompts: int) -> None:
        """What a buffer asks for more prompts."""


DAPO = {"algorithm.filter_groups.enable": True}
REFILLS = {"trainer.v1.sampler.sync_refill_failed_groups": True}


@pytest.mark.parametrize("given", [{}, {"data.gen_batch_size": 4}, DAPO, REFILLS, DAPO | REFILLS], ids=str)
@pytest.mark.parametrize(("mode", "base"), [("sync", ReplayBuffer), ("separate_async", ReplayBufferAsync)])
def test_only_the_poll_of_verls_buffers_is_lowered(mode: str, base: type[Any], given: dict[str, Any]) -> None:
    """Also with what verl gives to its own buffers and to no custom one: how groups are filtered."""
    trainer = Trainer(mode, **given)
    verls = trainer._build_replay_buffer()
    for setting in with_short_poll(parse_arm(mode)).settings:
        OmegaConf.update(trainer.config, *setting.split("="))
    ours = trainer._build_replay_buffer()
    assert (verls.poll_interval, ours.poll_interval) == (2.0, SHORT_POLL_S)
    assert type(verls) is base and isinstance(ours, base)
    assert ours.filter_groups_metric == ("acc" if given.items() >= DAPO.items() else None)
    rest = {key: value for key, value in vars(verls).items() if key != "poll_interval"}
    assert {key: value for key, value in vars(ours).items() if key != "poll_interval"} == rest
    assert set(vars(type(ours))) - {"__init__"} <= {"__module__", "__doc__", "__firstlineno__", "__static_attributes__"}


def test_lending_asks_a_sampler_for_what_ours_inherits() -> None:
    ours = load_extern(POLLING, "PollingReplayBufferAsync")
    assert {"wait_for_sampleable", "get_sampleable_count"} <= set(dir(ours))


def test_the_names_that_figures_are_read_from_are_logged() -> None:
    source = inspect.getsource(metric_utils) + inspect.getsource(trainer_base)
    for name in ("response_length/mean", "prompt_length/mean", "critic/score/mean", "perf/total_num_tokens"):
        assert f'"{name}"' in source, name
    for name in ('"gen"', '"update_actor"', '"testing"', '"save_checkpoint"', "timing_s/{name}"):
        assert name in source, name
    for name in ("mean", "max"):
        assert f'"training/off_policy/trajectory_staleness_worst/{name}"' in source, name
    assert "/off_policy/evicted_samples" in inspect.getsource(replay_buffer)


def test_the_file_of_steps_is_where_the_variable_says_and_has_a_line_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(file))
    logger = FileLogger("project", "experiment")
    logger.log({"critic/score/mean": 0.5}, step=3)
    assert json.loads(file.read_text()) == {"step": 3, "data": {"critic/score/mean": 0.5}}  # before it is closed
    logger.finish()


class Engine:
    """Generates what it is asked for, or one token less; remembers the calls."""

    def __init__(self, *, short: int = 0) -> None:
        self.calls: list[dict[str, Any]] = []
        self.short = short

    async def generate(self, **call: Any) -> TokenOutput:
        self.calls.append(call)
        ids = list(range(call["sampling_params"]["max_tokens"] - self.short))
        version = len(self.calls)
        return TokenOutput(token_ids=ids, log_probs=[-1.0] * len(ids), extra_fields={"global_steps": version})


async def talk(engine: Engine, record: Path, index: int, workload: str = "w3") -> AgentLoopOutput:
    rollout, trainer = {"prompt_length": 64}, {"default_local_dir": str(record.parent)}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}, "trainer": trainer})
    loop = ForcedLengthLoop(
        trainer_config=DictConfigWrap(config),
        server_manager=engine,
        tokenizer=make_tokenizer(),
        processor=None,
        dataset_cls=None,
        data_config=DictConfigWrap(config.data),
        workload=workload,
    )
    prompt = [{"role": "user", "content": "1+1="}]
    return await loop.run({"temperature": 1.0, "logprobs": True}, raw_prompt=prompt, index=index, session_id=3)


async def test_the_agent_loop_forces_lengths_and_marks_what_tools_said(tmp_path: Path) -> None:
    engine, record = Engine(), tmp_path / "samples.jsonl"
    done = await talk(engine, record, 5)
    turns = W3.sample(5, 3)
    masks = [[1] * turn.tokens + [0] * turn.tool_tokens for turn in turns]
    assert done.response_mask == [bit for mask in masks for bit in mask]
    assert done.response_logprobs == [-1.0 * bit for bit in done.response_mask]
    assert len(done.response_ids) == len(done.response_mask) <= W3.response_tokens
    sampling = [call["sampling_params"] for call in engine.calls]
    assert sampling == [
        {"temperature": 1.0, "logprobs": True, "max_tokens": turn.tokens, "ignore_eos": True} for turn in turns
    ]
    assert len({call["request_id"] for call in engine.calls}) == 1  # so that turns stay on one engine
    so_far = done.prompt_ids + done.response_ids
    assert all(call["prompt_ids"] == so_far[: len(call["prompt_ids"])] for call in engine.calls)
    assert (done.extra_fields["min_global_steps"], done.extra_fields["max_global_steps"]) == (1, 4)
    assert read_samples(record)[5, 3].tokens == tuple(turn.tokens for turn in turns)
    assert read_samples(record)[5, 3].prompt == tuple(done.prompt_ids)


async def test_the_system_prompt_of_agents_is_the_same_before_each_question(tmp_path: Path) -> None:
    alone, one, other = [
        (await talk(Engine(), tmp_path / "samples.jsonl", n, workload)).prompt_ids
        for n, workload in ((5, "w3"), (5, "agents"), (6, "agents"))
    ]
    length = WORKLOADS["agents"].system_tokens
    assert one == other and one[length:] == alone and len(one) <= WORKLOADS["agents"].prompt_tokens


async def test_a_tools_words_are_the_same_in_every_run_and_differ_between_samples(tmp_path: Path) -> None:
    once, again, other = [await talk(Engine(), tmp_path / "samples.jsonl", n) for n in (5, 5, 6)]
    words = [
        [word for word, generated in zip(one.response_ids, one.response_mask, strict=True) if not generated]
        for one in (once, again, other)
    ]
    assert words[0] == words[1] != words[2] and len(words[0]) == 3 * W3.tool_tokens


async def test_a_sample_of_another_length_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="tokens instead of"):
        await talk(Engine(short=1), tmp_path / "samples.jsonl", 5)
    assert not (tmp_path / "samples.jsonl").exists()


async def test_lines_of_several_samples_add_up(tmp_path: Path) -> None:
    async def many() -> None:
        await asyncio.gather(*(talk(Engine(), tmp_path / "samples.jsonl", n) for n in range(4)))

    await many()
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert sorted(line["index"] for line in lines) == [0, 1, 2, 3]
