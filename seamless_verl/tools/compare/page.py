"""The report as text and as one page of HTML, which opens without a network: plotly's own script is in it, once."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import isfinite
from pathlib import Path
from statistics import mean, median
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from plotly.io import to_html
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from seamless_verl.runtime.step_metrics import COUNTED
from seamless_verl.tools.compare.comparison import ArmSummary, Comparison, Run
from seamless_verl.tools.compare.figures import StepFigures, seconds_so_far
from seamless_verl.tools.compare.lengths import drawn_and_trained
from seamless_verl.tools.compare.report import last_lines, poll_line, sections, verdicts, warnings_of

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=lambda name: name is not None and name.endswith(".html.jinja"),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
PLOT_OPTIONS = {"displaylogo": False, "displayModeBar": False, "responsive": True}
# Okabe and Ito's colours, which people with any kind of colour vision tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#666666", "#B8A900")
FONT = {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": "#1f2933"}
DOTTED = {"color": "#888", "dash": "dot", "width": 1}
Value = Callable[[StepFigures], float | None]
Runs = Mapping[str, Sequence[Run]]
"""Finished runs by arm."""
Colours = Mapping[str, str]


def two_lines(cell: str) -> Markup:
    """A cell with its spread, or its verdict, in a smaller second line."""
    first, _, second = cell.partition(" (" if cell.endswith(")") else ": ")
    return escape(first) + (Markup("<small>{}</small>").format(second.rstrip(")")) if second else "")


TEMPLATES.filters |= {"two_lines": two_lines, "last_lines": last_lines}


def markdown(comparison: Comparison) -> str:
    """The whole report as text."""
    text: str = TEMPLATES.get_template("report.md.jinja").render(contents(comparison))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def page(comparison: Comparison) -> str:
    """The whole page."""
    return page_of("report.html.jinja", plots(comparison), **contents(comparison))


def page_of(template: str, figures: Iterable[tuple[str, str, Any]], **given: Any) -> str:
    """A page of this template with plots: (title, what it shows, figure of plotly)."""
    drawn = []
    for number, (title, text, figure) in enumerate(figures):
        plot = {"include_plotlyjs": False, "full_html": False, "config": PLOT_OPTIONS, "div_id": f"plot-{number}"}
        drawn.append((title, text, Markup(to_html(figure, **plot))))
    found: str = TEMPLATES.get_template(template).render(given, plots=drawn, script=Markup(get_plotlyjs()))
    return found


def contents(comparison: Comparison) -> dict[str, Any]:
    """What both templates show."""
    return {
        "comparison": comparison,
        "warnings": warnings_of(comparison),
        "verdicts": list(verdicts(comparison)),
        "sections": list(sections(comparison)),
        "failures": [(one.arm, reason, log) for one in comparison.summaries for reason, log in one.reasons],
        "explanations": explanations(comparison),
    }


def explanations(comparison: Comparison) -> list[str]:
    """What the columns say."""
    summaries = comparison.summaries
    unknown = any(summary.finished and summary.idle is None for summary in summaries)
    text = TEMPLATES.get_template("explanations.jinja").render(
        comparison=comparison,
        baselines=comparison.baselines or [comparison.baseline],
        reward_of=next((summary.reward_of for summary in summaries if summary.reward_of), ""),
        counted=COUNTED,
        idle_unknown=comparison.idle_unknown if unknown else "",
        poll_line=poll_line(comparison),
    )
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]


def plots(comparison: Comparison) -> Iterator[tuple[str, str, go.Figure]]:
    """(title, what it shows, figure) of each plot that has something to show."""
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(comparison.names)}
    runs = {arm: list(found) for arm in colours if (found := comparison.finished(arm).values())}
    if not runs:
        return
    every = list(chain.from_iterable(runs.values()))
    figures = {arm: [run.figures for run in of if run.figures] for arm, of in runs.items()}
    speeds = {arm: [one.tokens_per_s for one in of] for arm, of in figures.items()}
    what = "Response tokens trained in a second: the median, and each run."
    yield "Speed", what, bars_and_runs(speeds, colours, "tokens/s", "%{y:,.0f} tokens/s")
    if any(summary.ratio is not None for summary in comparison.summaries):
        what = f"tokens/s over those of {' or '.join(comparison.baselines)} of the same seed and round."
        yield "Speed in pairs", what, pairs(comparison, colours)
    validated = all(sum(step.validation is not None for step in run.steps) > 1 for run in every)
    reward: Value = (lambda step: step.validation) if validated else (lambda step: step.reward)
    what = "Mean reward of a validation" if validated else "Mean reward of a step's samples"
    yield "Reward by samples", f"{what}: the mean over runs, and their range.", by_samples(runs, colours, reward)
    seconds = "against seconds since the end of the first step, validations among them; a line is a run."
    yield "Reward by time", f"{what}, {seconds}", by_time(runs, colours, reward)
    what = "Seconds of each step, its validation among them, mean over runs. Steps left of the line are not measured."
    yield "Step time", what, by_step(runs, colours, lambda step: step.seconds, "seconds", comparison.skip)
    idles = {arm: idle for arm, of in figures.items() if (idle := [one.idle for one in of if one.idle is not None])}
    if idles:
        drawn = bars_and_runs(idles, colours, "idle", "%{y:.1%} idle")
        own = [(arm, one.own_idle) for arm, of in figures.items() for one in of if one.own_idle is not None]
        mark, hover = {"symbol": "circle-open", "size": 12, "color": "#333"}, "%{x}: %{y:.1%} by its own account"
        add_points(drawn, own, hover, mode="markers", marker=mark)
        drawn.update_yaxes(tickformat=".0%")
        yield "Idle devices", "Share of device time, seen from outside; a ring is the trainer's own account.", drawn
    what = "Mean over a step's samples of their oldest tokens, in weight versions behind the trainer."
    yield "Staleness", what, by_step(runs, colours, lambda step: step.staleness_mean, "versions", comparison.skip)
    if any(place(comparison, summary) is not None for summary in comparison.summaries):
        what = (
            "tokens/s and the reward at the end by permitted staleness: the median, and each run. An arm "
            "without such a bound is a ring at the highest staleness that it had."
        )
        yield "The frontier", what, frontier(comparison, colours)
    if any(run.lengths is not None for run in every):
        what = (
            "Share of samples that are at most so long: trained, and as dots those of as many prompts as "
            "drawn. Prompts that were drawn and have no length count as longer than all; their line ends below 1."
        )
        yield "Lengths", what, lengths(runs, colours)


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


def add_points(found: go.Figure, points: Iterable[tuple[Any, float]], hover: str, **options: Any) -> None:
    """Points by x and y; plotly's options say how they look."""
    given = list(points)
    shown = {"hovertemplate": f"{hover}<extra></extra>"} | options
    found.add_scatter(x=[x for x, _ in given], y=[y for _, y in given], **shown)


