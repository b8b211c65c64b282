"""Settings of sequences and groups: how long a training sequence may be, and how many sessions make a group."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.config import refused, tiny_run

from seamless_verl.config.checks import Settings
from seamless_verl.config.checks.batches import check_training_sequence
from seamless_verl.config.checks.modes import check_seamless
from seamless_verl.config.schema import SeamlessConfig

GATEWAY = "seamless.gateway.enabled=true"


def test_sessions_fit_a_micro_batch_by_their_lengths(tmp_path: Path) -> None:
    """verl ends the run at the first sequence that does not; which may be a later step's."""
    key, lengths = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", ("prompt=2048", "response=8192")
    given = tuple(f"data.max_{what.replace('=', '_length=')}" for what in lengths)
    problems = refused(tiny_run(tmp_path, GATEWAY, *given, f"{key}=8192"))
    (problem,) = (one for one in problems if one.key == key)
    assert problem.value == 8192 and problem.way_out == f"Set {key}=10240, or lower data.max_response_length"
    assert problem.reason == (
        "is a micro-batch of 8192 tokens, and sessions are trained up to data.max_prompt_length=2048 + "
        "data.max_response_length=8192"
    )
    parallel = "actor_rollout_ref.actor.megatron.context_parallel_size=2"
    for enough in (
        (GATEWAY, f"{key}=10240"),
        (GATEWAY, f"{key}=5120", parallel),
        (GATEWAY, f"{key}=8192", "actor_rollout_ref.actor.use_dynamic_bsz=false"),
        (f"{key}=8192",),  # verl's own agent loops
    ):
        assert (
            check_training_sequence(Settings.of(tiny_run(tmp_path, *given, *enough), devices=2, accelerator=False))
            == []
        )
    (two,) = check_training_sequence(
        Settings.of(tiny_run(tmp_path, GATEWAY, *given, f"{key}=5119", parallel), devices=2, accelerator=False)
    )
    assert two.way_out.startswith(f"Set {key}=5120, or lower") and "on 2 ranks" in two.reason
    split = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    fsdp = tiny_run(tmp_path, GATEWAY, *given, f"{key}=5120", "actor_rollout_ref.actor.strategy=fsdp", split)
    assert check_training_sequence(Settings.of(fsdp, devices=2, accelerator=True)) == []


@pytest.mark.parametrize(
    ("needed", "estimator", "said"),
    [
        (5, "gae", "is more than the actor_rollout_ref.rollout.n=4 sessions of a group"),
        (1, "grpo", "lets grpo train a group of one, which has no other session to be compared with"),
        (1, "reinforce_plus_plus", None),
        (2, "grpo", None),
        (4, "rloo", None),
    ],
)
def test_a_group_has_sessions_to_compare(tmp_path: Path, needed: int, estimator: str, said: str | None) -> None:
    config = tiny_run(tmp_path, f"seamless.min_sessions={needed}", f"algorithm.adv_estimator={estimator}")
    problems = check_seamless(Settings.of(config, devices=1, accelerator=False))
    assert [problem.reason for problem in problems] == ([] if said is None else [said])


def test_a_group_needs_two_sessions_unless_it_has_but_one() -> None:
    assert [SeamlessConfig().sessions_needed(n) for n in (1, 2, 8)] == [1, 2, 2]
    assert [SeamlessConfig(min_sessions=4).sessions_needed(n) for n in (1, 4, 8)] == [1, 4, 4]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["seamless.max_staleness=0"], []),
        (["seamless.max_staleness=1"], ["seamless.max_staleness=0, or seamless.tail_batching=null"]),
        (
            ["seamless.max_staleness=0", "skip.rollout_tq.enable=true"],
            ["seamless.tail_batching=null, or skip.rollout_tq.enable=False"],
        ),
        (
            ["seamless.max_staleness=0", "actor_rollout_ref.rollout.agent.agent_loop_manager_class=my.Manager"],
            ["seamless.tail_batching=null, or actor_rollout_ref.rollout.agent.agent_loop_manager_class=null"],
        ),
        (
            ["seamless.max_staleness=0", "seamless.sampler.name=srpo"],
            ["seamless.tail_batching=null, or seamless.sampler.name=null"],
        ),
    ],
)
def test_prompts_are_deferred_only_where_their_step_is_over_without_them(
    tmp_path: Path, more: list[str], said: list[str]
) -> None:
    config = tiny_run(tmp_path, "seamless.tail_batching=0.2", *more)
    problems = check_seamless(Settings.of(config, devices=1, accelerator=False))
    assert [problem.way_out for problem in problems] == [f"Set {text}" for text in said]
    assert all((problem.key, problem.value) == ("seamless.tail_batching", 0.2) for problem in problems)


@pytest.mark.parametrize("share", ["0", "-0.5", "1.5", "a_fifth"])
def test_a_share_of_extra_prompts_is_above_0_and_at_most_1(tmp_path: Path, share: str) -> None:
    config = tiny_run(tmp_path, "seamless.max_staleness=0", f"seamless.tail_batching={share}")
    (problem,) = check_seamless(Settings.of(config, devices=1, accelerator=False))
    assert problem.key == "seamless.tail_batching" and problem.way_out.startswith("Set seamless.tail_batching=0.2")


def write_tokenizer(folder: Path) -> None:
    """One token a character and a special one for each message, with the tools written out before them."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    vocabulary = {chr(code): code for code in range(128)} | {"?": 200}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for tool in tools or [] %}{{ tool.name }}{% endfor %}{% for m in messages %}{{ m.content }};{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template)
