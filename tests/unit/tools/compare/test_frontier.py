"""What staleness brings and costs, in the report's tables, sentences and plots."""

from __future__ import annotations

from dataclasses import replace

from support.comparison import comparison, finished, frontier, logged

from seamless_verl.tools.compare.page import markdown, page, plots
from seamless_verl.tools.compare.report import (
    collapse_lines,
    frontier_table,
    target_lines,
    target_table,
    unknown_lines,
)


def test_an_arm_has_what_it_permits_and_what_that_brings() -> None:
    header, rows = frontier_table(frontier())
    sync, vanilla, _, ours = (dict(zip(header, row, strict=True)) for row in rows)
    assert (sync["permitted"], vanilla["permitted"], ours["permitted"]) == ("0", "-", "4")
    assert ours["tokens/s"] == "512 (512-512)" and ours["to baseline"] == "2.00 (2.00-2.00)"
    assert (ours["versions old"], ours["updates old"]) == ("3.0, at most 3", "13.5, at most 15")  # four updates a step
    assert (sync["versions old"], sync["updates old"]) == ("0.0, at most 0", "1.5, at most 3")
    assert (sync["collapsed"], ours["collapsed"]) == ("0/2", "1/2")


def test_lengths_are_those_of_ours_alone() -> None:
    """Drawn: the samples of prompts 0 to 19; trained in one run: those of 4 to 23, four of which are shorter."""
    header, rows = frontier_table(frontier())
    sync, _, on_policy, ours = (dict(zip(header, row, strict=True)) for row in rows)
    assert (sync["trained lengths"], sync["distance"]) == ("not known", "-")
    assert (on_policy["trained lengths"], on_policy["distance"]) == ("1.000 (1.000-1.000)", "0.000 (0.000-0.000)")
    assert on_policy["p"] == "1"
    assert ours["trained lengths"] == "0.976 (0.953-1.000)" and ours["distance"] == "0.100 (0.000-0.200)"
    assert 0.001 < float(ours["p"]) < 0.1, "2 of 70 ways to exchange four prompts and four"


def test_prompts_without_a_length_are_named() -> None:
    one = frontier()
    runs = [run if run.bias is None else replace(run, bias=replace(run.bias, unknown=3)) for run in one.runs]
    lines = list(unknown_lines(replace(one, runs=tuple(runs))))
    assert lines[0].startswith("seamless s=0, seed 1: 3 prompts that were drawn had not ended") and len(lines) == 4
    assert list(unknown_lines(one)) == []
    _, rows = frontier_table(replace(one, runs=tuple(runs)))
    assert rows[2][-3] == "at most 1.000 (1.000-1.000)", "no mean has what is not known"


def test_seconds_to_the_baselines_reward_by_seed() -> None:
    header, (goal, *rows) = target_table(frontier())
    assert header == ["seconds to a reward", "seed 1", "seed 2", "reached", "median", "to baseline", "samples, median"]
    assert goal == ["reward", "0.110", "0.110", "", "", "", ""]
    assert rows[0] == ["sync", "22.0 s", "22.0 s", "2/2", "22.0 s", "-", "1,536"]
    assert rows[3] == ["seamless s=4", "6.0 s", "6.0 s", "2/2", "6.0 s", "0.27 (0.27-0.27)", "896"]
    *_, line = target_lines(frontier())
    counts = "seamless s=4 reached it in 2 of 2 runs, sync reached it in 2 of 2 runs"
    assert line == f"seamless s=4: 0.27 of the seconds of sync to the baseline's last reward ({counts})."


def test_the_seconds_without_validations_stand_beside_those_with_them() -> None:
    log = logged(12, seconds=1.0, reward=0.02)
    for row in log:
        row["data"]["timing_s/testing"] = 0.5
    one = comparison(runs=[finished("sync", 1, logged(12, seconds=2.0, reward=0.01)), finished("seamless", 1, log)])
    header, (_, sync, ours) = target_table(one)
    assert header[3:] == ["median", "to baseline", "without validations", "to baseline", "samples, median"]
    assert sync[3:] == ["22.0 s", "-", "22.0 s", "-", "1,536"]
    assert ours[3:] == ["6.0 s", "0.27", "3.0 s", "0.14", "896"]


