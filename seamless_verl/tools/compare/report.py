"""What a report says, as tables of cells and as sentences: the page, the text and the terminal have the same. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from seamless_verl.cli.output import text_table
from seamless_verl.tools.compare.comparison import Comparison
from seamless_verl.tools.compare.equal_tokens import LEVELS, EqualTokens
from seamless_verl.tools.compare.figures import TIMES
from seamless_verl.tools.compare.learning import (
    TimeToTarget,
    best_rates,
    collapses_of,
    targets,
    times_to_target,
)
from seamless_verl.tools.compare.machine import differ, machine_words
from seamless_verl.tools.compare.outcome import Pair, Run, RunState
from seamless_verl.tools.compare.statistics import RewardTest, Spread

ABSENT, NOT_REACHED = "-", "not reached"
WITHOUT = "without validations"
FIGURES = (
    ("tokens/s", "tokens_per_s", ",.0f"),
    ("to baseline", "ratio", ".2f"),
    (f"tokens/s {WITHOUT}", "training_tokens_per_s", ",.0f"),
    ("step s", "step_s", ".2f"),
    ("idle", "idle", ".0%"),
)
"""Columns of the arms' table: name, figure of an arm's summary, and form."""
RATIO_NAMES = {
    "tokens_per_s": "tokens/s",
    "training_tokens_per_s": f"tokens/s {WITHOUT}",
    "step_s": "step s",
    "seconds": "time of the same samples",
    "idle": "idle",
    "staleness_mean": "staleness",
    "staleness_updates": "in updates",
    "reward": "reward",
}
FRONTIER = (
    *("arm", "permitted", "tokens/s", "to baseline", "reward", "versions old", "updates old", "dropped", "collapsed"),
    *("trained lengths", "distance", "p"),
)
LOG_LINES = 15  # of a failed run that the report shows
SHOWN = 3  # differences of an arm on the terminal
FEW_STEPS, FEW_PAIRS = 10, 3  # with fewer of either, a caution stands beside the ratios
VERLS_POLL_S = 2.0
SHORT_STEP_S = 40.0
"""Steps below this are lengthened by more than a fortieth on the mean: by half a poll of verl's modes as shipped."""
Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Header and rows."""


@dataclass(frozen=True)
class Section:
    """A part of the report: its table, sentences before and after it, and a paragraph.

    `whole`: the table's cells are in one line, as of settings.
    """

    title: str
    table: Table
    before: Sequence[str] = ()
    note: str = ""
    after: Sequence[str] = ()
    whole: bool = False


def sections(comparison: Comparison) -> Iterator[Section]:
    """All tables, in the order of the report."""
    yield Section("Arms", arm_table(comparison))
    pairs = [summary.ratio.values for summary in comparison.summaries if summary.ratio is not None]
    few = caution(comparison.steps - comparison.skip, min(pairs)) if pairs else ""
    yield Section("Ratios, pair by pair", ratio_table(comparison), note=few, after=list(machine_lines(comparison)))
    if any(getattr(summary, name) for summary in comparison.summaries for name in TIMES):
        yield Section("Where a step's time goes", times_table(comparison))
    if comparison.forced_work is not None:
        yield Section("The same work in every arm", work_table(comparison), after=comparison.forced_work.lines)
    if comparison.differences:
        yield Section("Where settings differ", difference_table(comparison), whole=True)
    if (equal := comparison.equal_tokens) is not None:
        title = f"At {equal.tokens:,.0f} generated tokens"
        yield Section(title, equal_table(equal, comparison.baseline), note=EQUAL_TOKENS)
    if len((curve := reward_table(comparison))[1]) > 1:
        yield Section("Reward by step", curve)
    if comparison.arms and comparison.summaries:
        unknown = list(unknown_lines(comparison))
        yield Section("The frontier of staleness", frontier_table(comparison), before=unknown)
    if targets(comparison):
        yield Section("Seconds to a reward", target_table(comparison), before=list(target_lines(comparison)))


EQUAL_TOKENS = (
    "Tokens are all that the engines generated to train on, dropped samples included and validations not; the number "
    "is that of the run that generated the fewest. The reward lies on the line between the two validations around it. "
    "seconds: since the end of the first step, with validations and without them; meanwhile every arm goes on to "
    "generate, and arms may validate more or less often. trained: response tokens by then. samples: of a "
    "prompt, the mean over steps, by the share of them that were right: none, up to 1/4 (hard), up to 3/4 (middle), "
    "more (easy)."
)


def terminal_table(comparison: Comparison) -> str:
    """The arms as a text table, for the terminal, and below it where their settings differ."""
    rows = text_table(*arm_table(comparison), align="<>")
    return "\n".join([rows, *difference_lines(comparison)])


def ending(comparison: Comparison) -> str:
    """What the terminal has at the end, beside the table."""
    tables = [curve] if len((curve := reward_table(comparison))[1]) > 1 else []
    if (equal := comparison.equal_tokens) is not None:
        tables.append(equal_table(equal, comparison.baseline))
    if comparison.forced_work is not None:
        tables += [times_table(comparison), work_table(comparison)]
    lines = [
        *verdicts(comparison),
        *machine_lines(comparison),
        *filter(None, [poll_line(comparison)]),
        *difference_lines(comparison),
        *target_lines(comparison),
        *collapse_lines(comparison),
        *(text_table(*table, align="<>") for table in tables),
        *(() if comparison.forced_work is None else comparison.forced_work.lines),
    ]
    return "\n".join(lines)


def spread(values: Spread | None, form: str, *, alone: bool = False) -> str:
    """The median, and the lowest and highest if there are several and not `alone`."""
    if values is None:
        return ABSENT
    text = f"{values.median:{form}}"
    return text if alone or values.values < 2 else f"{text} ({values.lowest:{form}}-{values.highest:{form}})"


def arm_table(comparison: Comparison) -> Table:
    """A row for each arm: medians, and lowest to highest where there are several runs."""
    shown = [column for column in FIGURES if comparison.validates or WITHOUT not in column[0]]
    others = ("staleness", "in updates", "dropped", "reward", "reward to baseline")
    header = ["arm", "runs", *(name for name, _, _ in shown), *others]
    return header, [
        [
            one.arm,
            f"{one.finished}/{one.runs}",
            *(spread(getattr(one, figure), form) for _, figure, form in shown),
            mean_and_highest(one.staleness_mean, one.staleness_max),
            spread(one.staleness_updates, ".0f", alone=True),
            spread(one.dropped_tokens, ",.0f", alone=True),
            spread(one.reward, ".3f"),
            reward_words(one.reward_test),
        ]
        for one in comparison.summaries
    ]


def mean_and_highest(mean_of: Spread | None, highest: Spread | None) -> str:
    if highest is None:
        return ABSENT
    return f"{spread(mean_of, '.1f', alone=True)}, at most {highest.highest:.0f}"


def reward_words(test: RewardTest | None) -> str:
    if test is None:
        return ABSENT
    return f"{test.difference:+.3f} +- {test.half_width:.3f}: {'within noise' if test.equal else 'differs'}"


def ratio_table(comparison: Comparison) -> Table:
    """For each arm but the baseline, every figure over the baseline's of the same seed and round."""
    names = {of: name for of, name in RATIO_NAMES.items() if comparison.validates or WITHOUT not in name}
    rows = [
        [summary.arm, *(spread(summary.ratios.get(figure), ".2f") for figure in names)]
        for summary in comparison.summaries
        if summary.arm != comparison.baseline_of(summary.arm)
    ]
    return [f"arm to {' or '.join(comparison.baselines) or comparison.baseline}", *names.values()], rows


