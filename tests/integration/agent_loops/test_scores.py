"""Every value that a score may be, by each way in which it comes: it is trained as a number, or not at all."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from support.agent_loops import make_loop
from support.data.given_scores import BESIDE, SCORES
from support.journal import NullRecorder
from support.paths import ROOT
from support.scripted_loops import Put, output, put, run_prompt, scripted, worker

from seamless_verl.agent_loops.group import GROUP, SessionGroup
from seamless_verl.agent_loops.rows import SessionOutputs
from seamless_verl.agent_loops.worker import SeamlessAgentLoopWorker
from seamless_verl.agents.callable import call_agent
from seamless_verl.agents.endpoint import Endpoint
from seamless_verl.agents.outcome import AgentOutcome, AgentStatus
from seamless_verl.config.schema import SeamlessConfig
from seamless_verl.data_plane.finished_sessions import FinishedSession
from seamless_verl.data_plane.runner_requests import RunnerRequests
from seamless_verl.gateway.admin import Admin
from seamless_verl.gateway.api_errors import ApiError, ErrorCode
from seamless_verl.gateway.sessions import SessionTable
from seamless_verl.runtime.scores import beside_score
from seamless_verl.trainer.trainer import SeamlessTrainer

pytestmark = pytest.mark.integration
__all__ = ["put", "scripted"]
LOOPS = "seamless_verl.agent_loops.loops"
RAISING = ("an error", "agent")  # an agent that raises has failed: it is not its reward that is at fault
SAID = {
    "dict without a score": "key",
    "an error": "the judge is away",
    "what cannot be sent": "generator",
}


def given_to_agent(name: str) -> Any:
    """What an agent returns: the key of its score is `reward`. None leaves the score to the reward function."""
    value = SCORES[name][0]()
    return {"reward": value.pop("score"), **value} if isinstance(value, dict) and "score" in value else value


@pytest.fixture(scope="module")
def reward_worker() -> Iterator[Any]:
    """verl's worker of the reward loop with verl's own manager, and a function that gives the value of this name."""
    import ray
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

    from seamless_verl.agent_loops.scoring import reward_workers

    class Tokenizer:
        def decode(self, *_: Any, **__: Any) -> str:
            return "text"

    @ray.remote
    class Worker:
        def __init__(self) -> None:
            config = OmegaConf.create({})
            self.manager = NaiveRewardManager(config, Tokenizer(), lambda ground_truth, **_: SCORES[ground_truth][0]())

        async def compute_score(self, data: Any) -> Any:
            return await self.manager.run_single(data)

    paths = {"env_vars": {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}}
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env=paths)
    yield (reward_workers([Worker.remote()]) or [None])[0]
    ray.shutdown()


@pytest.mark.parametrize("validate", [False, True], ids=["training", "validation"])
@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name in SCORES for way in ("function", "agent") if (name, way) != RAISING]
)
def test_a_score_is_its_number_or_none(
    put: Put,
    scripted: dict[int, Any],
    caplog: pytest.LogCaptureFixture,
    reward_worker: Any,
    name: str,
    way: str,
    validate: bool,
) -> None:
    """Of two sessions of a prompt, the second one has this score."""
    made, number = worker(SeamlessAgentLoopWorker, put, 2), SCORES[name][1]
    made.seamless, made.scorer = SeamlessConfig(min_sessions=1), "compute_score of my/reward.py"
    made.reward_loop_worker_handles = [reward_worker]
    ended = AgentOutcome(AgentStatus.FINISHED)
    if way == "agent":
        ended = asyncio.run(call_agent(lambda *_: given_to_agent(name), {}, Endpoint("http://h", "key", "id")))
    loop = make_loop({"name": "mine", "_target_": f"{LOOPS}.CallableAgentLoop", "agent": "operator:add"})
    context = copy_context()  # of a group of our worker
    context.run(GROUP.set, SessionGroup(made.writer, "u"))
    score = context.run(loop.reward, ended, FinishedSession([], {}, 1))
    failure = () if ended.status is AgentStatus.FINISHED else (str(ended.status), loop.why_failed(ended))
    scripted |= {i: SessionOutputs([output([7, 8], 1.0)], made.plane, f"s{i}") for i in range(2)}
    scripted[1] = SessionOutputs([output([7, 8], score)], made.plane, "s1", *failure)
    run_prompt(made, validate, reward_model={"ground_truth": name})
    scores = {key: columns["rm_scores"].tolist() for key, (_, columns) in put.rows().items()}
    (end,) = made.plane.ends
    assert scores["u_0_0"] == [0.0, 1.0] and end.error is None
    if number is not None:
        assert scores["u_1_0"] == [0.0, number] and end.kinds == {} and caplog.messages == []
        return
    assert end.kinds == {"reward": 1}
    (said,) = caplog.messages
    scorer = "my/reward.py" if score is None else "the agent operator:add"
    assert scorer in said and SAID.get(name, "is no finite number") in said and "'hm'" in said and len(said) < 600
    assert ("validation" in said) is validate
    if validate:
        assert math.isnan(scores["u_1_0"][1])
        assert "reward" not in made.plane.notes["s1"].as_dict(kept=True).get("rewards", {})
    else:
        note = made.plane.notes["s1"].as_dict(kept=False)
        assert "u_1_0" not in scores and note["dropped"] == "reward" and note["reason"].startswith("it has no score")


@pytest.mark.parametrize("name", SCORES)
async def test_a_score_that_is_posted_or_reported_is_its_number_or_refused(name: str) -> None:
    """By a program outside: to the admin API, and as a runner's completion, where none leaves it to the run."""
    table, (make, number), reported = SessionTable(), SCORES[name], list[Any]()
    if name in ("dict", "an error", "longer than Python writes"):
        make = dict  # a body has its values by name, and JSON's reader refuses such a number

    async def complete(lease_id: str, outcome: dict[str, Any]) -> bool:
        reported.append(outcome["reward"])
        return True

    async def nothing(*_: Any) -> None:
        pass

    async def post(value: Any) -> Any:
        return (await admin.reward(session, {"reward": value}))["reward"]

    async def report(value: Any) -> Any:
        await runners.handle("POST", "/runner/leases/a/complete", {"status": "finished", "reward": value})
        return reported.pop()

    admin, (session, _) = Admin(table, NullRecorder(), cancel=nothing), table.open("u")
    runners = RunnerRequests(SimpleNamespace(started=nothing, complete=complete))  # type: ignore[arg-type]
    for way in (post, report):
        if number is not None and name != "dict":
            assert await way(make()) == number
        elif (way, name) == (report, "None"):
            assert await way(None) is None
        else:
            with pytest.raises(ApiError, match="is no finite number") as caught:
                await way(make())
            assert (caught.value.code, caught.value.param) == (ErrorCode.MALFORMED, "reward")
            assert session.rewards == {} and reported == []


