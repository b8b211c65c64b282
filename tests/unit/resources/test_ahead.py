"""How far generation runs ahead: as little as keeps engines busy, and never back and forth."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.resources.ahead import WINDOW, AheadLevel, EngineLoss, EngineUse, StalenessBound
from seamless_verl.rollout.observation import ReplicaLoad


def run(level: AheadLevel, lost: list[float], steps: int) -> list[int]:
    """The levels of so many steps of 1 s, where `lost[n]` s are lost with n steps' worth ahead."""
    levels = []
    for _ in range(steps):
        now = level.level
        fewer, more = lost[max(0, now - 1)], lost[min(len(lost) - 1, now + 1)]
        level.step_ended(1.0, EngineLoss(lost[now], fewer, more))
        levels.append(level.level)
    return levels


def test_it_begins_with_half_of_what_is_permitted() -> None:
    assert [AheadLevel(most).level for most in range(7)] == [0, 1, 1, 2, 2, 3, 3]


def test_it_goes_down_to_one_where_nothing_is_lost() -> None:
    levels = run(AheadLevel(6), [1.0, 0.04, 0.0, 0.0, 0.0, 0.0, 0.0], 50)
    assert levels[:WINDOW] == [3] * WINDOW, "one step to start, then a window"
    assert sorted(set(levels), reverse=True) == [3, 2, 1] and levels[-1] == 1


def test_it_stays_where_less_would_lose_and_more_would_gain_little() -> None:
    assert set(run(AheadLevel(4), [1.0, 0.06, 0.0, 0.0, 0.0], 50)) == {2}
    assert set(run(AheadLevel(4), [1.0, 0.9, 0.5, 0.46, 0.0], 50)) == {2}


def test_where_devices_are_idle_without_a_wait_less_is_not_safe() -> None:
    """As in steps so short that engines have nothing to do while their batch is prepared."""
    often, seldom = AheadLevel(4), AheadLevel(4)
    for step in range(60):
        often.step_ended(1.0, EngineLoss(), 0.2 if step % 3 else 0.0)
        seldom.step_ended(1.0, EngineLoss(), 0.4 if step % WINDOW == 0 else 0.05)  # a validation
    assert (often.level, seldom.level) == (2, 1)


def test_one_long_sample_in_six_steps_speaks_against_less() -> None:
    level = AheadLevel(4)
    for step in range(60):
        level.step_ended(1.0, EngineLoss(0.0, 0.3 if step % WINDOW == 0 else 0.0))
    assert level.level == 2


def test_it_goes_up_as_long_as_that_gains() -> None:
    levels = run(AheadLevel(5), [1.0, 0.9, 0.7, 0.5, 0.3, 0.04], 60)
    assert levels[-1] == 5 and levels == sorted(levels)


def test_it_goes_up_again_when_samples_become_longer() -> None:
    level = AheadLevel(4)
    assert run(level, [1.0, 0.0, 0.0, 0.0, 0.0], 30)[-1] == 1
    assert run(level, [1.0, 0.4, 0.2, 0.01, 0.0], 60)[-1] == 3


def test_losses_that_more_would_not_save_drive_it_nowhere() -> None:
    """A share of the steps waits for a sample so long that nothing else is left to do."""
    for seed in range(50):
        chance, level = random.Random(seed), AheadLevel(4)
        for _ in range(60):
            lost = 0.3 if chance.random() < 0.3 else 0.0
            level.step_ended(1.0, EngineLoss(lost, lost + 0.1, lost * 0.9))
        assert level.level == 2


def test_it_says_what_it_does_and_why() -> None:
    up, down = AheadLevel(4), AheadLevel(4)
    said = [up.step_ended(2.0, EngineLoss(1.0, 2.0, 0.4)) for _ in range(WINDOW + 1)]
    assert said[-1] == "one more would have kept engines from losing 30% of the last steps"
    said = [down.step_ended(2.0, EngineLoss(0.0, 0.04, 0.0)) for _ in range(WINDOW + 1)]
    assert said[-1] == "with one fewer engines would have lost 2% of a step at most"


def test_a_resumed_run_goes_on_at_its_level() -> None:
    first = AheadLevel(6)
    run(first, [1.0, 0.9, 0.8, 0.7, 0.5, 0.3, 0.0], 9)
    state = json.loads(json.dumps(first.state_dict()))
    second = AheadLevel(6)
    second.load_state_dict(state)
    assert second.state_dict() == first.state_dict() and second.level > 3


@pytest.mark.parametrize(("most", "level"), [(0, 0), (1, 1), (3, 3), (8, 4)])
def test_a_resumed_run_may_have_another_bound(most: int, level: int) -> None:
    resumed = AheadLevel(most)
    resumed.load_state_dict({"level": 4, "descends": True})
    assert resumed.level == level
    if most > 1:
        assert run(resumed, [0.0] * 9, 60)[-1] == 1, "it looks on"