def times_table(comparison: Comparison) -> Table:
    """The parts of a step as trainers log them; medians of steps, and of runs."""
    names = ("step_s", *TIMES)
    rows = [
        [one.arm, *(spread(getattr(one, name), ".2f", alone=True) for name in names)] for one in comparison.summaries
    ]
    return ("arm", "step s", "waits s", "update s", "weights s", "lent s"), rows


def work_table(comparison: Comparison) -> Table:
    """Of a workload: generated tokens that were trained in a second, and how near that is to the bound."""
    work = comparison.forced_work
    assert work is not None
    limit = None if work.bound is None else work.bound.tokens_per_s
    shares = {arm: ABSENT if limit is None else f"{rate.median / limit:.0%}" for arm, rate in work.rates.items()}
    rows = [[arm, spread(rate, ",.0f"), f"{work.budget[arm]:.3f}", shares[arm]] for arm, rate in work.rates.items()]
    return ("arm", "generated tokens/s", "budget", "of the bound"), rows


def reward_table(comparison: Comparison) -> Table:
    """The mean over runs of the validations by step, and their range, at the steps at which all runs validated."""
    by_arm: dict[str, list[dict[int, float]]] = {}
    for run in comparison.runs:
        if run.figures is not None:
            values = {step.step: step.validation for step in run.steps if step.validation is not None}
            by_arm.setdefault(run.arm, []).append(values)
    curves = [set(curve) for runs in by_arm.values() for curve in runs]
    steps = sorted(set.intersection(*curves)) if curves else []
    rows = []
    for step in steps:
        rewards = [[curve[step] for curve in runs] for runs in by_arm.values()]
        rows.append([str(step), *(f"{mean(of):.3f} ({min(of):.3f}-{max(of):.3f})" for of in rewards)])
    return ("step", *by_arm), rows


