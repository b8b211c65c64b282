"""The report in Markdown, the table of the terminal, and the words that both have in common with the page. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from seamless_verl.runtime.step_metrics import COUNTED
from seamless_verl.runtime.tables import text_table
from seamless_verl.tools.compare.comparison import Comparison
from seamless_verl.tools.compare.differences import Difference
from seamless_verl.tools.compare.equal_tokens import LEVELS, EqualTokens
from seamless_verl.tools.compare.frontier import EXPLANATIONS as FRONTIER_EXPLANATIONS
from seamless_verl.tools.compare.frontier import (
    Table,
    collapse_lines,
    frontier_table,
    pair_words,
    target_lines,
    target_table,
    unknown_lines,
)
from seamless_verl.tools.compare.machine import differ, machine_words
from seamless_verl.tools.compare.outcome import ArmSummary, RewardTest, Run, RunState
from seamless_verl.tools.compare.polls import poll_line
from seamless_verl.tools.compare.targets import targets
from seamless_verl.tools.compare.words import ABSENT, WITHOUT, spread

HEADER = (
    *("arm", "runs", "tokens/s", "to baseline", "step s", "idle", "staleness", "in updates", "dropped", "reward"),
    "reward to baseline",
)
WITHOUT_AT = HEADER.index("to baseline") + 1  # the place of tokens/s without validations, where the two differ
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


def table(comparison: Comparison) -> str:
    """The arms as a text table, for the terminal, and below it where their settings differ."""
    rows = text_table(*arm_table(comparison), align="<>")
    return "\n".join([rows, *difference_lines(comparison)])


def difference_lines(comparison: Comparison) -> Iterator[str]:
    """A line for each arm but the baseline: how many settings differ, and the first of them."""
    for arm, found in comparison.differences.items():
        more = f" and {len(found) - SHOWN} more, which the report lists" if len(found) > SHOWN else ""
        settings = f"{', '.join(map(str, found[:SHOWN]))}{more}" if found else "none"
        yield f"Settings of {arm} that differ from those of {comparison.baseline} (in brackets): {settings}."


def difference_table(comparison: Comparison) -> tuple[Sequence[str], list[list[str]]]:
    """Header and rows: every setting in which an arm differs from the baseline."""
    rows = [
        [arm, one.key, one.value, one.first]
        for arm, found in comparison.differences.items()
        for one in found or (Difference("none", ABSENT, ABSENT),)
    ]
    return ("arm", "setting", "its value", f"that of {comparison.baseline}"), rows


def arm_table(comparison: Comparison) -> Table:
    """A row for each arm; tokens/s without validations are beside those with them where the two differ."""
    header, rows = list(HEADER), [cells(summary) for summary in comparison.summaries]
    if comparison.validates:
        header.insert(WITHOUT_AT, f"tokens/s {WITHOUT}")
        for row, summary in zip(rows, comparison.summaries, strict=True):
            row.insert(WITHOUT_AT, spread(summary.training_tokens_per_s, ",.0f"))
    return header, rows


def cells(summary: ArmSummary) -> list[str]:
    """The row of an arm, in the order of HEADER: medians, and lowest to highest where there are several runs."""
    return [
        summary.arm,
        f"{summary.finished}/{summary.runs}",
        spread(summary.tokens_per_s, ",.0f"),
        spread(summary.ratio, ".2f"),
        spread(summary.step_s, ".2f"),
        spread(summary.idle, ".0%"),
        staleness(summary),
        spread(summary.staleness_updates, ".0f", alone=True),
        spread(summary.dropped_tokens, ",.0f", alone=True),
        spread(summary.reward, ".3f"),
        reward_words(summary.reward_test),
    ]


def staleness(summary: ArmSummary) -> str:
    """Mean and highest staleness, in weight versions."""
    if summary.staleness_max is None:
        return ABSENT
    mean = ABSENT if summary.staleness_mean is None else f"{summary.staleness_mean.median:.1f}"
    return f"{mean}, at most {summary.staleness_max.highest:.0f}"


def reward_words(test: RewardTest | None) -> str:
    if test is None:
        return ABSENT
    return f"{test.difference:+.3f} +- {test.half_width:.3f}: {'within noise' if test.equal else 'differs'}"


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


def ratio_caution(comparison: Comparison) -> str:
    """The caution for all ratios: that of the arm with the fewest pairs."""
    pairs = [summary.ratio.values for summary in comparison.summaries if summary.ratio is not None]
    return caution(comparison.steps - comparison.skip, min(pairs)) if pairs else ""


EXPLANATIONS = (
    "Medians over an arm's runs, in brackets the lowest and the highest. A ratio is of two runs of the same seed and "
    "round; the table has the median of these.",
    f"tokens/s: {COUNTED}, by the time between the ends of steps. Validations, and checkpoints where an arm saves, are "
    "part of that time, and of all others here: meanwhile asynchronous modes, ours among them, go on to generate what "
    "later steps train, and sync has nothing in flight. Without that time they have generation that nobody times. "
    f"Where an arm validates, tokens/s {WITHOUT} stand beside these; they favour asynchronous modes. The first steps "
    "of each run are not measured.",
    "step s: the median of a run's steps, each with its validation, if it has one; where few have, it says nothing of "
    "their time, which is in all other figures.",
    "idle: the share of time for which a device was seen to do nothing, from outside, alike for every arm: by NVML on "
    "GPUs; on the CPU platform by the scheduler's account of the processes that are pinned to the device's core, where "
    "one that polls counts as busy. The time of validations is part of it.",
    "staleness: of the oldest tokens of each trained sample, in weight versions behind the trainer, mean and highest; "
    "in updates: optimizer steps between the oldest weights that generated and the last update of the training step.",
    "dropped: response tokens generated and not trained: masked ones, and those of groups that were dropped whole, as "
    "too old, filtered, failed or left over. Such a group counts with the arm's samples of a prompt and the mean "
    "length of its step.",
    "The reward differs where zero is outside of the 95% confidence interval of the difference (Welch's t test). With "
    "few runs the interval is wide: within noise says that no difference was seen, not that there is none.",
)


def markdown(comparison: Comparison) -> str:
    """The whole report."""
    parts = [f"# {comparison.title}", *warnings_of(comparison), bullets(verdicts(comparison))]
    parts += [
        markdown_table(*arm_table(comparison)),
        "## Ratios, pair by pair",
        markdown_table(*ratio_table(comparison)),
    ]
    parts += [ratio_caution(comparison), bullets(machine_lines(comparison))]
    if comparison.differences:
        parts += ["## Where settings differ", markdown_table(*difference_table(comparison))]
    if (equal := comparison.equal_tokens) is not None:
        parts += [equal_heading(equal, "## "), markdown_table(*equal_table(equal, comparison.baseline)), EQUAL_TOKENS]
    for title, lines, (header, entries) in learning_sections(comparison):
        parts += [f"## {title}", bullets(lines), markdown_table(header, entries)]
    parts += [failures(comparison), "## What the columns say", bullets(explanations(comparison))]
    parts += ["## Conditions", bullets(comparison.conditions)]
    parts += ["## To run it again", f"```bash\n{comparison.command}\n```", FILES]
    return "\n\n".join(part for part in parts if part) + "\n"


FILES = (
    "`manifest.json` has the command line and environment of every run, versions, git state and machine; "
    "`runs.parquet` and `steps.parquet` have the figures of every run and every metric of every step, "
    "`lengths.parquet` the samples of ours."
)


def warnings_of(comparison: Comparison) -> list[str]:
    missing = sum(run.state is RunState.NOT_MADE for run in comparison.runs)
    interrupted = f"**Interrupted**: {missing} of {len(comparison.runs)} runs were not made."
    known = [f"**Warning**: {text}" for text in comparison.warnings]
    return [*known, *([interrupted] if comparison.interrupted else []), *collapse_lines(comparison)]


def learning_sections(comparison: Comparison) -> Iterator[tuple[str, list[str], Table]]:
    """(title, sentences, table): what staleness brings and costs, and the seconds to a reward."""
    if comparison.arms and comparison.summaries:
        yield "The frontier of staleness", list(unknown_lines(comparison)), frontier_table(comparison)
    if targets(comparison):
        yield "Seconds to a reward", list(target_lines(comparison)), target_table(comparison)


def explanations(comparison: Comparison) -> list[str]:
    """What the columns say."""
    names = ", ".join(f"`{name}`" for name in comparison.baselines) or f"`{comparison.baseline}`"
    baseline = f"The baseline is {names}{', each for the arms of its learning rate' if ',' in names else ''}."
    more = FRONTIER_EXPLANATIONS if comparison.arms else ()
    unknown = any(summary.finished and summary.idle is None for summary in comparison.summaries)
    unseen = [f"idle is not known of these devices: {comparison.idle_unknown}."] * bool(
        unknown and comparison.idle_unknown
    )
    return [baseline, reward_source(comparison), *EXPLANATIONS, *unseen, *filter(None, [poll_line(comparison)]), *more]


def reward_source(comparison: Comparison) -> str:
    """Of what the reward is the mean."""
    source = next((summary.reward_of for summary in comparison.summaries if summary.reward_of), "")
    return f"reward: the mean of {source}." if source else "reward: no run finished."


def ratio_table(comparison: Comparison) -> tuple[Sequence[str], list[list[str]]]:
    """Header and rows: for each arm but the baseline, every figure over the baseline's of the same seed and round."""
    names = {of: name for of, name in RATIO_NAMES.items() if comparison.validates or WITHOUT not in name}
    rows = [
        [summary.arm, *(spread(summary.ratios.get(figure), ".2f") for figure in names)]
        for summary in comparison.summaries
        if summary.arm != comparison.baseline_of(summary.arm)
    ]
    return [f"arm to {' or '.join(comparison.baselines) or comparison.baseline}", *names.values()], rows


