"""A mixture of experts trains with the experts that its engines chose (R3), cut by commits, a killed replica, a resume.

Every choice of every router in every forward pass is compared with the journal's record of what the engine chose.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from support.data.routes_seen import SEEN, seen
from support.job import AGENT, Job
from support.megatron_runs import reference
from support.paths import DATA
from support.replicas import servers

from seamless_verl.journal import JournalReader
from seamless_verl.journal.stored import rebuild_record
from seamless_verl.tools.trajectories.recorded import recorded
from seamless_verl.trajectory.policies import TrainAll
from seamless_verl.trajectory.sequences import assemble

pytestmark = [pytest.mark.integration, pytest.mark.long]
MEGATRON = "actor_rollout_ref__actor__megatron__"
MIXTURE: dict[str, Any] = {
    f"{MEGATRON}expert_model_parallel_size": 2,
    f"{MEGATRON}router_replay__mode": "R3",
    "actor_rollout_ref__rollout__enable_rollout_routing_replay": True,
    "actor_rollout_ref__model__external_lib": "routes_seen",
    "trainer__n_gpus_per_node": 2,
    "trainer__save_freq": 2,
    "trainer__resume_mode": "auto",
    "seamless__max_staleness": 1,
    "actor_rollout_ref__actor__optim__lr": 1e-5,  # tokens of older weights are compared, too
    "actor_rollout_ref__rollout__agent__default_agent_loop": "varied",  # some calls run when a step's last one ends
    "data__max_response_length": 160,
    "actor_rollout_ref__rollout__max_model_len": 384,
}
KILLED, STEPS = 3, 6


def job(folder: Path, data: Path, number: int, temporary: Path, **more: Any) -> Job:
    """The same command each time, but for its number of steps; each start has its own log and metrics."""
    options = AGENT | MIXTURE | more | {"trainer__default_local_dir": folder / "checkpoints"}
    (folder / "seen").mkdir(exist_ok=True)
    return Job(folder / f"start-{number}", data, options, {SEEN: str(folder / "seen")}, temporary=temporary).start()


def test_each_token_is_trained_with_the_experts_that_its_engine_chose(moe: Path, tmp_path: Path) -> None:
    temporary = Path(tempfile.mkdtemp(prefix="t"))
    first = job(tmp_path, moe, 1, temporary, trainer__total_training_steps=STEPS)
    first.wait_for(f"step:{KILLED}", timeout=400)
    servers(first)[0].kill()
    first.finish()
    second = job(tmp_path, moe, 2, temporary, trainer__total_training_steps=STEPS + 2).finish()
    assert "sessions that had ended may be taken up" in second.log()
    for run in (first, second):
        for step, metrics in run.metrics().items():
            print(step, {name: metrics.get(name) for name in REPORTED})  # noqa: T201
            assert metrics["training/rollout_actor_probs_pearson_corr"] > 0.999, step
            assert metrics["actor/routes_flipped"] < 0.05, step
            assert metrics["sessions/failed"] == 0
    cut, several = compare(tmp_path)
    assert cut > 0, "no sequence has tokens of two versions, or of two replicas"
    assert several > 0, "no sequence has two turns"


REPORTED = ("training/rollout_actor_probs_pearson_corr", "actor/routes_flipped", "training/rollout_logprob_diff_max")


def compare(folder: Path) -> tuple[int, int]:
    """Checks every choice that was seen; returns how many sequences were cut, and how many have several turns."""
    chosen, cut, several = {}, 0, 0
    reader = JournalReader(folder / "checkpoints" / "trajectories.sqlite")
    for summary in reader.sessions():
        stored = reader.read(summary.session_id)
        if stored is None or not stored.outcome.startswith("step"):
            continue
        how = recorded(stored)
        for sequence in assemble(rebuild_record(stored), TrainAll(), how.version, how.limits).sequences:
            assert sequence.routes is not None
            ids = (*sequence.prompt_ids.tolist(), *sequence.response_ids.tolist())
            chosen.setdefault(ids, []).append(sequence.routes)
            cut += any(len({(s.version, s.replica) for s in call.segments}) > 1 for call in stored.calls)
            several += len(sequence.turn_ids) > 1
    checked = 0
    for ids, layer, rows in seen(folder / "seen"):
        for position, experts in rows.items():
            if position < len(ids) - 1:
                assert experts in [set(routes[position, layer].tolist()) for routes in chosen[tuple(ids)]]
                checked += 1
    print(f"{checked} choices of {len(chosen)} sequences, {cut} of them cut, {several} of several turns")  # noqa: T201
    assert checked > 10_000
    return cut, several


@pytest.mark.parametrize("mode", ["R2", "disabled"])
def test_without_the_engines_routes_it_trains_and_is_less_exact(moe: Path, tmp_path: Path, mode: str) -> None:
    """R2 replays in the update what the computation of old logprobs chose, which is not the engine's choice."""
    off = {f"{MEGATRON}router_replay__mode": mode, "actor_rollout_ref__rollout__enable_rollout_routing_replay": False}
    run = job(tmp_path, moe, 1, Path(tempfile.mkdtemp(prefix="t")), **off, trainer__total_training_steps=3).finish()
    exactness = [metrics[REPORTED[0]] for metrics in run.metrics().values()]
    print(mode, exactness)  # noqa: T201
    assert len(exactness) == 3 and min(exactness) > 0.99
    assert min(exactness) < 0.9999, "few choices differ, and a step may have none of them, but not each of three steps"
    for metrics in run.metrics().values():
        assert metrics["actor/grad_norm"] > 0 and "actor/routes_flipped" not in metrics


