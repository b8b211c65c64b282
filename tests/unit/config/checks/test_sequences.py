"""Settings of sequences and groups: how long a training sequence may be, and how many sessions make a group."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from support.config import ROW, assert_refused, refused, tiny_run, write_model

from seamless_verl.config import engine_kwargs, preflight
from seamless_verl.config.checks import Problem, Settings
from seamless_verl.config.checks.batches import check_max_sequence
from seamless_verl.config.checks.lengths import check_cache, check_prompts
from seamless_verl.config.checks.modes import check_seamless
from seamless_verl.config.schema import SeamlessConfig

GATEWAY = "seamless.gateway.enabled=true"
MAX_SEQUENCE = "seamless.tokens.max_sequence"


def test_a_training_sequence_fits_a_micro_batch(tmp_path: Path) -> None:
    key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    config = tiny_run(tmp_path, GATEWAY, f"{key}=4000", f"{MAX_SEQUENCE}=4001")
    assert_refused(config, MAX_SEQUENCE, 4001, f"Set {key}=4001, or {MAX_SEQUENCE}=4000 or less")
    assert (
        preflight(tiny_run(tmp_path, GATEWAY, f"{key}=4001", f"{MAX_SEQUENCE}=4001"), devices=1, accelerator=False)
        == []
    )


def test_sessions_fit_a_micro_batch_by_their_lengths_too(tmp_path: Path) -> None:
    """verl ends the run at the first sequence that does not; which may be a later step's."""
    key, lengths = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", ("prompt=2048", "response=8192")
    given = tuple(f"data.max_{what.replace('=', '_length=')}" for what in lengths)
    problems = refused(tiny_run(tmp_path, GATEWAY, *given, f"{key}=8192"))
    (problem,) = (one for one in problems if one.key == key)
    assert problem.value == 8192 and problem.way_out == f"Set {key}=10240, or {MAX_SEQUENCE}=8192 or less"
    assert problem.reason == (
        "is a micro-batch of 8192 tokens, and sessions are trained up to data.max_prompt_length=2048 + "
        "data.max_response_length=8192"
    )
    parallel = "actor_rollout_ref.actor.megatron.context_parallel_size=2"
    for enough in (
        (GATEWAY, f"{key}=10240"),
        (GATEWAY, f"{key}=8192", f"{MAX_SEQUENCE}=8192"),
        (GATEWAY, f"{key}=5120", parallel),
        (GATEWAY, f"{key}=8192", "actor_rollout_ref.actor.use_dynamic_bsz=false"),
        (f"{key}=8192",),  # verl's own agent loops
    ):
        assert check_max_sequence(Settings.of(tiny_run(tmp_path, *given, *enough), devices=2, accelerator=False)) == []
    (two,) = check_max_sequence(
        Settings.of(tiny_run(tmp_path, GATEWAY, *given, f"{key}=5119", parallel), devices=2, accelerator=False)
    )
    assert two.way_out.startswith(f"Set {key}=5120, or {MAX_SEQUENCE}=10238") and "on 2 ranks" in two.reason
    split = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    fsdp = tiny_run(tmp_path, GATEWAY, *given, f"{key}=5120", "actor_rollout_ref.actor.strategy=fsdp", split)
    assert check_max_sequence(Settings.of(fsdp, devices=2, accelerator=True)) == []


def test_a_limit_that_nothing_reads_is_a_warning(tmp_path: Path) -> None:
    (warning,) = preflight(tiny_run(tmp_path, f"{MAX_SEQUENCE}=4000"), devices=1, accelerator=False)
    assert warning.startswith(f"{MAX_SEQUENCE}=4000: cuts the sessions of the gateway, which is off")


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


