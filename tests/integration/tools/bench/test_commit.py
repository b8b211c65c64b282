"""The bench of weight commits: its processes move the real bytes, and its rows are medians of what a commit reports."""

from __future__ import annotations

import asyncio

import pytest

pytestmark = pytest.mark.integration


def test_replicas_have_what_the_ranks_of_the_trainer_staged_together() -> None:
    from seamless_verl.tools.bench.commit_processes import BenchServer, BenchTrainer
    from seamless_verl.weights.staging import one_per_host

    trainers, server = [BenchTrainer(), BenchTrainer()], BenchServer(0)
    for process in (*trainers, server):
        process.set_up(200_000)
    for version in range(1, 4):
        for trainer in trainers:
            trainer.step(float(version))
        place = trainers[0].begin(2)
        staged = one_per_host([trainer.write(version, place, i, 2) for i, trainer in enumerate(trainers)])
        asyncio.run(server.update_weights(version, staged))
        assert asyncio.run(server.values()) == {float(version)} and server.engine.version == version
        assert server.plan.plan is not None and 0 < server.cpu_s <= server.pause_s
    for trainer in trainers:
        trainer.staged.close()


def test_a_rank_copies_beside_its_trainer_whose_next_step_is_held() -> None:
    from seamless_verl.tools.bench.commit_processes import BenchServer, BenchTrainer
    from seamless_verl.weights.staging import one_per_host

    trainer, server = BenchTrainer(), BenchServer(0)
    for process in (trainer, server):
        process.set_up(200_000)
    for version in range(1, 4):
        trainer.step(float(version))
        begun = trainer.stage(version, None, 0, 1, in_background=True)
        trainer.step(-1.0)
        staged = one_per_host([trainer.finish().report])
        assert [weights.host for weights in staged] == [begun.host]
        asyncio.run(server.update_weights(version, staged))
        assert asyncio.run(server.values()) == {float(version)}
    trainer.staged.close()


def test_a_row_has_the_medians_of_its_commits() -> None:
    from seamless_verl.tools.bench.commit import CommitCost
    from seamless_verl.weights.update import CommitTimes

    times = [
        CommitTimes(began=0.0, committed=0.1 * i, stage_s=0.08 * i, load_s=0.3 * i, pauses_s=[0.01 * i, 0.03 * i])
        for i in (1, 2, 9)
    ]
    row = CommitCost.of((3_000_000, 2, 1, 2), times, [0.1, 0.2, 0.9], [[0.01, 0.02], [0.01, 0.03], [0.05, 0.09]])
    assert (row.standstill_median_ms, row.standstill_max_ms, row.total_ms, row.wait_ms) == (40.0, 60.0, 800.0, 200.0)
    assert row.cpu_ms == 20.0 and row.held_ms == 160.0
    assert row.line == "| 3M | 2 | 2 | 40.0 | 60.0 | 20.0 | 800.0 | 200.0 | 25% | 160.0 |"
