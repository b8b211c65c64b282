"""No half-written checkpoint is left behind by a run that was stopped, or killed, while saving.

What the checkpoint folder held is marked before each save by our trainer, and once a run for verl's
own, whose saves are not ours to wrap, and for saves that go on by themselves (`async_save`). When
all processes of a run are gone, its supervisor reads the mark; where it was killed too, the next run
of this host that saves into the same folder does.

Invariants: a folder is removed only if it appeared after its run's mark, was not finished since,
and no other living run has marked it. While our trainer saves nothing, it has no mark. Settling a mark
twice, or by two runs at once, is settling it once.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from seamless_verl.runtime.checkpoint_marker import (
    REFRESH_S,
    TRACKER,
    Life,
    Mark,
    mark_file,
    marks,
    replace,
    saved_steps,
    step_folder,
    tracker_state,
)

RUN_FILE = "SEAMLESS_RUN_FILE"  # names the file in which a run tells its supervisor where it saves
logger = logging.getLogger(__name__)
MANIFEST = "actor/ckpt_contents.json"  # the last file of a save that goes on by itself


@dataclass(frozen=True)
class CheckpointedRun:
    """What a run tells its supervisor, and its trainer."""

    name: str
    checkpoints: str
    async_save: bool
    marks_each_save: bool
    supervisor: Life | None

    def mark(self, folder: Path, step: int | None) -> None:
        Mark.of(folder, self.name, step, supervisor=self.supervisor, async_save=self.async_save).write(folder)


@dataclass(frozen=True)
class Leftovers:
    """What a run left unfinished: folders removed, and older folders that it was saving over."""

    removed: tuple[Path, ...] = ()
    spoilt: tuple[Path, ...] = ()

    def __add__(self, other: Leftovers) -> Leftovers:
        return Leftovers(self.removed + other.removed, self.spoilt + other.spoilt)


def announce(folder: str, *, async_save: bool, seamless: bool) -> Leftovers:
    """Tell the supervisor, if there is one, that this run saves in `folder`; `seamless` for our trainer's runs.

    Before that, settle what runs of this host left there whose supervisors were killed; returns that. Raises
    OSError when verl's saves, which need a mark from the start, would find `folder` unwritable.
    """
    if RUN_FILE not in os.environ:
        return Leftovers()
    path = Path(folder).absolute()
    left = settle_dead(path)
    supervisor = Life.of(os.getppid())  # this is its child
    run = CheckpointedRun(uuid.uuid4().hex[:12], str(path), async_save, seamless and not async_save, supervisor)
    replace(Path(os.environ[RUN_FILE]), json.dumps(asdict(run)))
    if not run.marks_each_save:
        run.mark(path, None)
    return left


def settle_dead(folder: Path) -> Leftovers:
    """Settle the marks of this host's runs that nobody else will."""
    left = Leftovers()
    for mark in list(marks(folder)):
        if mark.here and not mark.alive(folder):
            left += settle(folder, mark)
            mark_file(folder, mark.run).unlink(missing_ok=True)
    return left


@contextmanager
def refreshing(every: float = REFRESH_S) -> Iterator[None]:
    """Meanwhile the mark of the run that this process announced, while it has one, gives signs of life."""
    run, over = announced(Path(os.environ.get(RUN_FILE, ""))), threading.Event()
    if run is None:
        yield
        return
    thread = threading.Thread(target=_refresh, args=(run, over, every), name="mark", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _refresh(run: CheckpointedRun, over: threading.Event, every: float) -> None:
    mark = mark_file(Path(run.checkpoints), run.name)
    while not over.wait(every):
        try:
            with suppress(FileNotFoundError):  # nothing is being saved
                os.utime(mark)
        except OSError as error:  # the file system is away, and may come back
            logger.warning("%s cannot be refreshed: %s", mark, error)


@contextmanager
def saving(folder: str, step: int) -> Iterator[None]:
    """Around the whole save of `step`, tracker included: a mark that stays if the save does not end well."""
    run = announced(Path(os.environ.get(RUN_FILE, "")))
    if run is None or not run.marks_each_save:
        yield
        return
    path = Path(folder)
    run.mark(path, step)
    yield
    mark_file(path, run.name).unlink()


def discard_partial(run_file: Path) -> Leftovers:
    """Remove what the run announced in `run_file` began to save and did not finish; mend an emptied tracker.

    To be called when no process of the run is alive. Asynchronous saves are left: whether they ended
    cannot be told from here. Raises OSError when the folder cannot be read or changed.
    """
    run = announced(run_file)
    if run is None or not (path := mark_file(Path(run.checkpoints), run.name)).exists():
        return Leftovers()
    left = settle(path.parent, Mark.read(path))
    path.unlink(missing_ok=True)
    return left


def settle(folder: Path, mark: Mark) -> Leftovers:
    finished = set() if mark.async_save else mark.finished(folder)
    others = {other.step for other in marks(folder) if other.run != mark.run and other.alive(folder)}
    unsure = mark.async_save or None in others  # None: it may be saving any step, at any moment
    torn = set() if unsure else mark.begun(folder) - finished - others
    removed = tuple(step_folder(folder, step) for step in sorted(torn - set(mark.steps)))
    for path in removed:
        with suppress(FileNotFoundError):  # another run settles the same mark
            shutil.rmtree(path)
    if not others:
        mend_tracker(folder, finished, manifest=mark.async_save)
    return Leftovers(removed, tuple(step_folder(folder, step) for step in sorted(torn & set(mark.steps))))


def mend_tracker(folder: Path, finished: set[int], *, manifest: bool) -> None:
    """Let an empty tracker name the newest whole checkpoint: of those just `finished`, else of all that look it."""
    state = tracker_state(folder)
    if state is None or state[0]:
        return
    whole = finished or {step for step in saved_steps(folder) if looks_whole(step_folder(folder, step), manifest)}
    newest = max(whole, default=None)
    if newest is not None:
        replace(folder / TRACKER, str(newest))


def looks_whole(folder: Path, manifest: bool) -> bool:
    """Whether the actor is there, as it is not where verl was told to keep fewer, and what is written after it."""
    actor = folder / "actor"
    saved = actor.is_dir() and any(actor.iterdir()) and (folder / "data.pt").exists()
    return saved and (not manifest or (folder / MANIFEST).exists())


def announced(run_file: Path) -> CheckpointedRun | None:
    if not run_file.is_file():
        return None
    values = json.loads(run_file.read_text())
    return CheckpointedRun(
        **values | {"supervisor": None if values["supervisor"] is None else Life(**values["supervisor"])}
    )