def test_a_validation_is_the_mean_of_the_samples_that_have_a_score() -> None:
    """And of what is beside them the numbers alone. A session that is missing counts 0 in verl's `acc`, as ever."""
    trainer = object.__new__(SeamlessTrainer)
    info = [beside_score({"acc": score, **BESIDE}) for score in (1.0, math.nan, 0.5, math.nan)]
    infos = {name: [one[name] for one in info] for name in info[0]} | {"reward": [1.0, math.nan, 0.5, math.nan]}
    infos |= {"mixed": [1, "a", {"b": 2}, None], "pred": ["4", 5, None, [6]], "texts": ["a"] * 4}
    expected = {("sums", "a"): 2, ("sums", "b"): 2, ("sums", "c"): 1}
    metrics = trainer._val_metrics_update(["sums"] * 4, ["a", "a", "b", "c"], infos, [2, 2, 4, 2], expected)
    assert metrics.pop("seamless/validation/unscored") == 2
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["val-aux/sums/reward/mean@1"] == 0.75, "of prompts a and b"
    assert metrics["val-core/sums/acc/mean@2"] == 0.25, "one session of b has left nothing"
    assert metrics["val-aux/sums/acc/mean@1"] == 1.0, "one session of a has no score"
    assert metrics["val-aux/sums/seen/mean@1"] == 0.25 and metrics["val-aux/sums/mixed/mean@1"] == 1.0
    assert {name.split("/")[2] for name in metrics} <= {
        "reward",
        "acc",
        "acc_success_only",
        "seen",
        "mixed",
        "max",
        "min",
        "mean",
    }


def test_values_that_were_sent_beside_a_score_are_written_as_json() -> None:
    assert json.dumps(beside_score(BESIDE | {"where": object, 1: torch.tensor([1, 2])})).startswith(
        '{"parts": [1, {"a"'
    )
    assert beside_score(None) == beside_score([1]) == {}