def difference_lines(comparison: Comparison) -> Iterator[str]:
    """A line for each arm but the baseline: how many settings differ, and the first of them."""
    for arm, found in comparison.differences.items():
        more = f" and {len(found) - SHOWN} more, which the report lists" if len(found) > SHOWN else ""
        settings = f"{', '.join(map(str, found[:SHOWN]))}{more}" if found else "none"
        yield f"Settings of {arm} that differ from those of {comparison.baseline} (in brackets): {settings}."


def difference_table(comparison: Comparison) -> Table:
    """Every setting in which an arm differs from the baseline."""
    rows = [
        row
        for arm, found in comparison.differences.items()
        for row in ([[arm, one.key, one.value, one.first] for one in found] or [[arm, "none", ABSENT, ABSENT]])
    ]
    return ("arm", "setting", "its value", f"that of {comparison.baseline}"), rows


def verdicts(comparison: Comparison) -> Iterator[str]:
    """A sentence for each arm but the baseline: how fast it is, and whether it learned alike."""
    steps = {summary.arm: summary.steps for summary in comparison.summaries}
    for summary in comparison.summaries:
        baseline = comparison.baseline_of(summary.arm)
        if summary.arm == baseline:
            continue
        if (ratio := summary.ratio) is None:
            yield f"{summary.arm}: no pair of runs to compare."
            continue
        pairs = "one pair" if ratio.values == 1 else f"{ratio.values} pairs, {ratio.lowest:.2f} to {ratio.highest:.2f}"
        learned = "the reward was not tested: that needs two runs of each arm"
        if summary.steps != steps[baseline]:
            learned = f"the reward after {summary.steps} steps and after {steps[baseline]} is not compared"
        if (test := summary.reward_test) is not None:
            alike = "within noise" if test.equal else "more than noise"
            learned = f"the reward differs by {test.difference:+.3f} +- {test.half_width:.3f}, {alike}"
        verdict = f"{summary.arm}: {ratio.median:.2f} times the tokens/s of {baseline} ({pairs}); {learned}."
        yield " ".join(filter(None, [verdict, caution(comparison.steps - comparison.skip, ratio.values)]))


def caution(steps: int, pairs: int) -> str:
    """What to say where ratios rest on few measured steps of a run, or on few pairs of runs; "" otherwise."""
    few = [f"{steps} measured step{'s' * (steps != 1)} a run, fewer than {FEW_STEPS}"] * (steps < FEW_STEPS)
    few += [f"{pairs} pair{'s' * (pairs != 1)} of runs, fewer than {FEW_PAIRS}"] * (pairs < FEW_PAIRS)
    return f"With care: this rests on {', and on '.join(few)}." if few else ""


