"""What a run logs of each step, for loggers, the file of step metrics and the terminal.

    step:12 of 80  reward 0.231  validation 0.204  273 tokens/s  1.9 s  idle 23%  staleness 1
        ahead 2 (engines lost 12%; 9% with 3, 31% with 1)  waited 0.4 s for groups

The line begins as verl's own line of a step does, so that what looks for `step:12 ` finds it. A figure that a step does
not have is left out. tokens/s count what a comparison's report does: response tokens that were trained, tools' answers
included and prompts not; by the step's time without its checkpoint. `ahead` is shown where the run finds it itself,
with what engines lost of their full rate, and would have lost with other levels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from seamless_verl.platform.adaptation import rebound
from seamless_verl.runtime.console import show_line
from seamless_verl.runtime.step_metrics import VALIDATED, StepMetrics, StepRow, response_tokens, validation_reward

CONSOLE = "console"
REWARD, SECONDS, CHECKPOINT = "critic/score/mean", "perf/time_per_step", "timing_s/save_checkpoint"
FAILED, UNSCORED = "sessions/failed", "seamless/validation/unscored"
IDLE, STALENESS = "seamless/device/idle_share", "training/off_policy/trajectory_staleness_worst/max"
AHEAD, LOST = "seamless/ahead", "seamless/ahead/lost_share"
WAITS = {
    "timing_s/gen": "for groups",
    "seamless/commit/waited_s": "for replicas that loaded weights",
    "timing_s/update_weights": "for staging weights",
    CHECKPOINT: "for a checkpoint",
    "timing_s/testing": "for the validation",
}
"""What a step may wait for besides its computations, by the metric with its seconds."""
NAMED = 0.01  # a share of a step that is worth naming
SHORTEST_S = 0.05  # a wait that is worth naming
TITLE = "validation curve"
WIDTH, HEIGHT = 60, 12  # of the text plot, in characters


def logging_of(file: StepMetrics, total: Callable[[], int]) -> AbstractContextManager[None]:
    """In the block, a trainer that begins to train logs each step to `file`, and as one line on the console.

    verl makes its tracking and its progress bar by names of its trainer's module, which are ours in the block. `total`
    gives the run's number of steps. There is no progress bar, and no dump of the validation's metrics.
    """
    from verl.trainer.ppo.v1 import trainer_base

    tracking = partial(step_tracking, trainer_base.Tracking, file, lambda step, data: step_line(step, total(), data))
    bar = partial(trainer_base.tqdm, disable=True)
    return rebound(trainer_base, Tracking=tracking, tqdm=bar, pprint=lambda _: None)


def step_tracking(
    made_by: Callable[..., Any],
    file: StepMetrics,
    line: Callable[[int, Mapping[str, float]], str],
    *args: Any,
    default_backend: Any,
    **kwargs: Any,
) -> Any:
    """verl's tracking; each step also goes to `file`, and `line` as its text to the console in verl's place."""
    backends = [default_backend] if isinstance(default_backend, str) else list(default_backend)
    if shown := CONSOLE in backends:
        backends.remove(CONSOLE)
    tracking = made_by(*args, default_backend=backends, **kwargs)
    log_by_verl = tracking.log

    def log(data: Mapping[str, Any], step: int, backend: Any = None) -> None:
        file.add(step, data)
        if shown:
            show_line(line(step, data))
        log_by_verl(data=data, step=step, backend=backend)

    tracking.log = log
    return tracking


def step_line(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """The line of a step, of `total` steps of the run. Seconds of the step are those that verl counts as the step's."""
    seconds = metrics.get(SECONDS)
    parts = [f"step:{step} of {total}"]
    if (reward := metrics.get(REWARD)) is not None:
        parts.append(f"reward {reward:.3f}")
    validation, _ = validation_reward(metrics)
    if validation is not None:
        without = f" ({unscored:.0f} samples without a score)" if (unscored := metrics.get(UNSCORED)) else ""
        beside = "" if (validated := metrics.get(VALIDATED)) is None else f" (step {validated:.0f})"
        parts.append(f"validation {validation:.3f}{beside}{without}")
    if seconds:
        tokens, measured = response_tokens(metrics), seconds - metrics.get(CHECKPOINT, 0.0)
        parts += [f"{tokens / measured:,.0f} tokens/s"] if tokens and measured > 0 else []
        parts.append(f"{seconds:.1f} s")
    if (idle := metrics.get(IDLE)) is not None:
        parts.append(f"idle {idle:.0%}")
    if (staleness := metrics.get(STALENESS)) is not None:
        parts.append(f"staleness {staleness:.0f}")
    if failed := metrics.get(FAILED):
        kinds = {name.removeprefix(f"{FAILED}/"): metrics[name] for name in metrics if name.startswith(f"{FAILED}/")}
        named = ", ".join(f"{count:.0f} {kind}" for kind, count in kinds.items() if count)
        parts.append(f"{failed:.0f} sessions failed so far" + (f" ({named})" if named else ""))
    return "  ".join([*parts, *chosen_ahead(metrics), *longest_wait(metrics)])


def chosen_ahead(metrics: Mapping[str, float]) -> list[str]:
    """How far the run goes ahead and why, as a list of one text; of none where the level is given."""
    if LOST not in metrics:
        return []
    level, lost = round(metrics[AHEAD]), metrics[LOST]
    others = {level + 1: metrics.get(f"{LOST}/more"), level - 1: metrics.get(f"{LOST}/fewer")}
    found = {other: share for other, share in others.items() if share is not None}
    if max(lost, *found.values()) < NAMED:
        return [f"ahead {level}"]
    return [f"ahead {level} (engines lost {lost:.0%}; {', '.join(f'{found[n]:.0%} with {n}' for n in found)})"]


def longest_wait(metrics: Mapping[str, float]) -> list[str]:
    """What the step waited for the longest, as a list of none or one text."""
    seconds, what = max((metrics.get(name, 0.0), what) for name, what in WAITS.items())
    return [f"waited {seconds:.1f} s {what}"] if seconds >= SHORTEST_S else []


def validation_plot(steps: Sequence[StepRow]) -> str:
    """The mean rewards of a run's validations in characters, with the first and the last; "" with fewer than two."""
    found = [(step.step, *validation_reward(step.metrics)) for step in steps]
    points = [(step, value) for step, value, _ in found if value is not None]
    if len(points) < 2:
        return ""
    (first, began), (last, ended) = points[0], points[-1]
    low, high = min(value for _, value in points), max(value for _, value in points)
    rows = [[" "] * WIDTH for _ in range(HEIGHT)]
    for step, value in points:
        x = round((step - first) / (last - first) * (WIDTH - 1))
        y = round((value - low) / ((high - low) or 1.0) * (HEIGHT - 1))
        rows[HEIGHT - 1 - y][x] = "*"
    labels = {0: f"{high:8.3f}", HEIGHT - 1: f"{low:8.3f}"}
    body = [f"{labels.get(i, ''):>8} |{''.join(row)}" for i, row in enumerate(rows)]
    axis = f"{'':>8} +{'-' * WIDTH}\n{'':>9} step {first:<{WIDTH - 12}}{last:>6}"
    times = f", {ended / began:.1f} times" if began > 0 else ""
    of = next(name for _, value, name in found if value is not None)
    return "\n".join([f"{TITLE}: {of}", *body, axis, f"from {began:.3f} to {ended:.3f}{times}"])
