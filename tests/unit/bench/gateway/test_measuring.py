"""What the gateway's bench asks for, and what it makes of the answers."""

from __future__ import annotations

import json
from statistics import mean

import pytest

from seamless_verl.bench.gateway.load import AT_ONCE, STEADY, Asked, Callers, Shape, Timed, shapes
from seamless_verl.bench.gateway.measuring import HEAD, Measured, Window, rows, table

APART = Shape(32, False, Callers.APART)


def test_callers_in_step_begin_together_and_ask_for_replies_of_one_length() -> None:
    shape = Shape(32, True)
    assert {shape.begins_s(caller, STEADY) for caller in range(32)} == {0.0}
    (asked,) = shape.asked(STEADY)
    assert json.loads(asked.body)["max_tokens"] == 32 and json.loads(asked.body)["stream"]
    assert asked.takes_s == pytest.approx(0.64)


def test_callers_apart_begin_over_one_replys_time_and_lengths_are_drawn_alike_for_every_arm() -> None:
    begins = [APART.begins_s(caller, STEADY) for caller in range(32)]
    assert begins == pytest.approx([caller * 0.02 for caller in range(32)])
    asked = APART.asked(STEADY)
    assert asked == APART.asked(STEADY)
    lengths = [json.loads(one.body)["max_tokens"] for one in asked]
    assert 16 <= min(lengths) < max(lengths) <= 48 and mean(lengths) == pytest.approx(32, rel=0.1)
    assert [one.takes_s for one in asked] == pytest.approx([length * 0.02 for length in lengths])


def test_replies_at_once_have_no_time_to_be_spread_over() -> None:
    assert [one.name for one in shapes(AT_ONCE)] == [
        "1 whole",
        "1 streamed",
        "32 in step, whole",
        "32 in step, streamed",
    ]
    names = [one.name for one in shapes(STEADY)]
    assert names[4:] == ["32 apart, whole", "32 apart, streamed"] and len(set(names)) == 6


def test_added_latency_is_over_what_the_engine_takes_for_each_length() -> None:
    short, long = (Asked.of(STEADY, tokens, stream=False) for tokens in (16, 48))

    def stint(late: float, *asked: Asked) -> Window:
        return Window.of([(Timed(0.01 + late, one.takes_s + late), one) for one in asked], 1.0, 0.1)

    # The gateway happened to be asked for long replies more often, which is nothing that it adds.
    stints = {"direct": [stint(0.001, short, short, long)], "gateway": [stint(0.004, short, long, long)]}
    measured = Measured(STEADY, APART, stints)
    direct, gateway = rows([measured])
    assert gateway["p50_ms"] == pytest.approx(964) and direct["p50_ms"] == pytest.approx(321)
    for what in ("first_p50", "first_p99", "p50", "p99"):
        assert gateway[f"added_{what}_ms"] == pytest.approx(3)
    assert (gateway["callers"], gateway["concurrent"]) == ("apart", 32)
    assert table([measured]).splitlines()[0].split("  ")[0].strip() == HEAD[0]
