"""The search finds the fastest layout, says where others lose, and counts machines from published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seamless_verl.resources.model_facts import ModelFacts
from seamless_verl.tools.simulator.machine import (
    ACCELERATORS,
    H800_8B,
    TRAIN_SHARE,
    MachineProfile,
    active_parameters,
    machine_of,
    seats_of,
)
from seamless_verl.tools.simulator.optimize import PlanCandidate, Prediction, Search, Unit, layouts, ordered, why_slower
from seamless_verl.tools.simulator.scenario import BOTH, ROLLOUT, TRAIN, SimulatedWorkload

EVEN = SimulatedWorkload(prompts=16, samples=4, median=60, sigma=0.3, cap=256)
LONG = SimulatedWorkload(prompts=16, samples=4, median=60, sigma=1.3, cap=2000)
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
}
MIXTURE = QWEN3_8B | {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def unit(**times: float) -> Unit:
    return Unit(1, replace(MachineProfile(), **times), seats=32)


def facts(config: dict[str, object]) -> ModelFacts:
    found = ModelFacts.read(config)
    assert found is not None
    return found


def test_the_layouts_of_two_devices() -> None:
    assert [(c.layout, c.devices) for c in layouts(2, unit())] == [
        ("colocated", (BOTH, BOTH)),
        ("multiplexed", (BOTH, ROLLOUT)),
        ("disaggregated", (TRAIN, ROLLOUT)),
    ]


def test_machines_are_not_divided_where_there_are_several() -> None:
    for candidate in layouts(32, unit(), 8):
        assert candidate.training % 8 == 0 and candidate.generating % 8 == 0
        assert candidate.training + candidate.generating == 32
    assert {c.training for c in layouts(32, unit(), 8)} == {8, 16, 24, 32}


@pytest.mark.parametrize("train_token_s", [0.05e-3, 0.36e-3, 2e-3])
def test_the_first_is_the_fastest_of_all_that_were_simulated_one_by_one(train_token_s: float) -> None:
    search = Search(EVEN, stalenesses=(1,), updates=(1,), steps=12)
    candidates = list(layouts(4, unit(train_token_s=train_token_s)))
    best = search.run(candidates)[0]
    every = [search.run([candidate])[0].tokens_per_s for candidate in candidates]
    assert best.tokens_per_s >= 0.98 * max(every)


def test_where_training_is_cheap_and_switches_are_dear_devices_are_divided() -> None:
    cheap = unit(train_token_s=0.02e-3, switch_to_rollout_s=3.0, switch_to_train_s=3.0)
    best = Search(EVEN, stalenesses=(1, 2), updates=(1, 2)).run(list(layouts(4, cheap)))[0]
    assert best.candidate.layout == "disaggregated"
    free = unit(train_token_s=0.36e-3, switch_to_rollout_s=0.001, switch_to_train_s=0.001)
    best = Search(EVEN, stalenesses=(1, 2), updates=(1, 2)).run(list(layouts(2, free)))[0]
    assert best.candidate.layout == "colocated"


def test_no_staleness_is_given_away_for_nothing() -> None:
    predictions = Search(EVEN, stalenesses=(0, 1, 2, 4), updates=(1,)).run(list(layouts(2, unit())))
    best = predictions[0]
    fastest = max(p.tokens_per_s for p in predictions)
    assert best.tokens_per_s >= 0.98 * fastest
    assert all(
        p.candidate.max_staleness >= best.candidate.max_staleness
        for p in predictions
        if p.tokens_per_s >= 0.98 * fastest
    )


def test_each_candidate_is_simulated_once() -> None:
    seen = list[str]()
    predictions = Search(EVEN, stalenesses=(1, 2), updates=(1, 2), steps=5).run(
        list(layouts(2, unit())), progress=seen.append
    )
    candidates = {(*p.candidate.place, p.candidate.updates, p.candidate.max_staleness) for p in predictions}
    assert len(candidates) == len(predictions) == len(seen)


def predicted(training: int, generating: int, *, shared: bool, workload: SimulatedWorkload = EVEN) -> Prediction:
    search = Search(workload, stalenesses=(1,), updates=(1,))
    return search.run([PlanCandidate(unit(), training, generating, shared)])[0]


def test_a_reason_names_what_waits() -> None:
    best = predicted(2, 0, shared=True)
    assert why_slower(predicted(1, 1, shared=False), best).startswith("the devices that only generate are idle (+")
    slower = why_slower(predicted(3, 1, shared=False), predicted(4, 0, shared=True))
    assert slower.startswith("the trainer's devices are idle (+")
    assert why_slower(best, predicted(1, 1, shared=False)).startswith("older tokens for +")


def test_the_order_is_by_speed_and_the_best_may_be_a_little_slower() -> None:
    base = predicted(2, 0, shared=True)

    def with_speed(speed: float, staleness: int) -> Prediction:
        candidate = replace(base.candidate, max_staleness=staleness)
        return Prediction(candidate, replace(base.result, tokens_per_s=speed))

    fast, near, far = with_speed(100, 4), with_speed(98.5, 1), with_speed(90, 0)
    assert ordered([far, fast, near]) == [near, fast, far]


def test_a_published_machine_is_as_its_formulas_say() -> None:
    model, h100 = facts(QWEN3_8B), ACCELERATORS["h100"]
    assert active_parameters(model) == model.parameters == pytest.approx(8.2e9, rel=0.01)
    one, four = (machine_of(h100, model, n, length=1000) for n in (1, 4))
    reads = 2 * model.parameters / (0.6 * 3.35e12)
    assert one.decode_s(1) == pytest.approx(3e-3 + reads)
    assert four.decode_s(1) == pytest.approx(3e-3 + reads / 4)
    assert one.train_token_s == pytest.approx((6 * 8.2e9 + 3 * 36 * 4096 * 1000) / (989e12 * TRAIN_SHARE), rel=0.01)
    assert four.train_token_s == pytest.approx(one.train_token_s / 4)
    assert one.decode_s(512) > one.decode_s(64)
    again = machine_of(h100, model, 1, length=1000, recompute=True)
    assert 1.3 < again.train_token_s / one.train_token_s < 4 / 3


def test_the_named_machine_is_that_of_its_accelerator() -> None:
    counted = machine_of(ACCELERATORS["h800"], facts(QWEN3_8B), 1, length=2500, recompute=True)
    named = H800_8B
    assert [named.rate(calls) for calls in (1, 64, 256)] == pytest.approx(
        [counted.rate(calls) for calls in (1, 64, 256)], rel=1e-3
    )
    for name in ("context_token_s", "train_token_s", "switch_to_rollout_s", "sync_s", "load_s", "prefill_token_s"):
        assert getattr(named, name) == pytest.approx(getattr(counted, name), rel=2e-3)


def test_a_mixture_passes_few_of_its_parameters_and_reads_more_for_more_calls() -> None:
    model = facts(MIXTURE)
    assert active_parameters(model) < 0.4 * model.parameters
    machine = machine_of(ACCELERATORS["h200"], model, 1, length=1000)
    assert machine.decode_s(64) > 1.5 * machine.decode_s(1)


def test_a_cache_holds_fewer_calls_where_they_are_longer() -> None:
    model, h100 = facts(QWEN3_8B), ACCELERATORS["h100"]
    counts = [seats_of(h100, model, 1, context=context, share=0.5, most=256) for context in (1000, 8000, 64000, 640000)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 100 and counts[-1] == 0
    assert seats_of(h100, model, 4, context=64000, share=0.5, most=256) > 4 * counts[2]