def add_line(found: go.Figure, points: Iterable[tuple[Any, float]], hover: str, colour: str, **options: Any) -> None:
    """Points with a line through them, by default without marks."""
    line = {"color": colour, "width": 2} | options.pop("line", {})
    add_points(found, points, hover, **({"mode": "lines", "line": line} | options))


def bars_and_runs(values: Mapping[str, Sequence[float]], colours: Colours, name: str, hover: str) -> go.Figure:
    """A bar for each arm's median, and a point for each run."""
    found = figure("", name, legend=False)
    for arm, of_runs in values.items():
        bar: dict[str, Any] = {"color": colours[arm], "opacity": 0.35}
        found.add_bar(x=[arm], y=[median(of_runs)], marker=bar, hovertemplate=f"{arm}: median {hover}<extra></extra>")
        point = {"color": colours[arm], "size": 9, "line": {"color": "white", "width": 1}}
        add_points(found, [(arm, value) for value in of_runs], f"{arm}: {hover}", mode="markers", marker=point)
    return found


def pairs(comparison: Comparison, colours: Colours) -> go.Figure:
    """A point for each pair, by seed and round; a line at 1."""
    found = figure("seed and round", "ratio")
    for arm in comparison.names:
        baseline = comparison.baseline_of(arm)
        own, base = comparison.figures_of(arm), comparison.figures_of(baseline)
        ratios = [
            (f"seed {pair[0]}, round {pair[1]}", one.tokens_per_s / base[pair].tokens_per_s)
            for pair, one in own.items()
            if pair in base
        ]
        if arm != baseline and ratios:
            point = {"color": colours[arm], "size": 11}
            add_points(found, ratios, f"{arm}: %{{y:.2f}}", mode="markers", name=arm, marker=point)
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


def frontier(comparison: Comparison, colours: Colours) -> go.Figure:
    """Speed above, reward below, by staleness in weight versions; arms are a line that differ in nothing else."""
    lines = defaultdict[str, list[tuple[float, ArmSummary]]](list)
    for one in comparison.summaries:
        if (at := place(comparison, one)) is not None:
            lines[comparison.arms[one.arm].line or one.arm].append((at, one))
    found = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    for row, (name, title, form) in enumerate((("tokens_per_s", "tokens/s", ",.0f"), ("reward", "reward", ".3f")), 1):
        for line, arms in lines.items():
            known = sorted(((at, one) for at, one in arms if getattr(one, name)), key=lambda placed: placed[0])
            colour = colours[arms[0][1].arm]
            symbols = ["circle-open" if comparison.arms[one.arm].permitted is None else "circle" for _, one in known]
            add_line(
                found,
                [(at, getattr(one, name).median) for at, one in known],
                f"%{{text}}: %{{y:{form}}} {title}",
                colour,
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
                values = (getattr(of_run, name) for of_run in comparison.figures_of(one.arm).values())
                small = {"mode": "markers", "showlegend": False, "row": row, "col": 1}
                point = {"color": colours[one.arm], "size": 5, "opacity": 0.6}
                points = [(at, value) for value in values if value is not None]
                add_points(found, points, f"{one.arm}: %{{y}}", marker=point, **small)
        found.update_yaxes(title=title, rangemode="tozero", row=row, col=1)
    found.update_xaxes(title="staleness in weight versions: permitted, or the highest", dtick=1, row=2, col=1)
    return styled(found, height=520)


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
