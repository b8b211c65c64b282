"""Checkpoint clean-up: a run that was stopped or killed while saving leaves no incomplete checkpoint behind.

A checkpoint marker records what the folder held: before each save by our trainer, and once a run for verl's own
trainers, whose saves are not ours to wrap, and for saves in the background (`async_save`). When all processes of a run
are gone, its supervisor reads the marker and cleans up. Where the supervisor was killed too, the next run of this host
that saves into the same folder does.

Invariants: a folder is removed only if it appeared after its run's marker, was not finished since, and no other living
run has marked it. While our trainer saves nothing, it has no marker. Cleaning up twice, or by two runs at once, has
the effect of once.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import traceback
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import msgspec

from seamless_verl.errors import CheckpointError
from seamless_verl.runtime.checkpoint_marker import (
    REFRESH_S,
    TRACKER,
    CheckpointMarker,
    ProcessIdentity,
    marker_file,
    read_markers,
    saved_steps,
    step_folder,
    tracker_state,
)
from seamless_verl.runtime.console import RUN_FILE
from seamless_verl.runtime.files import write_atomically

logger = logging.getLogger(__name__)
TRIED_BYTES = 2**20
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
MANIFEST = "actor/ckpt_contents.json"  # the last file of a save in the background


@dataclass(frozen=True)
class CheckpointedRun:
    """What a run registers for its supervisor, and for its trainer."""

    name: str
    checkpoints: str
    async_save: bool
    marks_each_save: bool
    supervisor: ProcessIdentity | None

    def write_marker(self, folder: Path, step: int | None) -> None:
        marker = CheckpointMarker.of(folder, self.name, step, supervisor=self.supervisor, async_save=self.async_save)
        marker.write(folder)


@dataclass(frozen=True)
class CleanupReport:
    """What runs left incomplete: `removed` folders, and older folders that were being `overwritten`, which stay."""

    removed: tuple[Path, ...] = ()
    overwritten: tuple[Path, ...] = ()

    def __add__(self, other: CleanupReport) -> CleanupReport:
        return CleanupReport(self.removed + other.removed, self.overwritten + other.overwritten)


def register_run(folder: str, *, async_save: bool, seamless: bool) -> CleanupReport:
    """Register with the supervisor, if there is one, that this run saves in `folder`.

    `seamless` is true for our trainer's runs. First it cleans up after runs of this host whose supervisors were killed,
    and returns what that did.

    Raises:
        OSError: verl's own saves, which need a marker from the start, would find `folder` unwritable.
    """
    if RUN_FILE not in os.environ:
        return CleanupReport()
    path = Path(folder).absolute()
    report = clean_up_dead_runs(path)
    supervisor = ProcessIdentity.of(os.getppid())  # this is its child
    run = CheckpointedRun(uuid.uuid4().hex[:12], str(path), async_save, seamless and not async_save, supervisor)
    write_atomically(Path(os.environ[RUN_FILE]), msgspec.json.encode(run).decode())
    if not run.marks_each_save:
        run.write_marker(path, None)
    return report


def clean_up_dead_runs(folder: Path) -> CleanupReport:
    """Clean up after this host's runs that have no living process."""
    report = CleanupReport()
    for marker in list(read_markers(folder)):
        if marker.on_this_system and not marker.is_alive(folder):
            report += clean_up(folder, marker)
            marker_file(folder, marker.run).unlink(missing_ok=True)
    return report


