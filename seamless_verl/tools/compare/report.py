"""What a report says, as tables of cells and as sentences: the page, the text and the terminal have the same. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from seamless_verl.cli.output import text_table
from seamless_verl.tools.compare.comparison import ArmSummary, Comparison, Pair, Run, RunState
from seamless_verl.tools.compare.equal_tokens import LEVELS, ArmAtTokens, EqualTokens
from seamless_verl.tools.compare.figures import TIMES, RewardTest, Spread
from seamless_verl.tools.compare.learning import TimeToTarget, best_rates, collapses_of, targets, times_to_target
from seamless_verl.tools.compare.machine import differ, machine_words

ABSENT, NOT_REACHED = "-", "not reached"
WITHOUT = "without validations"
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
    if comparison.arms and comparison.runs:
        yield Section("The frontier of staleness", frontier_table(comparison), before=list(unknown_lines(comparison)))
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
    work = comparison.forced_work
    if work is not None:
        tables += [times_table(comparison), work_table(comparison)]
    lines = [
        *verdicts(comparison),
        *machine_lines(comparison),
        poll_line(comparison),
        *difference_lines(comparison),
        *target_lines(comparison),
        *collapse_lines(comparison),
        *(text_table(*table, align="<>") for table in tables),
        *(() if work is None else work.lines),
    ]
    return "\n".join(filter(None, lines))


def spread(values: Spread | None, form: str, *, alone: bool = False) -> str:
    """The median, and the lowest and highest if there are several and not `alone`."""
    if values is None:
        return ABSENT
    text = f"{values.median:{form}}"
    return text if alone or values.values < 2 else f"{text} ({values.lowest:{form}}-{values.highest:{form}})"


def figure(name: str, form: str, *, alone: bool = False) -> Callable[[Any], str]:
    """The cell of an arm's figure."""
    return lambda one: spread(getattr(one, name), form, alone=alone)


def rows_of(arms: Iterable[Any], cells: Mapping[str, Callable[[Any], str]], first: str = "arm") -> Table:
    """A row for each arm; `cells` say by the names of columns what stands in them."""
    return [first, *cells], [[one.arm, *(cell(one) for cell in cells.values())] for one in arms]


def arm_table(comparison: Comparison) -> Table:
    """A row for each arm: medians, and lowest to highest where there are several runs."""
    without = {f"tokens/s {WITHOUT}": figure("training_tokens_per_s", ",.0f")} if comparison.validates else {}
    cells = {
        "runs": lambda one: f"{one.finished}/{one.runs}",
        "tokens/s": figure("tokens_per_s", ",.0f"),
        "to baseline": figure("ratio", ".2f"),
        **without,
        "step s": figure("step_s", ".2f"),
        "idle": figure("idle", ".0%"),
        "staleness": lambda one: mean_and_highest(one.staleness_mean, one.staleness_max),
        "in updates": figure("staleness_updates", ".0f", alone=True),
        "dropped": figure("dropped_tokens", ",.0f", alone=True),
        "reward": figure("reward", ".3f"),
        "reward to baseline": lambda one: reward_words(one.reward_test),
    }
    return rows_of(comparison.summaries, cells)


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

    def ratio(figure: str) -> Callable[[ArmSummary], str]:
        return lambda one: spread(one.ratios.get(figure), ".2f")

    cells = {name: ratio(of) for of, name in RATIO_NAMES.items() if comparison.validates or WITHOUT not in name}
    others = (one for one in comparison.summaries if one.arm != comparison.baseline_of(one.arm))
    return rows_of(others, cells, f"arm to {' or '.join(comparison.baselines) or comparison.baseline}")


