"""The plots of the page, as figures of plotly: each a function of the comparison. Pure but for importing plotly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import isfinite
from statistics import mean, median
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from seamless_verl.tools.compare.comparison import Comparison
from seamless_verl.tools.compare.figures import StepFigures, seconds_so_far
from seamless_verl.tools.compare.lengths import drawn_and_trained
from seamless_verl.tools.compare.outcome import ArmSummary, Run

# Okabe and Ito's colours, which people with any kind of colour vision tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#666666", "#B8A900")
FONT = {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": "#1f2933"}
DOTTED = {"color": "#888", "dash": "dot", "width": 1}
Value = Callable[[StepFigures], float | None]
Runs = Mapping[str, Sequence[Run]]
"""Finished runs by arm."""
Colours = Mapping[str, str]


def plots(comparison: Comparison) -> Iterator[tuple[str, str, go.Figure]]:
    """(title, what it shows, figure) of each plot that has something to show."""
    runs = {arm: list(found) for arm in colours_of(comparison) if (found := comparison.finished(arm).values())}
    colours = colours_of(comparison)
    if not runs:
        return
    what = "Response tokens trained in a second: the median, and each run."
    values = {arm: [run.figures.tokens_per_s for run in of if run.figures] for arm, of in runs.items()}
    yield "Speed", what, bars_and_runs(values, colours, "tokens/s", "%{y:,.0f} tokens/s")
    if any(summary.ratio is not None for summary in comparison.summaries):
        what = f"tokens/s over those of {' or '.join(comparison.baselines)} of the same seed and round."
        yield "Speed in pairs", what, pairs(comparison, runs, colours)
    validated = all(sum(step.validation is not None for step in run.steps) > 1 for of in runs.values() for run in of)
    reward: Value = (lambda step: step.validation) if validated else (lambda step: step.reward)
    what = "Mean reward of a validation" if validated else "Mean reward of a step's samples"
    yield "Reward by samples", f"{what}: the mean over runs, and their range.", by_samples(runs, colours, reward)
    seconds = "against seconds since the end of the first step, validations among them; a line is a run."
    yield "Reward by time", f"{what}, {seconds}", by_time(runs, colours, reward)
    what = "Seconds of each step, its validation among them, mean over runs. Steps left of the line are not measured."
    yield "Step time", what, by_step(runs, colours, lambda step: step.seconds, "seconds", comparison.skip)
    if any(run.figures is not None and run.figures.idle is not None for of in runs.values() for run in of):
        what = "Share of device time, seen from outside; a ring is the trainer's own account."
        yield "Idle devices", what, idle(runs, colours)
    what = "Mean over a step's samples of their oldest tokens, in weight versions behind the trainer."
    yield "Staleness", what, by_step(runs, colours, lambda step: step.staleness_mean, "versions", comparison.skip)
    yield from frontier_plots(comparison, runs, colours)


def frontier_plots(comparison: Comparison, runs: Runs, colours: Colours) -> Iterator[tuple[str, str, go.Figure]]:
    """What staleness brings and costs, and the lengths that were drawn and trained."""
    if any(place(comparison, summary) is not None for summary in comparison.summaries):
        what = (
            "tokens/s and the reward at the end by permitted staleness: the median, and each run. An arm "
            "without such a bound is a ring at the highest staleness that it had."
        )
        yield "The frontier", what, frontier(comparison, runs, colours)
    if any(run.lengths is not None for of in runs.values() for run in of):
        what = (
            "Share of samples that are at most so long: trained, and as dots those of as many prompts as "
            "drawn. Prompts that were drawn and have no length count as longer than all; their line ends below 1."
        )
        yield "Lengths", what, lengths(runs, colours)


def colours_of(comparison: Comparison) -> dict[str, str]:
    names = dict.fromkeys(run.arm for run in comparison.runs)
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}


def figure(x: str, y: str, *, legend: bool = True) -> go.Figure:
    """An empty figure with named axes."""
    found = styled(go.Figure(), legend=legend)
    found.update_xaxes(title=x, zeroline=False)
    found.update_yaxes(title=y, rangemode="tozero")
    return found


def styled(found: go.Figure, *, legend: bool = True, height: int = 340) -> go.Figure:
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


def add_line(found: go.Figure, points: Sequence[tuple[float, float]], hover: str, colour: str, **options: Any) -> None:
    """Points with a line through them, by default without marks."""
    line = {"color": colour, "width": 2} | options.pop("line", {})
    shown = {"mode": "lines", "line": line, "hovertemplate": f"{hover}<extra></extra>"} | options
    found.add_scatter(x=[at for at, _ in points], y=[value for _, value in points], **shown)


def bars_and_runs(values: Mapping[str, Sequence[float]], colours: Colours, name: str, hover: str) -> go.Figure:
    """A bar for each arm's median, and a point for each run."""
    found = figure("", name, legend=False)
    for arm, of_runs in values.items():
        bar: dict[str, Any] = {"color": colours[arm], "opacity": 0.35}
        found.add_bar(x=[arm], y=[median(of_runs)], marker=bar, hovertemplate=f"{arm}: median {hover}<extra></extra>")
        point = {"color": colours[arm], "size": 9, "line": {"color": "white", "width": 1}}
        template = f"{arm}: {hover}<extra></extra>"
        found.add_scatter(x=[arm] * len(of_runs), y=list(of_runs), mode="markers", marker=point, hovertemplate=template)
    return found