def machine_lines(comparison: Comparison) -> Iterator[str]:
    """A line for each pair of runs that were made on two machines, as far as that is known."""
    for arm in dict.fromkeys(run.arm for run in comparison.runs):
        baseline = comparison.baseline_of(arm)
        others = comparison.finished(baseline)
        for pair, run in comparison.finished(arm).items():
            if pair in others and differ(run.machine, others[pair].machine):
                own, other = machine_words(run.machine), machine_words(others[pair].machine)
                yield (
                    f"With care: {arm}, {pair_words(pair)}, was made on another machine ({own}) than that run of "
                    f"{baseline} ({other}), so that their ratio is one of machines, too. Another --out makes both anew."
                )


def poll_line(comparison: Comparison) -> str:
    """That verl's modes poll as they are shipped, for those whose steps are short; "" if there is none.

    A step of `sync` ends up to a poll later than its last sample. Where a step takes seconds that may be the larger
    part of what an arm of ours gains.
    """
    shipped = {arm for arm, facts in comparison.arms.items() if facts.shipped_poll}
    steps = {one.arm: one.step_s.median for one in comparison.summaries if one.step_s and one.arm in shipped}
    short = {arm: seconds for arm, seconds in steps.items() if seconds < SHORT_STEP_S}
    if not short:
        return ""
    return (
        f"{', '.join(short)}: verl looks for finished prompts every {VERLS_POLL_S:g} s, and a step takes "
        f"{min(short.values()):.1f} s here; with --short-poll it looks every 0.1 s."
    )


def warnings_of(comparison: Comparison) -> list[str]:
    missing = sum(run.state is RunState.NOT_MADE for run in comparison.runs)
    interrupted = f"**Interrupted**: {missing} of {len(comparison.runs)} runs were not made."
    known = [f"**Warning**: {text}" for text in comparison.warnings]
    return [*known, *([interrupted] if comparison.interrupted else []), *collapse_lines(comparison)]


def equal_table(equal: EqualTokens, baseline: str) -> Table:
    """Each arm after as many generated tokens."""
    first = ("arm", "reward", f"to {baseline}", "seconds", WITHOUT, "trained")
    rows = [
        [
            arm.arm,
            spread(arm.reward, ".3f"),
            reward_words(arm.reward_test),
            spread(arm.seconds, ",.0f"),
            spread(arm.training_s, ",.0f"),
            spread(arm.trained, ",.0f", alone=True),
            *(ABSENT if (size := arm.samples[level]) is None else f"{size:.1f}" for level in LEVELS),
        ]
        for arm in equal.arms
    ]
    return (*first, *(f"samples: {level}" for level in LEVELS)), rows


def frontier_table(comparison: Comparison) -> Table:
    """What staleness brings and costs: a row for each arm of which something is known before it ran."""
    rows = []
    for one in comparison.summaries:
        if one.arm in comparison.arms:
            permitted, fallen = comparison.arms[one.arm].permitted, len(collapses_of(comparison, one.arm))
            rows.append(
                [
                    one.arm,
                    ABSENT if permitted is None else str(permitted),
                    spread(one.tokens_per_s, ",.0f"),
                    spread(one.ratio, ".2f"),
                    spread(one.reward, ".3f"),
                    mean_and_highest(one.staleness_mean, one.staleness_max),
                    mean_and_highest(one.staleness_updates_mean, one.staleness_updates),
                    spread(one.dropped_share, ".1%"),
                    f"{fallen}/{one.finished}" if one.finished else ABSENT,
                    *length_cells(list(comparison.finished(one.arm).values())),
                ]
            )
    return FRONTIER, rows


def length_cells(runs: Sequence[Run]) -> list[str]:
    """Mean length trained over drawn, distance and the lowest p of an arm's runs."""
    found = [run.bias for run in runs if run.bias is not None]
    if not found:
        return ["not known" if runs else ABSENT, ABSENT, ABSENT]
    tested = [bias.p for bias in found if bias.p is not None]
    bound = "at most " if any(bias.unknown for bias in found) else ""
    return [
        bound + spread(Spread.of(bias.ratio for bias in found), ".3f"),
        spread(Spread.of(bias.distance for bias in found), ".3f"),
        f"{min(tested):.2g}" if tested else ABSENT,
    ]


