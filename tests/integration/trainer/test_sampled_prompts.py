"""Groups are reopened and resumed in a real TransferQueue; the agent loops only record what they are given."""

from __future__ import annotations

from typing import Any

import pytest
import transfer_queue
from support.sampled_prompts import end, names, resumed_after, row, statuses, trainer

from seamless_verl.errors import ConfigError

pytestmark = pytest.mark.integration


def test_a_hard_group_is_reopened_and_trained_whole(clean: Any) -> None:
    made = trainer()
    made._add_prompts_to_generate(2)
    (hard, *_), (good, *_) = made.agent_loop_manager.given
    assert [entry[1:] for entry in made.agent_loop_manager.given] == [(4, 0, 3)] * 2
    end(clean, made, hard, 0, 0, 0, 0)
    end(clean, made, good, 0, 1, 1, 0)
    made.global_steps = 4
    assert made.replay_buffer.outstanding() == 2 and made.replay_buffer.finished() == 1
    assert made.agent_loop_manager.given[2:] == [(hard, 6, 4, 3)], "with the age of its first samples"
    assert statuses(clean) == {hard: ("pending", 3), good: ("finished", 3)}
    assert made.replay_buffer.outstanding() == 2 and len(made.agent_loop_manager.given) == 3, "once"
    assert not made.replay_buffer._has_enough_samples(5, "train", 1, {good}), "the bound waits for it in step 5"
    end(clean, made, hard, 0, 0, 0, 0, 0, 1, first=4)
    batch, metrics = made.replay_buffer.sample(global_steps=5, partition_id="train", batch_size=2)
    assert len([key for key in batch.keys if key.startswith(hard)]) == 10 and len(batch.keys) == 14
    assert not metrics and made.sampled.sampling.metrics()["seamless/sampler/trained"] == 2
    assert made.replay_buffer.carried_over(5) == {"seamless/carried_over/trained": 2, "seamless/carried_over/left": 0}


def test_a_group_without_an_advantage_is_dropped_with_its_reason_and_replaced(clean: Any) -> None:
    made = trainer()
    refilled = list[int]()
    made.replay_buffer.refill_fn = refilled.append
    made._add_prompts_to_generate(2)
    first, second = (entry[0] for entry in made.agent_loop_manager.given)
    end(clean, made, first, 1, 1, 1, 1)
    end(clean, made, second, 0, 1, 1, 1)
    batch, metrics = made.replay_buffer.sample(global_steps=3, partition_id="train", batch_size=1)
    assert {key.split("_")[0] for key in batch.keys} == {second} and refilled == [1]
    assert metrics["training/filter_groups/evicted_samples"] == 1
    (decided, _) = made.replay_buffer.take_decided(3, {}, {})
    assert (decided.uid, str(decided.outcome)) == (first, "filtered")
    assert decided.details == {"reason": "all of its 4 samples were right"}


def test_a_group_that_is_too_old_and_unwanted_is_dropped_for_one_reason() -> None:
    """verl counts a group under each of its reasons, and a comparison adds these up."""
    buffer = trainer().replay_buffer
    buffer.prompt_global_steps["train"] = {"old": 3, "both": 3, "unwanted": 9, "good": 9}
    buffer.finished_keys["train"] = set(buffer.prompt_global_steps["train"])
    buffer.unwanted = lambda: {"both": "all right", "unwanted": "all right"}
    assert buffer._terminal_eviction_reasons(9, "train")[:3] == ({"old", "both"}, {"unwanted"}, set())


@pytest.mark.parametrize("written", [False, True])
def test_a_resumed_run_generates_only_the_extra_samples(clean: Any, written: bool) -> None:
    """One group was reopened, one had not ended. The rows of the first are kept, also those of its extra samples."""
    before = trainer()
    before._add_prompts_to_generate(2)
    hard, running = (entry[0] for entry in before.agent_loop_manager.given)
    end(clean, before, hard, 0, 0, 0, 0)
    before.replay_buffer.outstanding()
    if written:  # and the prompt's own row does not say so yet
        end(clean, before, hard, 0, 0, 0, 0, 1, 1, first=4)
        clean.kv_put(key=hard, partition_id="train", tag={"status": "running"})
    resumed = resumed_after(before)
    resumed.global_steps = 4
    assert resumed._reissue_inflight_prompts() == 2 - written
    again = [] if written else [(hard, 6, 4, 3)]
    assert resumed.agent_loop_manager.given == [(running, 4, 0, 4), *again]
    rows = [key for key in clean.kv_list("train")["train"] if key.startswith(f"{hard}_")]
    assert len(rows) == (10 if written else 4)
    assert resumed.replay_buffer.outstanding() == 2
    assert resumed.replay_buffer.finished() == written, "else its extra samples are still to come"
    if not written:
        end(clean, resumed, hard, 0, 0, 0, 0, 1, 1, first=4)
    assert resumed.replay_buffer.outstanding() == 2 and resumed.replay_buffer.finished() == 1
    resumed.sampled.sampling.check_integrity()


