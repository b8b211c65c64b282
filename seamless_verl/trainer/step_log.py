"""What a run logs of each step: verl's tracking, which also writes the file of step metrics, and one line a step.

verl makes its tracking and its progress bar by names of its trainer's module, which `logging_of` binds to ours while it
trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from verl.trainer.ppo.v1 import trainer_base
from verl.utils.tracking import Tracking

from seamless_verl.platform.adaptation import rebound
from seamless_verl.runtime.console import show_line
from seamless_verl.runtime.step_metrics import StepMetrics
from seamless_verl.trainer.step_line import step_line

CONSOLE = "console"


class StepTracking(Tracking):  # type: ignore[misc]
    """verl's tracking; each step also goes to `file`, and with `line` as its text to the console."""

    def __init__(
        self,
        *args: Any,
        default_backend: Any,
        file: StepMetrics,
        line: Callable[[int, Mapping[str, float]], str] | None,
        **kwargs: Any,
    ) -> None:
        self.file = file
        backends = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        self.line = line if CONSOLE in backends else None
        if self.line is not None:
            backends.remove(CONSOLE)
        super().__init__(*args, default_backend=backends, **kwargs)

    def log(self, data: Mapping[str, Any], step: int, backend: Any = None) -> None:
        self.file.add(step, data)
        if self.line is not None:
            show_line(self.line(step, data))
        super().log(data=data, step=step, backend=backend)


def logging_of(file: StepMetrics, total: Callable[[], int], *, lines: bool) -> AbstractContextManager[None]:
    """In the block, a trainer that begins to train logs each step to `file`, and with `lines` as one line each.

    `total` gives the run's number of steps, known when the first one is logged. With `lines` there is no progress bar
    and no dump of the validation's metrics, which are in the file.
    """
    tracking = partial(StepTracking, file=file)
    if not lines:
        return rebound(trainer_base, Tracking=partial(tracking, line=None))
    return rebound(
        trainer_base,
        Tracking=partial(tracking, line=lambda step, data: step_line(step, total(), data)),
        tqdm=partial(trainer_base.tqdm, disable=True),
        pprint=lambda _: None,
    )
