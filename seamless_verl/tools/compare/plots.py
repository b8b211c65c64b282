"""The plots of the page, as figures of plotly: each a function of the comparison. Pure but for importing plotly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean, median
from typing import Any

import plotly.graph_objects as go

from seamless_verl.tools.compare.comparison import Comparison
from seamless_verl.tools.compare.figures import StepFigures
from seamless_verl.tools.compare.learning import seconds_so_far
from seamless_verl.tools.compare.outcome import Run

# Okabe and Ito's colours, which people with any kind of colour vision tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#666666", "#B8A900")
HEIGHT = 340
FONT = {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": "#1f2933"}
Value = Callable[[StepFigures], float | None]


def plots(comparison: Comparison) -> Iterator[tuple[str, str, go.Figure]]:
    """(title, what it shows, figure) of each plot that has something to show."""
    runs = [run for run in comparison.runs if run.figures is not None]
    colours = colours_of(comparison)
    if not runs:
        return
    yield "Speed", "Response tokens trained in a second: the median, and each run.", speed(runs, colours)
    if any(summary.ratio is not None for summary in comparison.summaries):
        names = " or ".join(comparison.baselines)
        what = f"tokens/s over those of {names} of the same seed and round."
        yield "Speed in pairs", what, pairs(comparison, colours)
    what = "Mean reward of a step's samples" if not validated(runs) else "Mean reward of a validation"
    yield "Reward by samples", f"{what}: the mean over runs, and their range.", reward_by_samples(runs, colours)
    seconds = "against seconds since the end of the first step, validations among them; a line is a run."
    yield "Reward by time", f"{what}, {seconds}", reward_by_time(runs, colours)
    yield (
        "Step time",
        "Seconds of each step, its validation among them, mean over runs. Steps left of the line are not measured.",
        by_step(runs, colours, lambda step: step.seconds, "seconds", skip=comparison.skip),
    )
    if any(run.figures is not None and run.figures.idle is not None for run in runs):
        yield (
            "Idle devices",
            "Share of device time, seen from outside; a ring is the trainer's own account.",
            idle(runs, colours),
        )
    yield (
        "Staleness",
        "Mean over a step's samples of their oldest tokens, in weight versions behind the trainer.",
        by_step(runs, colours, lambda step: step.staleness_mean, "versions", skip=comparison.skip),
    )


def colours_of(comparison: Comparison) -> dict[str, str]:
    names = dict.fromkeys(run.arm for run in comparison.runs)
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}


def of_arm(runs: Sequence[Run], arm: str) -> list[Run]:
    return [run for run in runs if run.arm == arm]


def arms_of(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.arm for run in runs))


def figure(x: str, y: str, *, legend: bool = True) -> go.Figure:
    """An empty figure with named axes."""
    found = styled(go.Figure(), legend=legend)
    found.update_xaxes(title=x, zeroline=False)
    found.update_yaxes(title=y, rangemode="tozero")
    return found


def styled(found: go.Figure, *, legend: bool = True, height: int = HEIGHT) -> go.Figure:
    """The same figure with the look of all."""
    found.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 62, "r": 16, "t": 12, "b": 48},
        font=FONT,
        showlegend=legend,
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hovermode="closest",
    )
    return found


def speed(runs: Sequence[Run], colours: Mapping[str, str]) -> go.Figure:
    values = {arm: [run.figures.tokens_per_s for run in of_arm(runs, arm) if run.figures] for arm in arms_of(runs)}
    return bars_and_runs(values, colours, "tokens/s", "%{y:,.0f} tokens/s")


def bars_and_runs(
    values: Mapping[str, Sequence[float]], colours: Mapping[str, str], name: str, hover: str
) -> go.Figure:
    """A bar for each arm's median, and a point for each run."""
    found = figure("", name, legend=False)
    for arm, of_runs in values.items():
        bar: dict[str, Any] = {"color": colours[arm], "opacity": 0.35}
        found.add_bar(x=[arm], y=[median(of_runs)], marker=bar, hovertemplate=f"{arm}: median {hover}<extra></extra>")
        point = {"color": colours[arm], "size": 9, "line": {"color": "white", "width": 1}}
        found.add_scatter(
            x=[arm] * len(of_runs),
            y=list(of_runs),
            mode="markers",
            marker=point,
            hovertemplate=f"{arm}: {hover}<extra></extra>",
        )
    return found