@pytest.mark.parametrize(
    ("rows", "limit", "said", "warned"),
    [
        ([ROW], 5, None, None),
        ([ROW], 4, "2 of the first 2 prompts of .* have more tokens with their tools, up to 5", None),
        ([ROW | {"tools": [{"name": "abc"}]}], 5, "2 of the first 2 prompts .* up to 8", None),
        ([ROW | {"tools": '[{"name": "abc"}]'}, ROW | {"tools": ""}], 5, None, "2 of the first 4 prompts .* up to 8"),
    ],
)
def test_the_first_prompts_are_rendered_with_their_tools(
    tmp_path: Path, rows: list[dict[str, Any]], limit: int, said: str | None, warned: str | None
) -> None:
    config = tiny_run(tmp_path, f"data.max_prompt_length={limit}")
    write_tokenizer(tmp_path / "model")
    parquet.write_table(pa.Table.from_pylist(rows * 2), tmp_path / "train.parquet")
    problems = check_prompts(Settings.of(config, devices=1, accelerator=False))
    train = [problem for problem in problems if "train.parquet" in problem.reason]
    assert [problem.warning for problem in train] == ([] if said is None and warned is None else [said is None])
    assert all(re.match((said or warned or "").replace("(", "[(]"), problem.reason) for problem in train)
    assert all(f"Set data.max_prompt_length={problem.reason.split()[-1]}" in problem.way_out for problem in train)


def test_a_tokenizer_that_was_not_downloaded_is_refused(tmp_path: Path) -> None:
    """A clone without git-lfs has files that name those which it left out."""
    config, model = tiny_run(tmp_path), tmp_path / "model"
    write_tokenizer(model)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 7031645\n"
    (model / "tokenizer.json").write_text(pointer)
    (problem,) = check_prompts(Settings.of(config, devices=1, accelerator=False))
    assert (problem.key, problem.value) == ("actor_rollout_ref.model.path", str(model)) and not problem.warning
    assert "its tokenizer.json cannot be read: " in problem.reason and "git lfs pull" in problem.way_out


def test_a_template_that_cannot_render_is_a_warning(tmp_path: Path) -> None:
    config = tiny_run(tmp_path)
    write_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")
    problems = check_prompts(Settings.of(config, devices=1, accelerator=False))
    assert [problem.warning for problem in problems] == [True, True] and "no such role" in problems[0].reason


def test_the_cache_holds_the_longest_sequence(tmp_path: Path) -> None:
    """The model keeps 2 x 2 heads x 32 x 2 layers x 2 bytes = 512 bytes of a token."""
    longest, cache = "actor_rollout_ref.rollout.max_model_len", f"{engine_kwargs.KEY}.kv_cache_memory_bytes"
    sized = {"hidden_size": 128, "vocab_size": 64, "intermediate_size": 64}

    def problems(*overrides: str, accelerator: bool = False) -> list[Problem]:
        config = tiny_run(tmp_path, "actor_rollout_ref.rollout.dtype=bfloat16", *overrides)
        write_model(tmp_path / "model", **sized)
        return check_cache(Settings.of(config, devices=1, accelerator=accelerator))

    assert problems(f"{longest}=2000", f"{cache}={2000 * 512}") == []
    (problem,) = problems(f"{longest}=2001", f"{cache}={2000 * 512}")
    assert (problem.key, problem.value, problem.warning) == (longest, 2001, False)
    assert problem.reason == f"a sequence of 2001 tokens takes {2001 * 512} bytes of KV cache, and {cache}={2000 * 512}"
    assert problem.way_out == f"Lower it, so that a sequence has 2000 tokens, or set {cache}={2001 * 512}"
    (problem,) = problems(f"{longest}=null", f"{cache}=1000", "data.max_prompt_length=64", "data.max_response_length=8")
    assert (problem.key, problem.value) == ("data.max_prompt_length", 64)
    on_device = ("seamless.device_memory_gb=0.002", "actor_rollout_ref.rollout.gpu_memory_utilization=0.5")
    (problem,) = problems(f"{longest}=2000", f"{cache}=null", *on_device)
    assert "gpu_memory_utilization=0.5 leaves 0.0 GB for it" in problem.reason
    assert problems(f"{longest}=2000", f"{cache}=null", "seamless.device_memory_gb=80") == []