def pairs(comparison: Comparison, runs: Runs, colours: Colours) -> go.Figure:
    """A point for each pair, by seed and round; a line at 1."""
    found = figure("seed and round", "ratio")
    for arm, of_arm in runs.items():
        baseline = comparison.baseline_of(arm)
        base = {pair: run.figures for pair, run in comparison.finished(baseline).items() if run.figures}
        ours = [run for run in of_arm if run.figures and run.pair in base]
        if arm != baseline and ours:
            found.add_scatter(
                x=[f"seed {run.seed}, round {run.round}" for run in ours],
                y=[run.figures.tokens_per_s / base[run.pair].tokens_per_s for run in ours if run.figures],
                mode="markers",
                name=arm,
                marker={"color": colours[arm], "size": 11},
                hovertemplate=f"{arm}: %{{y:.2f}}<extra></extra>",
            )
    found.add_hline(y=1, line=DOTTED)
    found.update_xaxes(type="category")
    return found


def over_runs(runs: Sequence[Run], at: Callable[[StepFigures], int], value: Value) -> dict[int, list[float]]:
    """The values of all runs by where they are, in order."""
    found = defaultdict[int, list[float]](list)
    for step in chain.from_iterable(run.steps for run in runs):
        if (number := value(step)) is not None:
            found[at(step)].append(number)
    return dict(sorted(found.items()))


def by_samples(runs: Runs, colours: Colours, value: Value) -> go.Figure:
    """The mean over runs with their range, by samples trained."""
    found = figure("samples trained", "reward")
    for arm, of_arm in runs.items():
        curve = over_runs(of_arm, lambda step: step.samples, value)
        area = [(x, max(ys)) for x, ys in curve.items()] + [(x, min(ys)) for x, ys in reversed(curve.items())]
        hidden = {"fill": "toself", "opacity": 0.18, "hoverinfo": "skip", "showlegend": False}
        if curve:
            add_line(found, area, "", colours[arm], line={"width": 0}, **hidden, hovertemplate=None)
            hover = f"{arm}: %{{y:.3f}} after %{{x:,}} samples"
            add_line(found, [(x, mean(ys)) for x, ys in curve.items()], hover, colours[arm], name=arm)
    return found


def by_time(runs: Runs, colours: Colours, value: Value) -> go.Figure:
    """A line for each run, by seconds."""
    found = figure("seconds", "reward")
    for arm, of_arm in runs.items():
        for index, run in enumerate(of_arm):
            seconds = seconds_so_far(run.steps)
            timed = [step for step in run.steps if step.step in seconds]
            points = [(seconds[step.step], reward) for step in timed if (reward := value(step)) is not None]
            group = {"name": arm, "legendgroup": arm, "showlegend": index == 0, "line": {"width": 1.6}}
            add_line(found, points, f"{arm}, seed {run.seed}: %{{y:.3f}} after %{{x:.0f}} s", colours[arm], **group)
    return found


def by_step(runs: Runs, colours: Colours, value: Value, name: str, skip: int) -> go.Figure:
    """The mean over runs of a value, by step."""
    found = figure("step", name)
    for arm, of_arm in runs.items():
        points = [(at, mean(values)) for at, values in over_runs(of_arm, lambda step: step.step, value).items()]
        marks = {"name": arm, "mode": "lines+markers", "marker": {"size": 5}}
        add_line(found, points, f"{arm}, step %{{x}}: %{{y:.2f}} {name}", colours[arm], **marks)
    found.add_vline(x=skip + 0.5, line=DOTTED)
    return found