def test_a_checkpoint_of_before_says_less() -> None:
    resumed = AheadLevel(4)
    resumed.load_state_dict({"level": 0, "final": True, "before": None})
    assert resumed.level == 1 and resumed.descends


SECONDS = st.sampled_from([0.0, 0.01, 0.04]) | st.floats(0, 2)


@given(st.lists(st.builds(EngineLoss, SECONDS, SECONDS, SECONDS), min_size=30, max_size=120), st.integers(0, 6))
def test_it_turns_at_most_once(lost: list[EngineLoss], most: int) -> None:
    level = AheadLevel(most)
    levels = [level.level]
    for of_step in lost:
        level.step_ended(1.0, of_step)
        levels.append(level.level)
        assert min(1, most) <= level.level <= most
    moves = [b - a for a, b in pairwise(levels) if a != b]
    assert moves == sorted(moves) and set(moves) <= {-1, 1}


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_step_of_no_time_is_left_out(seconds: float) -> None:
    level = AheadLevel(4)
    assert [level.step_ended(seconds, EngineLoss(1.0, 1.0)) for _ in range(9)] == [None] * 9


def seen(*engines: tuple[int, int]) -> list[ReplicaLoad]:
    """Engines of 8 slots by their running calls and their tokens."""
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


def test_calls_that_wait_would_take_the_slots_of_those_that_there_would_not_be() -> None:
    use = EngineUse()
    for now in (0.0, 1.0):
        use.look(seen((8, 800 * int(now))), 8, now, 1)
    assert use.take() == EngineLoss(0.0, 0.0, 0.0), "half of 16 calls are as many as there are slots"


def worst_staleness(
    bound: StalenessBound, finishing: list[int], steps: int, *, ahead: int | None = None, enforce_bound: bool = True
) -> int:
    """Train `steps` steps; `finishing[n]` polls pass before the n-th prompt has been generated."""
    outstanding: list[tuple[int, int]] = []  # (step submitted, polls until done)
    worst, number = 0, 0
    for step in range(1, steps + 1):
        for update in range(bound.updates):
            for _ in range(bound.room(len(outstanding), ahead, update)):
                outstanding.append((step, finishing[number % len(finishing)]))
                number += 1
            while True:
                done = sorted(p for p in outstanding if p[1] <= 0)
                taken = done[: bound.batch]
                left_behind = list(outstanding)
                for prompt in taken:
                    left_behind.remove(prompt)
                waiting = any(p[1] > 0 for p in outstanding)
                kept = (
                    not enforce_bound
                    or not waiting
                    or bound.keeps(step=step, update=update, left_behind=[p[0] for p in left_behind])
                )
                if len(taken) == bound.batch and kept:
                    break
                outstanding = [(p, polls - 1) for p, polls in outstanding]
            outstanding = left_behind
            worst = max(worst, *(step - p for p, _ in taken))
    return worst


schedules = st.lists(st.integers(0, 30), min_size=1, max_size=40)


@given(st.integers(0, 4), st.integers(1, 5), st.integers(1, 3), st.none() | st.integers(0, 5), schedules)
@settings(max_examples=300, deadline=None)
def test_no_token_is_older_than_the_bound(
    staleness: int, batch: int, updates: int, ahead: int | None, finishing: list[int]
) -> None:
    bound = StalenessBound(staleness, batch, updates)
    assert worst_staleness(bound, finishing, steps=20, ahead=ahead) <= staleness


def test_a_step_that_runs_ahead_by_less_than_the_bound_is_refilled_before_each_update() -> None:
    bound = StalenessBound(max_staleness=4, batch=4, updates=4)
    assert [bound.room(32 - 4 * update, 1, update) for update in range(4)] == [0, 4, 8, 12]
    assert [bound.room(80 - 4 * update, None, update) for update in range(4)] == [0, 0, 0, 0]
    assert bound.room(64, None, update=1) == 12
    assert [bound.room(16 - 4 * update, 0, update) for update in range(4)] == [0, 0, 0, 0], "none for a later step"


def test_without_holding_it_would_be_passed() -> None:
    finishing = [30, 0, 0, 0, 0, 0, 0]
    bound = StalenessBound(2, 2)
    assert (
        worst_staleness(bound, finishing, steps=20, enforce_bound=False)
        > 2
        >= worst_staleness(bound, finishing, steps=20)
    )


def test_a_smaller_bound_leaves_no_room_until_the_surplus_is_trained() -> None:
    bound = StalenessBound(0, 4)
    assert [bound.room(n) for n in (0, 3, 4, 8)] == [4, 1, 0, 0]
    assert bound.too_old(5, 4) and not bound.too_old(5, 5)