TOOL_AGENT: dict[str, Any] = {
    "actor_rollout_ref__rollout__agent__default_agent_loop": "tool_agent",
    "actor_rollout_ref__rollout__agent__agent_loop_config_path": "null",
    "actor_rollout_ref__rollout__multi_turn__enable": True,
    "actor_rollout_ref__rollout__multi_turn__function_tool_path": DATA / "calling_tools.py",
    "actor_rollout_ref__rollout__multi_turn__format": "always",
    "actor_rollout_ref__rollout__multi_turn__max_assistant_turns": 3,
    "actor_rollout_ref__rollout__max_model_len": 768,
    "data__max_prompt_length": 512,
    "data__max_response_length": 160,
    "seamless__gateway__enabled": False,
    "seamless__max_staleness": 0,
}


def test_the_turns_of_verls_tool_agent_are_trained_with_the_engines_experts(moe: Path, tmp_path: Path) -> None:
    """Without a journal: its first step's tokens are of the initial model, whose experts transformers computes."""
    temporary = Path(tempfile.mkdtemp(prefix="t"))
    run = job(tmp_path, moe, 1, temporary, **TOOL_AGENT, trainer__total_training_steps=1).finish()
    metrics = run.metrics()[1]
    print({name: metrics.get(name) for name in (*REPORTED, "num_turns/mean", "response_length/mean")})  # noqa: T201
    assert metrics["num_turns/mean"] > 4, "its sessions call no tools"
    assert metrics["training/rollout_actor_probs_pearson_corr"] > 0.999
    assert metrics["actor/routes_flipped"] < 0.05
    others, checked = 0, 0
    model, own = reference(moe / "model"), dict[tuple[int, ...], Any]()
    for ids, layer, rows in seen(tmp_path / "seen"):
        if tuple(ids) not in own:
            own[tuple(ids)] = routes_of(model, ids)
        routes = own[tuple(ids)]
        differ = [set(routes[layer][position].tolist()) != experts for position, experts in rows.items()
                  if position < len(ids) - 1]  # fmt: skip
        others, checked = others + sum(differ), checked + len(differ)
    print(f"{others} of {checked} choices in {len(own)} sequences are not those of transformers in fp32")  # noqa: T201
    assert checked > 10_000 and others < checked / 1000


def routes_of(model: Any, ids: list[int]) -> list[Any]:
    """Of each layer [tokens, top k]: the experts that transformers chooses."""
    import torch

    chosen = list[Any]()
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, given, out: chosen.append(out[2]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return chosen