def test_extra_rows_that_a_checkpoint_has_in_half_are_generated_again(clean: Any) -> None:
    """It was saved while they were put: TransferQueue names rows first, and has their tags when they are stored."""
    before = trainer()
    before._add_prompts_to_generate(1)
    hard = before.agent_loop_manager.given[0][0]
    end(clean, before, hard, 0, 0, 0, 0)
    before.replay_buffer.outstanding()
    halves = {f"{hard}_{session}_0" for session in range(4, 10)}
    client = transfer_queue.interface._maybe_create_tq_client()
    client._run_coroutine(client.async_kv_retrieve_meta(keys=sorted(halves), partition_id="train", create=True))
    assert all(clean.kv_list("train")["train"][key] == {} for key in halves)
    resumed = resumed_after(before)
    assert resumed._reissue_inflight_prompts() == 1
    assert resumed.agent_loop_manager.given == [(hard, 6, 4, 3)]
    assert not halves & clean.kv_list("train")["train"].keys()
    end(clean, resumed, hard, 0, 0, None, 0, 1, 1, first=4)
    batch, _ = resumed.replay_buffer.sample(global_steps=4, partition_id="train", batch_size=1)
    assert len(batch.keys) == 9 and all(tag["status"] == "success" for tag in batch.tags)
    resumed.sampled.sampling.check_integrity()


def test_a_validation_before_a_resumed_run_reopens_nothing(clean: Any) -> None:
    """It looks at the queue before the unfinished prompts are submitted again."""
    before = trainer()
    before._add_prompts_to_generate(1)
    hard = before.agent_loop_manager.given[0][0]
    end(clean, before, hard, 0, 0, 0, 0)  # nobody has looked since
    resumed = resumed_after(before)
    resumed.global_steps = 4
    assert resumed.replay_buffer.outstanding() == 1 and resumed.agent_loop_manager.given == []
    assert resumed._reissue_inflight_prompts() == 0
    for _ in range(2):
        assert resumed.replay_buffer.outstanding() == 1
        assert resumed.agent_loop_manager.given == [(hard, 6, 4, 3)]
    resumed.sampled.sampling.check_integrity()


@pytest.mark.parametrize("failed", [1, 3])
@pytest.mark.parametrize("stopped", [False, True])
def test_a_group_with_a_failed_session_is_reopened_under_new_numbers(clean: Any, failed: int, stopped: bool) -> None:
    """No extra session overwrites a row of the first ones, and it is judged once, also by a run that was stopped."""
    made = trainer()
    made._add_prompts_to_generate(1)
    ((hard, *_),) = made.agent_loop_manager.given
    first = [None if i == failed else i == (failed + 1) % 4 for i in range(4)]
    end(clean, made, hard, *first)
    made.replay_buffer.outstanding()
    if stopped:
        made = resumed_after(made)
        assert made._reissue_inflight_prompts() == 1
    uid, extra, number, _ = made.agent_loop_manager.given[-1]
    rows = {key for key in clean.kv_list("train")["train"] if key.startswith(f"{hard}_")}
    assert uid == hard and len(rows) == 3
    assert number == (3 if failed == 3 else 4), "above the number of each session that has a row"
    end(clean, made, hard, *[0] * extra, first=number)
    made.replay_buffer.outstanding()
    if stopped:
        made = resumed_after(made)
        assert made._reissue_inflight_prompts() == 0
    batch, _ = made.replay_buffer.sample(global_steps=4, partition_id="train", batch_size=1)
    assert rows < set(batch.keys) and len(batch.keys) == 3 + extra
    (results,) = made.sampled.sampling.histories.groups.values()
    assert [result.samples for result in results] == [3 + extra], "in the history once"


def test_prompts_are_known_again_and_learned_ones_are_left_out(clean: Any) -> None:
    made = trainer("srpo", threshold=0.9)
    made._add_prompts_to_generate(6)
    prompts = names(made)
    easy = made.agent_loop_manager.given[2][0]
    for uid in prompts:
        end(clean, made, uid, *([1, 1, 1, 1] if uid == easy else [0, 1, 1, 1]))
    learned = prompts[easy]
    made.replay_buffer.sample(global_steps=3, partition_id="train", batch_size=6)
    made._add_prompts_to_generate(6)
    assert len(made.agent_loop_manager.given) == 12, "another visit of one takes the place of the one left out"
    assert made.sampled.sampling.metrics()["seamless/sampler/left_out"] == 1
    assert set(names(made).values()) == made.sampled.sampling.histories.groups.keys() - {learned}


def test_data_of_which_every_prompt_was_learned_end_the_run(clean: Any) -> None:
    made = trainer("srpo", threshold=0.5)
    made._add_prompts_to_generate(6)
    for uid in names(made):
        end(clean, made, uid, 1, 1, 1, 1)
    made.replay_buffer.outstanding()
    with pytest.raises(ConfigError, match=r"seamless\.sampler\.threshold.*every prompt of the data is left out"):
        made._add_prompts_to_generate(1)


def test_rows_of_a_time_without_a_sampler_are_not_judged() -> None:
    from seamless_verl.trainer.sampled_prompts import ended_groups, prompt_names

    assert ended_groups({"u_0_0": {"status": "success"}, "pad1_0_0": {}}, ["u"]) == []
    tags = {f"u_{i}_{j}": {"prompt": "p", "reward": float(i)} for i in (10, 2) for j in (0, 1)}
    (group,) = ended_groups(tags, ["u"])
    assert (group.uid, group.prompt, group.rewards) == ("u", "p", (2.0, 10.0)), "one reward a session, in order"
    assert group.next_session == 11
    from verl.utils import tensordict_utils as tu

    first, again, other = prompt_names(tu.concat_tensordict([tu.get_tensordict(row(i)) for i in (1, 1, 2)]))
    assert first == again != other and prompt_names(tu.get_tensordict(row(2))) == [other]