def equal_heading(equal: EqualTokens, level: str = "") -> str:
    return f"{level}At {equal.tokens:,.0f} generated tokens"


def equal_table(equal: EqualTokens, baseline: str) -> tuple[Sequence[str], list[list[str]]]:
    """Header and rows: each arm after as many generated tokens."""
    first = ("arm", "reward", f"to {baseline}", "seconds", WITHOUT, "trained")
    header = (*first, *(f"samples: {level}" for level in LEVELS))
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
    return header, rows


EQUAL_TOKENS = (
    "Tokens are all that the engines generated to train on, dropped samples included and validations not; the number "
    "is that of the run that generated the fewest. The reward lies on the line between the two validations around it. "
    "seconds: since the end of the first step, with validations and without them; meanwhile every arm goes on to "
    "generate, and arms may validate more or less often. trained: response tokens by then. samples: of a "
    "prompt, the mean over steps, by the share of them that were right: none, up to 1/4 (hard), up to 3/4 (middle), "
    "more (easy)."
)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def failures(comparison: Comparison) -> str:
    """The arms whose runs did not all finish, with the reasons and the logs."""
    parts = [
        f"`{summary.arm}`{f', log `{log}`' if log else ''}:\n\n```\n{last_lines(reason)}\n```"
        for summary in comparison.summaries
        for reason, log in summary.reasons
    ]
    return "\n\n".join(["## What did not finish", *parts]) if parts else ""


def last_lines(reason: str) -> str:
    """What a run ended with: the first line of a reason, and the last ones of its log."""
    first, *rest = reason.strip().splitlines() or [""]
    return "\n".join([first, *rest[-LOG_LINES:]])


def bullets(lines: Sequence[str] | Iterator[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def run_line(run: Run) -> str:
    """The line of a run on the terminal, when it has ended."""
    name = f"{run.arm}, seed {run.seed}, round {run.round}"
    if run.figures is None:
        return f"{name}: {run.state}: {run.reason.splitlines()[0] if run.reason else ''}"
    idle = "" if run.figures.idle is None else f", idle {run.figures.idle:.0%}"
    return f"{name}: {run.figures.tokens_per_s:,.0f} tokens/s, {run.figures.step_s:.2f} s a step{idle}"
