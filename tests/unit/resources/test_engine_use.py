"""What engines lose while training waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seamless_verl.resources.engine_use import EngineLoss, EngineUse
from seamless_verl.rollout.observation import ReplicaLoad


def seen(*engines: tuple[int, int]) -> list[ReplicaLoad]:
    """Engines of 8 seats by their running calls and their tokens."""
    return [ReplicaLoad(f"r{i}", n, 0, 8, tokens) for i, (n, tokens) in enumerate(engines)]


def test_an_engine_with_few_calls_loses_what_a_full_one_would_generate_more() -> None:
    use = EngineUse()
    use.look(seen((8, 0)), 0, 0.0, 1)
    use.look(seen((8, 800)), 0, 1.0, 1)
    assert use.take().seconds == 0.0, "every seat is taken"
    use.wait_ended()
    use.look(seen((1, 900)), 0, 10.0, 1)
    assert use.take().seconds == 0.0, "between two waits nothing is counted"
    use.look(seen((1, 1100)), 0, 12.0, 1)
    assert use.take().seconds == pytest.approx(2.0 * (1 - 100 / 800))


def test_an_idle_engine_loses_everything_and_engines_count_alike() -> None:
    use = EngineUse()
    use.look(seen((8, 0), (0, 0)), 0, 0.0, 1)
    use.look(seen((8, 800), (0, 0)), 0, 1.0, 1)
    assert use.take().seconds == pytest.approx(0.5)


def test_tokens_of_a_restarted_data_plane_are_no_rate() -> None:
    use = EngineUse()
    for now, tokens in ((0.0, 0), (1.0, 800), (2.0, 8)):
        use.look(seen((8, tokens)), 0, now, 1)
    assert use.curve.at(8) == pytest.approx(800)


def test_a_call_that_reports_its_tokens_in_pieces_has_the_rate_that_it_has() -> None:
    """64 at a time: most looks see none of them."""
    use, now = EngineUse(), 0.0
    for _ in range(100):
        use.look(seen((1, 64 * int(now / 0.9))), 0, now, 1)
        now += 0.2
    assert use.curve.at(1) == pytest.approx(64 / 0.9, rel=0.15)


def test_an_engine_that_is_paused_says_nothing_of_its_rate() -> None:
    """Its calls are frozen."""
    use = EngineUse()
    use.look(seen((8, 0)), 0, 0.0, 1)
    use.look(seen((8, 800)), 0, 1.0, 1)
    paused = [replace(load, serves=False) for load in seen((8, 800))]
    for now, loads in ((2.0, paused), (3.0, paused), (4.0, seen((8, 800))), (5.0, seen((8, 1600)))):
        use.look(loads, 0, now, 1)
    assert use.curve.at(8) == pytest.approx(800)


def test_looks_are_apart() -> None:
    use = EngineUse()
    assert use.due(5.0)
    use.look(seen((8, 0)), 0, 5.0, 1)
    assert not use.due(5.1) and use.due(5.3)


def test_with_other_prompts_there_would_be_other_calls_in_proportion() -> None:
    use = EngineUse()
    for now in (0.0, 1.0):
        use.look(seen((8, 800 * int(now))), 0, now, 3)
    use.wait_ended()
    use.take()
    use.look(seen((4, 0)), 0, 10.0, 3)
    use.look(seen((4, 600)), 0, 11.0, 3)
    fewer, more = (1 - use.curve.at(calls) / 800 for calls in (3, 5))
    assert use.take() == EngineLoss(pytest.approx(1 - 600 / 800), pytest.approx(fewer), pytest.approx(more))
    assert fewer > 1 - 600 / 800 > more > 0


def test_calls_that_wait_would_take_the_seats_of_those_that_there_would_not_be() -> None:
    use = EngineUse()
    for now in (0.0, 1.0):
        use.look(seen((8, 800 * int(now))), 8, now, 1)
    assert use.take() == EngineLoss(0.0, 0.0, 0.0), "half of 16 calls are as many as there are seats"
