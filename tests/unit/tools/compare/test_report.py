"""The report: what it says of arms that finished, that failed, and of a comparison that was interrupted."""

from __future__ import annotations

from dataclasses import replace

from support.comparison import comparison, finished, frontier, logged

from seamless_verl.tools.compare.comparison import Comparison, Run, RunState
from seamless_verl.tools.compare.page import explanations, markdown, page, two_lines
from seamless_verl.tools.compare.report import (
    arm_table,
    caution,
    machine_lines,
    poll_line,
    ratio_table,
    reward_table,
    run_line,
    terminal_table,
    times_table,
    verdicts,
)


def test_an_arm_is_compared_with_the_first_one_in_pairs() -> None:
    _, (sync, ours, failed) = arm_table(comparison())
    assert sync[:4] == ["sync", "2/2", "238 (233-244)", "-"]
    assert ours[3] == "1.59 (1.57-1.62)" and ours[5:8] == ["30% (30%-30%)", "1.0, at most 1", "7"]
    assert failed[1:4] == ["0/2", "-", "-"]


def test_speed_is_with_validations_and_the_one_without_is_beside() -> None:
    log = logged(12, seconds=1.0)
    for row in log:
        row["data"]["timing_s/testing"] = 0.5
    one = comparison(runs=[finished("sync", 1, logged(12, seconds=2.0)), finished("seamless", 1, log)])
    header, (sync, ours) = arm_table(one)
    assert header[2:5] == ["tokens/s", "to baseline", "tokens/s without validations"]
    assert (sync[2:5], ours[2:5]) == (["256", "-", "256"], ["512", "2.00", "1,024"])
    names, (ratios,) = ratio_table(one)
    assert dict(zip(names, ratios, strict=True))["tokens/s without validations"] == "4.00"
    for text in (markdown(one), page(one)):
        assert "tokens/s without validations" in text and "they favour asynchronous modes" in text
    assert next(verdicts(one)).startswith("seamless: 2.00 times the tokens/s of sync")
    assert all("without" not in name for name in (*arm_table(comparison())[0], *ratio_table(comparison())[0]))


def test_a_pair_of_two_machines_is_said_beside_the_ratios() -> None:
    chip = {"processor": "Chip", "cores": 2, "memory_gb": 8.0, "load_average": [0.5]}
    card = {"gpus": ["NVIDIA H100", "NVIDIA H100"], "driver": "550.1"}
    one = comparison()

    def made_on(*machines: dict[str, object]) -> Comparison:
        runs = [replace(run, machine=machine) for run, machine in zip(one.runs[:4], machines, strict=True)]
        return replace(one, runs=(*runs, *one.runs[4:]))

    assert list(machine_lines(one)) == [] == list(machine_lines(made_on(chip, chip, chip, chip)))
    assert list(machine_lines(made_on(chip, chip, {}, chip | card))) == [], "what was not written down is not known"
    other = made_on(chip | card, chip | card, chip | card, chip | card | {"driver": "560.2"})
    (line,) = machine_lines(other)
    assert line.startswith(
        "With care: seamless, seed 2, was made on another machine (Chip, 2 cores, 8.0 GB, 2 x NVIDIA H100, driver "
        "560.2) than that run of sync (Chip, 2 cores, 8.0 GB, 2 x NVIDIA H100, driver 550.1), so that their ratio"
    )
    assert f"- {line}" in markdown(other) and line in page(other)


def test_every_figure_is_a_ratio_of_pairs_too() -> None:
    header, (ours, failed) = ratio_table(comparison())
    values = dict(zip(header, ours, strict=True))
    assert values["arm to sync"] == "seamless" and values["tokens/s"] == "1.59 (1.57-1.62)"
    assert values["step s"] == values["time of the same samples"] == "0.63 (0.62-0.64)"
    assert values["idle"] == "0.67 (0.67-0.67)" and values["in updates"] == "2.33 (2.33-2.33)"
    assert values["staleness"] == "-", "the baseline's is 0"
    assert set(failed[1:]) == {"-"}


def test_the_verdict_has_speed_and_reward() -> None:
    ours, failed = verdicts(comparison())
    assert ours.startswith("seamless: 1.59 times the tokens/s of sync (2 pairs, 1.57 to 1.62); the reward differs by")
    assert "within noise" in ours and failed == "separate_async: no pair of runs to compare."


def test_rewards_that_differ_by_more_than_noise_do() -> None:
    runs = [finished("sync", seed, logged(8, seconds=1.0, reward=0.01 + seed / 1e5)) for seed in (1, 2)]
    runs += [finished("seamless", seed, logged(8, seconds=1.0, reward=0.05 + seed / 1e5)) for seed in (1, 2)]
    assert arm_table(comparison(runs=runs))[1][1][-1].endswith(": differs")


def test_one_run_of_each_is_no_test_of_rewards() -> None:
    runs = [finished("sync", 1, logged(8, seconds=1.0)), finished("seamless", 1, logged(8, seconds=0.5))]
    (verdict,) = verdicts(comparison(runs=runs))
    assert verdict.startswith("seamless: 2.00 times the tokens/s of sync (one pair); the reward was not tested: ")


def test_a_failed_arm_is_reported_with_its_reason_and_its_log() -> None:
    text = markdown(comparison())
    reason = "```\ncode 1, 0 of 12 steps\nno <device> left\n```"
    assert f"## What did not finish\n\n`separate_async`, log `/x/log.txt`:\n\n{reason}" in text
    assert "Interrupted" not in text
    assert "**Interrupted**: 1 of 6 runs were not made." in markdown(comparison(interrupted=True))