def times_table(comparison: Comparison) -> Table:
    """The parts of a step as trainers log them; medians of steps, and of runs."""
    names = {"step s": "step_s", "waits s": "wait_s", "update s": "update_s", "weights s": "weights_s"}
    cells = {name: figure(of, ".2f", alone=True) for name, of in (names | {"lent s": "lent_s"}).items()}
    return rows_of(comparison.summaries, cells)


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
    curves = {
        arm: [{step.step: step.validation for step in run.steps if step.validation is not None} for run in runs]
        for arm in comparison.names
        if (runs := comparison.finished(arm).values())
    }
    at = [set(curve) for of_arm in curves.values() for curve in of_arm]
    rows = []
    for step in sorted(set.intersection(*at)) if at else ():
        rewards = [[curve[step] for curve in of_arm] for of_arm in curves.values()]
        rows.append([str(step), *(f"{mean(of):.3f} ({min(of):.3f}-{max(of):.3f})" for of in rewards)])
    return ("step", *curves), rows


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
    for arm in comparison.names:
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

    def size(level: str) -> Callable[[ArmAtTokens], str]:
        return lambda one: ABSENT if (size := one.samples[level]) is None else f"{size:.1f}"

    cells = {
        "reward": figure("reward", ".3f"),
        f"to {baseline}": lambda one: reward_words(one.reward_test),
        "seconds": figure("seconds", ",.0f"),
        WITHOUT: figure("training_s", ",.0f"),
        "trained": figure("trained", ",.0f", alone=True),
        **{f"samples: {level}": size(level) for level in LEVELS},
    }
    return rows_of(equal.arms, cells)


def frontier_table(comparison: Comparison) -> Table:
    """What staleness brings and costs: a row for each arm of which something is known before it ran."""
    known = [one for one in comparison.summaries if one.arm in comparison.arms]
    permits = {one.arm: comparison.arms[one.arm].permitted for one in known}
    lengths = {one.arm: length_cells(list(comparison.finished(one.arm).values())) for one in known}

    def collapsed(one: ArmSummary) -> str:
        return f"{len(collapses_of(comparison, one.arm))}/{one.finished}" if one.finished else ABSENT

    cells = {
        "permitted": lambda one: ABSENT if permits[one.arm] is None else str(permits[one.arm]),
        "tokens/s": figure("tokens_per_s", ",.0f"),
        "to baseline": figure("ratio", ".2f"),
        "reward": figure("reward", ".3f"),
        "versions old": lambda one: mean_and_highest(one.staleness_mean, one.staleness_max),
        "updates old": lambda one: mean_and_highest(one.staleness_updates_mean, one.staleness_updates),
        "dropped": figure("dropped_share", ".1%"),
        "collapsed": collapsed,
        "trained lengths": lambda one: lengths[one.arm][0],
        "distance": lambda one: lengths[one.arm][1],
        "p": lambda one: lengths[one.arm][2],
    }
    return rows_of(known, cells)


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
    times = ["reached", "median", "to baseline", *[WITHOUT, "to baseline"] * both, "samples, median"]
    header = ["seconds to a reward", *map(pair_words, goals), *times]
    rows = [["reward", *(f"{goal:.3f}" for goal in goals.values()), *[""] * len(times)]] if goals else []
    for one in times_to_target(comparison):
        seconds = [ABSENT if pair not in one.reached else seconds_words(one.times.get(pair)) for pair in goals]
        without = [seconds_words(one.training_s), spread(one.training_ratio, ".2f")] if both else []
        middle = [f"{len(one.times)}/{len(one.reached)}", seconds_words(one.seconds), spread(one.ratio, ".2f")]
        samples = NOT_REACHED if one.samples is None else f"{one.samples:,.0f}"
        rows.append([one.arm, *seconds, *middle, *without, samples])
    return header, rows


def seconds_words(seconds: float | None) -> str:
    return NOT_REACHED if seconds is None else f"{seconds:,.1f} s"


def pair_words(pair: Pair) -> str:
    return f"seed {pair[0]}" if pair[1] == 1 else f"seed {pair[0]}, round {pair[1]}"


def collapse_lines(comparison: Comparison) -> Iterator[str]:
    """A line for each run whose reward fell."""
    for arm in comparison.names:
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