def unknown_lines(comparison: Comparison) -> Iterator[str]:
    """How many prompts that were drawn have no length, where there are such."""
    for run in comparison.runs:
        if run.bias is not None and run.bias.unknown:
            name = f"{run.arm}, {pair_words(run.pair)}"
            yield (
                f"{name}: {run.bias.unknown} prompts that were drawn had not ended, or failed; "
                "they count as longer than all others."
            )


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
    rewards = ["reward", *(f"{goal:.3f}" for goal in goals.values())]
    rewards += [""] * (len(header) - len(rewards))
    return header, [rewards, *(target_row(one, list(goals), both=both) for one in times_to_target(comparison))]


def target_row(one: TimeToTarget, pairs: Sequence[Pair], *, both: bool) -> list[str]:
    seconds = [ABSENT if pair not in one.reached else seconds_words(one.times.get(pair)) for pair in pairs]
    samples = NOT_REACHED if one.samples is None else f"{one.samples:,.0f}"
    without = [seconds_words(one.training_s), spread(one.training_ratio, ".2f")] if both else []
    times = [seconds_words(one.seconds), spread(one.ratio, ".2f"), *without]
    return [one.arm, *seconds, f"{len(one.times)}/{len(one.reached)}", *times, samples]


def seconds_words(seconds: float | None) -> str:
    return NOT_REACHED if seconds is None else f"{seconds:,.1f} s"


def pair_words(pair: Pair) -> str:
    return f"seed {pair[0]}" if pair[1] == 1 else f"seed {pair[0]}, round {pair[1]}"


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
    goals = targets(comparison)
    for baseline in comparison.baselines if comparison.target_reward is None else ():
        for pair, fallen in collapses_of(comparison, baseline).items():
            if pair in goals:
                yield (
                    f"{baseline}, {pair_words(pair)}, collapsed: the reward to reach is not the "
                    f"{fallen.end.reward:.3f} of its end but {goals[pair]:.3f}, the highest that a baseline had."
                )
    times = {one.arm: one for one in times_to_target(comparison)}
    target = comparison.target_reward
    goal = "the baseline's last reward" if target is None else f"{target:.3f}"
    others = [one for one in times.values() if one.arm not in comparison.baselines]
    yield from (time_line(comparison, one, times, goal) for one in others)
    for best in best_rates(comparison):
        ratio = "" if best.ratio is None else f", {ratio_words(best.ratio.median)} the baseline's at its own best rate"
        yield f"{best.system} is fastest to the reward with learning rate {best.rate}: {best.seconds:,.1f} s{ratio}."


def time_line(comparison: Comparison, one: TimeToTarget, times: Mapping[str, TimeToTarget], goal: str) -> str:
    baseline = comparison.baseline_of(one.arm)
    both = [one, *([times[baseline]] if baseline in times else [])]
    counts = ", ".join(f"{each.arm} reached it in {len(each.times)} of {len(each.reached)} runs" for each in both)
    if one.ratio is None:
        return f"{one.arm}: in no pair it or {baseline} reached {goal} ({counts})."
    return f"{one.arm}: {ratio_words(one.ratio.median)} the seconds of {baseline} to {goal} ({counts})."


def ratio_words(ratio: float) -> str:
    """A ratio, as the words before what it is relative to."""
    return f"{ratio:.2f} of" if math.isfinite(ratio) else "an infinite multiple of"


def last_lines(reason: str) -> str:
    """What a run ended with: the first line of a reason, and the last ones of its log."""
    first, *rest = reason.strip().splitlines() or [""]
    return "\n".join([first, *rest[-LOG_LINES:]])


def run_line(run: Run) -> str:
    """The line of a run on the terminal, when it has ended."""
    name = f"{run.arm}, seed {run.seed}, round {run.round}"
    if run.figures is None:
        return f"{name}: {run.state}: {run.reason.splitlines()[0] if run.reason else ''}"
    idle = "" if run.figures.idle is None else f", idle {run.figures.idle:.0%}"
    return f"{name}: {run.figures.tokens_per_s:,.0f} tokens/s, {run.figures.step_s:.2f} s a step{idle}"