def idle(runs: Runs, colours: Colours) -> go.Figure:
    """Idle shares by arm, with the trainer's own account beside them where it has one."""
    figures = {arm: [run.figures for run in of if run.figures] for arm, of in runs.items()}
    seen = {arm: [one.idle for one in of if one.idle is not None] for arm, of in figures.items()}
    found = bars_and_runs({arm: values for arm, values in seen.items() if values}, colours, "idle", "%{y:.1%} idle")
    own = [(arm, one.own_idle) for arm, of in figures.items() for one in of if one.own_idle is not None]
    found.add_scatter(
        x=[arm for arm, _ in own],
        y=[value for _, value in own],
        mode="markers",
        marker={"symbol": "circle-open", "size": 12, "color": "#333"},
        hovertemplate="%{x}: %{y:.1%} by its own account<extra></extra>",
    )
    found.update_yaxes(tickformat=".0%")
    return found


def frontier(comparison: Comparison, runs: Runs, colours: Colours) -> go.Figure:
    """Speed above, reward below, by staleness in weight versions."""
    panels = (("tokens_per_s", "tokens/s", ",.0f"), ("reward", "reward", ".3f"))
    found = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    for row, (name, title, form) in enumerate(panels, 1):
        for line, arms in lines_of(comparison).items():
            placed = ((place(comparison, one), one) for one in arms)
            known = [(at, one) for at, one in placed if at is not None and getattr(one, name)]
            symbols = ["circle-open" if comparison.arms[one.arm].permitted is None else "circle" for _, one in known]
            add_line(
                found,
                [(at, getattr(one, name).median) for at, one in known],
                f"%{{text}}: %{{y:{form}}} {title}",
                colours[arms[0].arm],
                mode="lines+markers",
                name=line,
                legendgroup=line,
                showlegend=row == 1,
                marker={"size": 10, "symbol": symbols},
                text=[one.arm for _, one in known],
                row=row,
                col=1,
            )
            for at, one in known:  # a small point for each run
                values = [value for run in runs[one.arm] if (value := getattr(run.figures, name)) is not None]
                point = {"color": colours[one.arm], "size": 5, "opacity": 0.6}
                small = {"mode": "markers", "marker": point, "showlegend": False, "row": row, "col": 1}
                add_line(found, [(at, value) for value in values], f"{one.arm}: %{{y}}", colours[one.arm], **small)
        found.update_yaxes(title=title, rangemode="tozero", row=row, col=1)
    found.update_xaxes(title="staleness in weight versions: permitted, or the highest", dtick=1, row=2, col=1)
    return styled(found, height=520)


def lines_of(comparison: Comparison) -> dict[str, list[ArmSummary]]:
    """The arms of a line: those that differ in nothing but what they permit."""
    found: dict[str, list[ArmSummary]] = {}
    for one in comparison.summaries:
        if one.arm in comparison.arms:
            found.setdefault(comparison.arms[one.arm].line or one.arm, []).append(one)
    return {line: sorted(arms, key=lambda one: comparison.arms[one.arm].permitted or 0) for line, arms in found.items()}


def place(comparison: Comparison, one: ArmSummary) -> float | None:
    """Where an arm is on the axis of staleness; None where nothing is known."""
    if one.arm not in comparison.arms or one.tokens_per_s is None:
        return None
    permitted = comparison.arms[one.arm].permitted
    if permitted is not None:
        return float(permitted)
    return None if one.staleness_max is None else one.staleness_max.highest


def lengths(runs: Runs, colours: Colours) -> go.Figure:
    """Distribution functions of an arm's samples, its runs together."""
    found = figure("response tokens", "share")
    for arm, of_arm in runs.items():
        both = [drawn_and_trained(run.lengths) for run in of_arm if run.lengths is not None]
        for side, (name, dash) in enumerate((("drawn", "dot"), ("trained", "solid"))):
            every = list(chain.from_iterable(chain.from_iterable(sides[side].values()) for sides in both))
            values = sorted(filter(isfinite, every))
            points = [(value, (index + 1) / len(every)) for index, value in enumerate(values)]
            group = {"name": arm, "legendgroup": arm, "showlegend": name == "trained"}
            hover, line = f"{arm}, {name}: %{{y:.1%}} up to %{{x}}", {"dash": dash, "shape": "hv"}
            if points:
                add_line(found, points, hover, colours[arm], line=line, **group)
    return found
