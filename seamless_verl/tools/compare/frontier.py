"""What staleness brings and costs, in tables and sentences: speed and reward by what an arm permits. Pure.

How old trained tokens are, when a reward is reached, which run collapsed, and whether short answers are trained more
often than they are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from seamless_verl.tools.compare.comparison import Comparison
from seamless_verl.tools.compare.learning import Collapse, collapse, reward_points
from seamless_verl.tools.compare.outcome import ArmSummary, Pair, Run
from seamless_verl.tools.compare.statistics import Spread
from seamless_verl.tools.compare.targets import TimeToTarget, best_rates, targets, times_to_target
from seamless_verl.tools.compare.words import ABSENT, WITHOUT, spread

Table = tuple[Sequence[str], list[list[str]]]
"""Header and rows."""
FRONTIER = (
    *("arm", "permitted", "tokens/s", "to baseline", "reward", "versions old", "updates old", "dropped", "collapsed"),
    *("trained lengths", "distance", "p"),
)
NOT_REACHED = "not reached"
UNKNOWN_LENGTHS = "not known"
EXPLANATIONS = (
    "permitted: staleness that an arm allows, in weight versions: `seamless.max_staleness` in ours, none in sync, and "
    "in verl's asynchronous modes one less than `trainer.v1.sampler.max_off_policy_threshold`, beyond which they drop "
    "groups. With another strategy than `drop`, or a threshold of null, nothing bounds theirs.",
    "versions old, updates old: mean and highest staleness of each trained sample's oldest tokens, in weight versions "
    "and in optimizer updates; a step of several updates makes its own samples older with each.",
    "dropped: here as a share of response tokens.",
    "collapsed: runs whose reward at the end, as the mean above, is below half of the highest that it was.",
    "seconds to a reward: since the end of the first step, with the validations on the way, until the reward, as the "
    "mean above, is first reached; where an arm validates, these without validations stand beside them, which favour "
    "asynchronous modes. The reward is the baseline's at its end, or if it collapsed the highest that it had, unless "
    "one was given. A run that does not reach it, or fails, is later than all others: a ratio is infinite (inf) where "
    "the arm alone did not reach it, and 0 where the baseline alone did not.",
    "trained lengths: of ours alone, the mean length of the samples that were trained over that of as many prompts in "
    "the order in which they were drawn. The distance is that of Kolmogorov and Smirnov, p that of a permutation test "
    "over prompts, the lowest of an arm's runs: a small one says that length had a part in what was trained. sync "
    "trains prompts in the order in which it draws them; what verl's asynchronous modes drew is not known. A prompt "
    "that was drawn and has no length counts as longer than all others in distance and p, and is in no mean, so that "
    "the ratio of the means is at most the given one.",
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
    bound = "at most " if any(bias.unknown for bias in found) else ""
    return [
        bound + spread(Spread.of(bias.ratio for bias in found), ".3f"),
        spread(Spread.of(bias.distance for bias in found), ".3f"),
        f"{min(tested):.2g}" if tested else ABSENT,
    ]


def target_table(comparison: Comparison) -> Table:
    """The reward to reach by seed and round, and for each arm the seconds to it, their median and its ratio.

    The same without validations stands beside them where a run validated.
    """
    goals, both = targets(comparison), comparison.validates
    more = [WITHOUT, "to baseline"] * both
    header = ["seconds to a reward", *map(pair_words, goals), "reached", "median", "to baseline", *more]
    header.append("samples, median")
    if not goals:
        return header, []
    rows = [["reward", *(f"{goal:.3f}" for goal in goals.values())]]
    rows[0] += [""] * (len(header) - len(rows[0]))
    return header, rows + [target_row(one, list(goals), both=both) for one in times_to_target(comparison)]


def target_row(one: TimeToTarget, pairs: Sequence[Pair], *, both: bool) -> list[str]:
    cells = [ABSENT if pair not in one.reached else seconds_words(one.times.get(pair)) for pair in pairs]
    samples = NOT_REACHED if one.samples is None else f"{one.samples:,.0f}"
    without = [seconds_words(one.training_s), spread(one.training_ratio, ".2f")] if both else []
    times = [seconds_words(one.seconds), spread(one.ratio, ".2f"), *without]
    return [one.arm, *cells, f"{len(one.times)}/{len(one.reached)}", *times, samples]


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
    yield from fallen_target_lines(comparison)
    times = {one.arm: one for one in times_to_target(comparison)}
    target = comparison.target_reward
    goal = "the baseline's last reward" if target is None else f"{target:.3f}"
    for one in times.values():
        if one.arm in comparison.baselines:
            continue
        baseline = comparison.baseline_of(one.arm)
        counts = f"{reached_words(one)}{f', {reached_words(times[baseline])}' if baseline in times else ''}"
        if one.ratio is None:
            yield f"{one.arm}: in no pair it or {baseline} reached {goal} ({counts})."
        else:
            yield f"{one.arm}: {ratio_words(one.ratio.median)} the seconds of {baseline} to {goal} ({counts})."
    for best in best_rates(comparison):
        ratio = "" if best.ratio is None else f", {ratio_words(best.ratio.median)} the baseline's at its own best rate"
        yield f"{best.system} is fastest to the reward with learning rate {best.rate}: {best.seconds:,.1f} s{ratio}."


def fallen_target_lines(comparison: Comparison) -> Iterator[str]:
    """A line for each baseline of which the highest reward is the one to reach, and not that of its end."""
    if comparison.target_reward is not None:
        return
    goals = targets(comparison)
    for baseline in comparison.baselines:
        for pair, fallen in collapses_of(comparison, baseline).items():
            if pair in goals:
                yield (
                    f"{baseline}, {pair_words(pair)}, collapsed: the reward to reach is not the "
                    f"{fallen.end.reward:.3f} of its end but {goals[pair]:.3f}, the highest that a baseline had."
                )


def reached_words(one: TimeToTarget) -> str:
    return f"{one.arm} reached it in {len(one.times)} of {len(one.reached)} runs"


def ratio_words(ratio: float) -> str:
    """A ratio, as the words before what it is relative to."""
    return f"{ratio:.2f} of" if math.isfinite(ratio) else "an infinite multiple of"


def unknown_lines(comparison: Comparison) -> Iterator[str]:
    """How many prompts that were drawn have no length, where there are such."""
    for run in comparison.runs:
        if run.bias is not None and run.bias.unknown:
            name, number = f"{run.arm}, {pair_words(run.pair)}", run.bias.unknown
            yield (
                f"{name}: {number} prompts that were drawn had not ended, or failed; "
                "they count as longer than all others."
            )