def test_the_page_has_all_that_the_text_has_and_needs_no_network() -> None:
    found = page(comparison(interrupted=True))
    for part in (
        "1.59 times",
        "no &lt;device&gt; left",
        "seamless-verl compare arithmetic_grpo --steps 12",
        "Interrupted",
    ):
        assert part in found
    assert found.count('class="plotly-graph-div"') == 7
    assert "<script src=" not in found and "<link" not in found


def test_without_the_baseline_there_are_no_pairs_to_plot() -> None:
    runs = [Run("sync", 1, 1, RunState.FAILED, reason="code 1"), finished("seamless", 1, logged(8, seconds=1.0))]
    found = page(comparison(runs=runs))
    assert "Speed in pairs" not in found and found.count('class="plotly-graph-div"') == 6


def test_a_comparison_without_a_finished_run_has_a_page_too() -> None:
    none = comparison(runs=[Run("sync", 1, 1, RunState.REFUSED, reason="trainer.device='cuda': no accelerator")])
    assert "no accelerator" in page(none) and "no accelerator" in markdown(none) and "sync" in terminal_table(none)


def test_settings_that_differ_are_in_the_report_in_the_page_and_below_the_table() -> None:
    shown = terminal_table(comparison()).splitlines()[-1]
    assert shown.startswith(
        "Settings of seamless that differ from those of sync (in brackets): trainer.v1.trainer_mode="
    )
    assert "loss_mode=dppo_tv (vanilla), seamless.max_staleness=4 (not read) and 1 more" in shown
    text, html = markdown(comparison()), page(comparison())
    assert "## Where settings differ\n\n| arm | setting | its value | that of sync |" in text
    assert "| seamless | actor_rollout_ref.actor.clip_ratio | 0.15 | 0.2 |" in text
    assert "<td>actor_rollout_ref.actor.policy_loss.loss_mode</td><td>dppo_tv</td><td>vanilla</td>" in html
    assert "Where settings differ" not in markdown(comparison(different=False)) + page(comparison(different=False))


def test_few_steps_or_few_pairs_are_said_beside_the_ratios() -> None:
    said = "With care: this rests on 3 measured steps a run, fewer than 10, and on 2 pairs of runs, fewer than 3."
    few = comparison(steps=5)
    assert next(verdicts(few)).endswith(said) and caution(3, 1).endswith("1 pair of runs, fewer than 3.")
    assert f"|\n\n{said}\n\n## Where" in markdown(few) and f"<p>{said}</p>" in page(few)
    assert caution(10, 3) == "" and "steps" not in caution(10, 2) and "pair" not in caution(9, 3)


def test_the_line_of_a_run() -> None:
    run = finished("sync", 1, logged(8, seconds=2.0))
    assert run_line(run) == "sync, seed 1, round 1: 256 tokens/s, 2.00 s a step, idle 30%"
    failed = Run("sync", 2, 1, RunState.FAILED, reason="code 1\nlog")
    assert run_line(failed) == "sync, seed 2, round 1: failed: code 1"


def test_a_cell_has_its_spread_in_a_second_line() -> None:
    assert two_lines("1.59 (1.57-1.62)") == "1.59<small>1.57-1.62</small>"
    assert two_lines("+0.005 +- 0.064: differs") == "+0.005 +- 0.064<small>differs</small>"
    assert two_lines("a<b") == "a&lt;b"


def test_validations_by_step_are_a_table_of_the_mean_over_seeds_and_their_range() -> None:
    runs = []
    for arm, rise in (("sync", 0.01), ("seamless", 0.02)):
        for seed in (1, 2):
            log = logged(12, seconds=1.0)
            for row in log[3::4]:
                row["data"]["val-core/sums/reward/mean@1"] = rise * row["step"] + seed / 10
            runs.append(finished(arm, seed, log))
    header, rows = reward_table(comparison(runs=runs))
    assert header == ("step", "sync", "seamless") and [row[0] for row in rows] == ["4", "8", "12"]
    assert rows[0][1:] == ["0.190 (0.140-0.240)", "0.230 (0.180-0.280)"]
    assert "## Reward by step" in markdown(comparison(runs=runs)) and "Reward by step" not in markdown(comparison())


def test_where_a_steps_time_goes_is_a_table() -> None:
    log = logged(8, seconds=2.0)
    for row in log:
        row["data"] |= {"timing_s/gen": 1.2, "timing_s/update_actor": 0.5, "timing_s/update_weights": 0.1}
    header, (sync,) = times_table(comparison(runs=[finished("sync", 1, log)]))
    assert dict(zip(header, sync, strict=True)) == {
        "arm": "sync",
        "step s": "2.00",
        "waits s": "1.20",
        "update s": "0.50",
        "weights s": "0.10",
        "lent s": "-",
    }


def test_short_steps_of_verls_modes_are_named() -> None:
    one = frontier()
    assert poll_line(one).startswith(
        "sync, colocate_async: verl looks for finished prompts every 2 s, and a step takes"
    )
    assert poll_line(one) in explanations(one)


def test_steps_in_which_it_weighs_little_are_not_named() -> None:
    assert poll_line(replace(frontier(), arms={})) == "", "nothing is known of them"
    steps = {"sync": 100.0, "colocate_async": 2.0}
    runs = [finished(arm, 1, logged(12, seconds=seconds)) for arm, seconds in steps.items()]
    one = replace(frontier(), runs=tuple(runs))
    assert poll_line(one).startswith("colocate_async: ")
    assert poll_line(replace(one, runs=tuple(runs[:1]))) == "" and "" not in explanations(one)


def test_a_shorter_poll_is_not_named() -> None:
    one = frontier()
    arms = {name: replace(facts, shipped_poll=False) for name, facts in one.arms.items()}
    assert poll_line(replace(one, arms=arms)) == ""