@contextmanager
def refreshing_marker(every: float = REFRESH_S) -> Iterator[None]:
    """In the block, refresh the marker of the run that this process registered, whenever it has one."""
    run, stop = read_run(Path(os.environ.get(RUN_FILE, ""))), threading.Event()
    if run is None:
        yield
        return
    thread = threading.Thread(target=_refresh, args=(run, stop, every), name="checkpoint-marker", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _refresh(run: CheckpointedRun, stop: threading.Event, every: float) -> None:
    path = marker_file(Path(run.checkpoints), run.name)
    while not stop.wait(every):
        try:
            with suppress(FileNotFoundError):  # nothing is being saved
                os.utime(path)
        except OSError as error:  # the file system is away, and may come back
            logger.warning("%s cannot be refreshed: %s", path, error)


@contextmanager
def marked_save(folder: str, step: int) -> Iterator[None]:
    """Around the whole save of `step`, tracker included: its marker stays if the save fails.

    Raises:
        CheckpointError: it failed, and the disk is why.
    """
    run, path = read_run(Path(os.environ.get(RUN_FILE, ""))), Path(folder)
    if run is not None and not run.marks_each_save:
        run = None
    try:
        if run is not None:
            run.write_marker(path, step)
        yield
        if run is not None:
            marker_file(path, run.name).unlink()
    except Exception as error:
        if (why := disk_failure(path, error)) is not None:
            raise CheckpointError(step, os.path.abspath(folder), why) from error
        raise


def disk_failure(folder: Path, error: Exception) -> str | None:
    """What is wrong with the disk, by a try or by the error's text; None where neither shows anything.

    torch's writers end with errors of their own, such as of the position in a file.
    """
    try:
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(TRIED_BYTES))
    except FileNotFoundError:  # on another machine, or removed: no fault of the disk
        pass
    except OSError as found:
        return found.strerror or str(found)
    text = "".join(traceback.format_exception(error))
    return next((reason for code in DISK_ERRORS if (reason := os.strerror(code)) in text), None)


def remove_emptied(folder: Path, steps: Collection[int]) -> list[int]:
    """Remove checkpoints of these steps whose actor verl has removed (`max_actor_ckpt_to_keep`); returns the others.

    The data loader and the queue that it leaves in such a folder resume nothing.
    """
    kept = [step for step in steps if (step_folder(folder, step) / "actor").is_dir()]
    for step in set(steps) - set(kept):
        with suppress(FileNotFoundError):  # the user was faster
            shutil.rmtree(step_folder(folder, step))
    return kept


def clean_up_run(run_file: Path) -> CleanupReport:
    """Remove what the run registered in `run_file` began to save and did not finish; repair an emptied tracker.

    To be called when no process of the run is alive. Saves in the background are left: whether they ended cannot be
    determined here.

    Raises:
        OSError: the folder cannot be read or changed.
    """
    run = read_run(run_file)
    if run is None or not (path := marker_file(Path(run.checkpoints), run.name)).exists():
        return CleanupReport()
    report = clean_up(path.parent, CheckpointMarker.read(path))
    path.unlink(missing_ok=True)
    return report


def clean_up(folder: Path, marker: CheckpointMarker) -> CleanupReport:
    """Remove the folders that the marker shows to be incomplete and new, and repair the tracker; the marker stays."""
    finished = set() if marker.async_save else marker.finished_steps(folder)
    others = {other.step for other in read_markers(folder) if other.run != marker.run and other.is_alive(folder)}
    undecidable = marker.async_save or None in others  # None: it may be saving any step, at any moment
    incomplete = set() if undecidable else marker.begun_steps(folder) - finished - others
    removed = tuple(step_folder(folder, step) for step in sorted(incomplete - set(marker.steps)))
    for path in removed:
        with suppress(FileNotFoundError):  # another run cleans up after the same marker
            shutil.rmtree(path)
    if not others:
        repair_tracker(folder, finished, manifest=marker.async_save)
    overwritten = tuple(step_folder(folder, step) for step in sorted(incomplete & set(marker.steps)))
    return CleanupReport(removed, overwritten)


def repair_tracker(folder: Path, finished: set[int], *, manifest: bool) -> None:
    """Let an empty tracker name the newest complete checkpoint: of `finished`, else of all that look complete."""
    state = tracker_state(folder)
    if state is None or state[0]:
        return
    saved = saved_steps(folder)
    complete = finished or {step for step in saved if looks_complete(step_folder(folder, step), manifest)}
    newest = max(complete, default=None)
    if newest is not None:
        write_atomically(folder / TRACKER, str(newest))


def looks_complete(folder: Path, manifest: bool) -> bool:
    """Whether the actor is saved, which verl may be set to remove from older folders, and what is written after it."""
    actor = folder / "actor"
    saved = actor.is_dir() and any(actor.iterdir()) and (folder / "data.pt").exists()
    return saved and (not manifest or (folder / MANIFEST).exists())


def read_run(run_file: Path) -> CheckpointedRun | None:
    """The run registered in this file, None when there is none."""
    return msgspec.json.decode(run_file.read_bytes(), type=CheckpointedRun) if run_file.is_file() else None
