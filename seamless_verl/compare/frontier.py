"""What staleness brings and costs, in tables and sentences: speed and reward by what an arm permits. Pure.

How old trained tokens are, when a reward is reached, which run collapsed, and whether short answers are trained more
often than they are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from seamless_verl.compare.comparison import Comparison
from seamless_verl.compare.learning import Collapse, collapse, reward_points
from seamless_verl.compare.outcome import ArmSummary, Pair, Run
from seamless_verl.compare.statistics import Spread
from seamless_verl.compare.targets import TimeToTarget, best_rates, targets, times_to_target
from seamless_verl.compare.words import ABSENT, spread

Table = tuple[Sequence[str], list[list[str]]]
"""Header and rows."""
FRONTIER = (
    *("arm", "permitted", "tokens/s", "to baseline", "reward", "versions old", "updates old", "dropped", "collapsed"),
    *("trained lengths", "distance", "p"),
)
NOT_REACHED = "not reached"
UNKNOWN_LENGTHS = "not known"
EXPLANATIONS = (
    "permitted: staleness that an arm allows, in weight versions (`seamless.max_staleness`); sync has none, and verl's "
    "asynchronous modes have no such bound.",
    "versions old, updates old: mean and highest staleness of each trained sample's oldest tokens, in weight versions "
    "and in optimizer updates; a step of several updates makes its own samples older with each.",
    "dropped: here as a share of response tokens.",
    "collapsed: runs whose reward at the end, as the mean above, is below half of the highest that it was.",
    "seconds to a reward: of steps since the end of the first one, validations and checkpoints left out, until the "
    "reward, as the mean above, is first reached.",
    "trained lengths: of ours alone, the mean length of the samples that were trained over that of as many prompts in "
    "the order in which they were drawn. The distance is that of Kolmogorov and Smirnov, p that of a permutation test "
    "over prompts, the lowest of an arm's runs: a small one says that length had a part in what was trained. sync "
    "trains prompts in the order in which it draws them; what verl's asynchronous modes drew is not known.",
)


def frontier_table(comparison: Comparison) -> Table:
    """A row for each arm of which something is known before it ran."""
    rows = [frontier_row(comparison, summary) for summary in comparison.summaries if summary.arm in comparison.arms]
    return FRONTIER, rows


def frontier_row(comparison: Comparison, summary: ArmSummary) -> list[str]:
    permitted = comparison.arms[summary.arm].permitted
    fallen = len(collapses_of(comparison, summary.arm))
    return [
        summary.arm,
        ABSENT if permitted is None else str(permitted),
        spread(summary.tokens_per_s, ",.0f"),
        spread(summary.ratio, ".2f"),
        spread(summary.reward, ".3f"),
        mean_and_highest(summary.staleness_mean, summary.staleness_max),
        mean_and_highest(summary.staleness_updates_mean, summary.staleness_updates),
        spread(summary.dropped_share, ".1%"),
        f"{fallen}/{summary.finished}" if summary.finished else ABSENT,
        *length_cells(list(comparison.finished(summary.arm).values())),
    ]


def mean_and_highest(mean: Spread | None, highest: Spread | None) -> str:
    if mean is None or highest is None:
        return ABSENT
    return f"{mean.median:.1f}, at most {highest.highest:.0f}"


def length_cells(runs: Sequence[Run]) -> list[str]:
    """Mean length trained over drawn, distance and the lowest p of an arm's runs."""
    found = [run.bias for run in runs if run.bias is not None]
    if not found:
        return [UNKNOWN_LENGTHS if runs else ABSENT, ABSENT, ABSENT]
    tested = [bias.p for bias in found if bias.p is not None]
    return [
        spread(Spread.of(bias.ratio for bias in found), ".3f"),
        spread(Spread.of(bias.distance for bias in found), ".3f"),
        f"{min(tested):.2g}" if tested else ABSENT,
    ]


def target_table(comparison: Comparison) -> Table:
    """The reward to reach by seed and round, and for each arm the seconds to it, their median and its ratio."""
    goals = targets(comparison)
    header = ["seconds to a reward", *map(pair_words, goals), "median", "to baseline", "samples, median"]
    if not goals:
        return header, []
    rows = [["reward", *(f"{goal:.3f}" for goal in goals.values()), "", "", ""]]
    return header, rows + [target_row(one, list(goals)) for one in times_to_target(comparison)]


def target_row(one: TimeToTarget, pairs: Sequence[Pair]) -> list[str]:
    cells = [ABSENT if pair not in one.reached else seconds_words(one.times.get(pair)) for pair in pairs]
    samples = NOT_REACHED if one.samples is None else f"{one.samples:,.0f}"
    return [one.arm, *cells, seconds_words(one.seconds), spread(one.ratio, ".2f"), samples]


def seconds_words(seconds: float | None) -> str:
    return NOT_REACHED if seconds is None else f"{seconds:,.1f} s"


def pair_words(pair: Pair) -> str:
    return f"seed {pair[0]}" if pair[1] == 1 else f"seed {pair[0]}, round {pair[1]}"


def collapses_of(comparison: Comparison, arm: str) -> dict[Pair, Collapse]:
    """The runs of an arm that collapsed."""
    runs = comparison.finished(arm).items()
    return {pair: fallen for pair, run in runs if (fallen := collapse(reward_points(run.steps))) is not None}


def collapse_lines(comparison: Comparison) -> Iterator[str]:
    """A line for each run whose reward fell."""
    for arm in dict.fromkeys(run.arm for run in comparison.runs):
        for pair, fallen in collapses_of(comparison, arm).items():
            best, end = fallen.best, fallen.end
            yield (
                f"{arm}, {pair_words(pair)}, collapsed: its reward was {best.reward:.3f} after step {best.step} and is "
                f"{end.reward:.3f} at the end, below half of that."
            )


def target_lines(comparison: Comparison) -> Iterator[str]:
    """What each arm but the baselines takes to the reward, and each system at the learning rate that suits it best."""
    for one in times_to_target(comparison):
        if one.arm in comparison.baselines:
            continue
        missed = f"; {one.missed} of its {len(one.reached)} runs did not reach it" if one.missed else ""
        baseline, target = comparison.baseline_of(one.arm), comparison.target_reward
        goal = "the baseline's last reward" if target is None else f"{target:.3f}"
        if one.ratio is None:
            yield f"{one.arm}: in no pair it and {baseline} both reached {goal}{missed}."
        else:
            yield f"{one.arm}: {one.ratio.median:.2f} of the seconds of {baseline} to {goal}{missed}."
    for best in best_rates(comparison):
        ratio = "" if best.ratio is None else f", {best.ratio.median:.2f} of the baseline's at its own best rate"
        yield f"{best.system} is fastest to the reward with learning rate {best.rate}: {best.seconds:,.1f} s{ratio}."


def unknown_lines(comparison: Comparison) -> Iterator[str]:
    """How many prompts that were drawn have no length, where there are such."""
    for run in comparison.runs:
        if run.bias is not None and run.bias.unknown:
            name, number = f"{run.arm}, {pair_words(run.pair)}", run.bias.unknown
            yield f"{name}: {number} prompts that were drawn had not ended, or failed; their lengths are left out."