def pairs(comparison: Comparison, colours: Mapping[str, str]) -> go.Figure:
    """A point for each pair, by seed and round; a line at 1."""
    found = figure("seed and round", "ratio")
    for arm in arms_of(comparison.runs):
        baseline = comparison.baseline_of(arm)
        base = {pair: run.figures for pair, run in comparison.finished(baseline).items() if run.figures}
        ours = [run for run in of_arm(comparison.runs, arm) if run.figures and run.pair in base]
        if arm == baseline or not ours:
            continue
        found.add_scatter(
            x=[f"seed {run.seed}, round {run.round}" for run in ours],
            y=[run.figures.tokens_per_s / base[run.pair].tokens_per_s for run in ours if run.figures],
            mode="markers",
            name=arm,
            marker={"color": colours[arm], "size": 11},
            hovertemplate=f"{arm}: %{{y:.2f}}<extra></extra>",
        )
    found.add_hline(y=1, line={"color": "#888", "dash": "dot", "width": 1})
    found.update_xaxes(type="category")
    return found


def validated(runs: Sequence[Run]) -> bool:
    """Whether the runs validated often enough for a curve."""
    return all(sum(step.validation is not None for step in run.steps) > 1 for run in runs)


def reward_value(runs: Sequence[Run]) -> Value:
    return (lambda step: step.validation) if validated(runs) else (lambda step: step.reward)


def reward_by_samples(runs: Sequence[Run], colours: Mapping[str, str]) -> go.Figure:
    value = reward_value(runs)
    found = figure("samples trained", "reward")
    for arm in arms_of(runs):
        curve = over_runs(of_arm(runs, arm), lambda step: step.samples, value)
        if not curve:
            continue
        xs = sorted(curve)
        low, high = [min(curve[x]) for x in xs], [max(curve[x]) for x in xs]
        found.add_scatter(
            x=[*xs, *reversed(xs)],
            y=[*high, *reversed(low)],
            fill="toself",
            mode="lines",
            line={"width": 0, "color": colours[arm]},
            opacity=0.18,
            hoverinfo="skip",
            showlegend=False,
        )
        found.add_scatter(
            x=xs,
            y=[mean(curve[x]) for x in xs],
            mode="lines",
            name=arm,
            line={"color": colours[arm], "width": 2},
            hovertemplate=f"{arm}: %{{y:.3f}} after %{{x:,}} samples<extra></extra>",
        )
    return found


def over_runs(runs: Sequence[Run], at: Callable[[StepFigures], int], value: Value) -> dict[int, list[float]]:
    """The values of all runs by where they are."""
    found = defaultdict[int, list[float]](list)
    for run in runs:
        for step in run.steps:
            if (number := value(step)) is not None:
                found[at(step)].append(number)
    return found


def reward_by_time(runs: Sequence[Run], colours: Mapping[str, str]) -> go.Figure:
    value = reward_value(runs)
    found = figure("seconds", "reward")
    for arm in arms_of(runs):
        for index, run in enumerate(of_arm(runs, arm)):
            seconds = seconds_so_far(run.steps)
            points = [(seconds[step.step], value(step)) for step in run.steps if step.step in seconds]
            points = [point for point in points if point[1] is not None]
            found.add_scatter(
                x=[at for at, _ in points],
                y=[reward for _, reward in points],
                mode="lines",
                name=arm,
                legendgroup=arm,
                showlegend=index == 0,
                line={"color": colours[arm], "width": 1.6},
                hovertemplate=f"{arm}, seed {run.seed}: %{{y:.3f}} after %{{x:.0f}} s<extra></extra>",
            )
    return found


def by_step(runs: Sequence[Run], colours: Mapping[str, str], value: Value, name: str, *, skip: int) -> go.Figure:
    """The mean over runs of a value, by step."""
    found = figure("step", name)
    for arm in arms_of(runs):
        curve = over_runs(of_arm(runs, arm), lambda step: step.step, value)
        xs = sorted(curve)
        found.add_scatter(
            x=xs,
            y=[mean(curve[x]) for x in xs],
            mode="lines+markers",
            name=arm,
            line={"color": colours[arm], "width": 2},
            marker={"size": 5},
            hovertemplate=f"{arm}, step %{{x}}: %{{y:.2f}} {name}<extra></extra>",
        )
    found.add_vline(x=skip + 0.5, line={"color": "#888", "dash": "dot", "width": 1})
    return found


def idle(runs: Sequence[Run], colours: Mapping[str, str]) -> go.Figure:
    """Idle shares by arm, with the trainer's own account beside them where it has one."""
    seen = {
        arm: [run.figures.idle for run in of_arm(runs, arm) if run.figures and run.figures.idle is not None]
        for arm in arms_of(runs)
    }
    found = bars_and_runs({arm: values for arm, values in seen.items() if values}, colours, "idle", "%{y:.1%} idle")
    own = [(run.arm, run.figures.own_idle) for run in runs if run.figures and run.figures.own_idle is not None]
    found.add_scatter(
        x=[arm for arm, _ in own],
        y=[value for _, value in own],
        mode="markers",
        marker={"symbol": "circle-open", "size": 12, "color": "#333"},
        hovertemplate="%{x}: %{y:.1%} by its own account<extra></extra>",
    )
    found.update_yaxes(tickformat=".0%")
    return found