def test_a_reward_that_is_not_reached_is_said_so() -> None:
    one = replace(frontier(), target_reward=0.15)  # seed 1 of s=4 has 0.21 at the end, seed 2 had 0.13
    _, (_, sync, *_, ours) = target_table(one)
    assert sync[1:] == ["not reached", "not reached", "0/2", "not reached", "-", "not reached"]
    assert ours[1:5] == ["8.0 s", "not reached", "1/2", "not reached"]
    *_, line = target_lines(one)
    counts = "seamless s=4 reached it in 1 of 2 runs, sync reached it in 0 of 2 runs"
    assert line == f"seamless s=4: 0.00 of the seconds of sync to 0.150 ({counts})."
    lines = list(target_lines(replace(frontier(), target_reward=0.9)))
    assert lines[-1].startswith("seamless s=4: in no pair it or sync reached 0.900 (seamless s=4 reached it in 0 of 2")


def test_an_arm_that_misses_what_the_baseline_reaches_has_an_infinite_ratio() -> None:
    runs = [finished("sync", 1, logged(12, seconds=2.0, reward=0.01)), finished("seamless", 1, logged(12, seconds=1.0))]
    one = comparison(runs=runs)
    assert target_table(one)[1][-1][2:5] == ["0/1", "not reached", "inf"]
    (line,) = target_lines(one)
    assert line.startswith("seamless: an infinite multiple of the seconds of sync to the baseline's last reward (")


def test_the_target_of_a_baseline_that_collapsed_is_said_to_be_its_highest_reward() -> None:
    log = logged(12, seconds=1.0, reward=0.02)
    for row in log[8:]:
        row["data"]["critic/score/mean"] = 0.0
    one = comparison(runs=[finished("sync", 1, log), finished("seamless", 1, logged(12, seconds=1.0, reward=0.02))])
    first, _ = target_lines(one)
    said = "the reward to reach is not the 0.034 of its end but 0.130, the highest that a baseline had."
    assert first == f"sync, seed 1, collapsed: {said}" and first in markdown(one)
    assert len(list(target_lines(replace(one, target_reward=0.1)))) == 1


def test_a_collapse_is_a_line_of_its_run() -> None:
    (line,) = collapse_lines(frontier())
    figures = "its reward was 0.130 after step 8 and is 0.034 at the end, below half of that."
    assert line == f"seamless s=4, seed 2, collapsed: {figures}"
    assert line in markdown(frontier()) and line in page(frontier())


def test_the_frontier_is_drawn_by_what_is_permitted_or_else_by_the_highest_staleness() -> None:
    one = frontier()
    *_, (title, _, drawn), (_, _, lengths) = plots(one)
    lines = {(line.name, line.yaxis): line for line in drawn.data if line.mode == "lines+markers"}
    names = ("sync", "colocate_async", "seamless")
    assert title == "The frontier" and set(lines) == {(name, axis) for name in names for axis in ("y", "y2")}
    assert list(lines["seamless", "y"].x) == [0, 4] and [round(y) for y in lines["seamless", "y"].y] == [341, 512]
    vanilla = lines["colocate_async", "y"]
    assert list(vanilla.x) == [6] and vanilla.marker.symbol == ("circle-open",)
    assert [line.line.dash for line in lengths.data] == ["dot", "solid"] * 2
    assert page(one).count('class="plotly-graph-div"') == 9


def test_a_comparison_of_which_nothing_is_known_before_has_no_frontier() -> None:
    text = markdown(comparison())
    assert "The frontier of staleness" not in text and "## Seconds to a reward" in text
    assert "permitted" not in text
