"""What a run writes besides its training: that nobody else writes there, and what its supervisor removes after it.

The child that trains registers files beside the run file; the supervisor reads them when every process of the run is
gone. The view beside a run is a process of its own: it ends when the block does, or when the run's process is killed,
and whatever becomes of it, the run goes on.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from seamless_verl.client.admin_file import AdminFile, remove_stale
from seamless_verl.config import SeamlessConfig
from seamless_verl.config.paths import IN_USE, USE_ANOTHER, without_lock, writes_checkpoints
from seamless_verl.config.roles import ADDRESS
from seamless_verl.config.verl_keys import FOLDER, VERL_MODES
from seamless_verl.errors import ConfigError
from seamless_verl.runtime.checkpoint_cleanup import CleanupReport, clean_up_run, register_run
from seamless_verl.runtime.console import RUN_FILE, ResumeSettings, say
from seamless_verl.runtime.locks import only_writer
from seamless_verl.runtime.supervisor import joins_cluster, named_cluster

logger = logging.getLogger(__name__)
ADMIN_FILES = "admin-files"  # beside the run file: the files that name this run's gateways


def writes_locally(config: DictConfig) -> bool:
    """Whether checkpoints are written on this machine by processes of this run, as far as the settings show."""
    joins = joins_cluster(os.environ | {"RAY_ADDRESS": named_cluster(OmegaConf.select(config, ADDRESS))})
    return not joins and "://" not in config.trainer.default_local_dir


@contextmanager
def exclusive_checkpoint_folder(config: DictConfig) -> Iterator[None]:
    """In the block, no other run writes into this one's checkpoint folder.

    Raises:
        ConfigError: another run writes there already, or the lock of the folder cannot be made.
    """
    folder = config.trainer.default_local_dir
    writes = writes_checkpoints(config.trainer.v1.trainer_mode, config.trainer.save_freq)
    with ExitStack() as lock:
        try:
            if writes and writes_locally(config):
                lock.enter_context(only_writer(Path(folder)))
        except BlockingIOError:  # it began since this one was checked
            raise ConfigError(FOLDER, folder, IN_USE, USE_ANOTHER) from None
        except OSError as error:
            raise without_lock(folder, error.strerror or str(error)) from error
        yield


def register_checkpoints(config: DictConfig) -> None:
    """Let the supervisor remove checkpoints that this run leaves incomplete; first clean up after killed runs.

    Not in a cluster that outlives this run: the supervisor cannot see whether a save still runs there.
    """
    if config.trainer.save_freq > 0 and writes_locally(config):
        report = register_run(
            config.trainer.default_local_dir,
            async_save=bool(config.actor_rollout_ref.actor.checkpoint.get("async_save", False)),
            seamless=config.trainer.v1.trainer_mode not in VERL_MODES,
        )
        print_cleanup(report, "an earlier run was killed")


def register_resume(config: DictConfig) -> None:
    """Let the supervisor say how a run that ended early goes on, where it can see the checkpoints."""
    if RUN_FILE in os.environ and writes_locally(config):
        trainer = config.trainer
        folder = str(Path(trainer.default_local_dir).absolute())
        path = trainer.get("resume_from_path")
        ResumeSettings(folder, trainer.resume_mode, path, trainer.save_freq).keep(Path(os.environ[RUN_FILE]))


def register_admin_files(config: DictConfig, seamless: SeamlessConfig) -> None:
    """Let the supervisor remove the files with the address and the keys of this run's gateways, if they do not."""
    if RUN_FILE in os.environ and seamless.gateway.enabled:
        gateway, folder = seamless.gateway, config.trainer.default_local_dir
        files = [AdminFile.beside(gateway.journal_of(shard, folder).absolute()) for shard in range(gateway.shards)]
        Path(os.environ[RUN_FILE]).with_name(ADMIN_FILES).write_text("\n".join(map(str, files)))


def clean_up(run_file: Path) -> None:
    """In the supervisor, when every process of the run is gone."""
    clean_up_checkpoints(run_file)
    listed = run_file.with_name(ADMIN_FILES)
    for file in listed.read_text().splitlines() if listed.exists() else ():
        try:
            remove_stale(Path(file))
        except OSError as error:
            say(f"{file} is left, though its run has ended: {error}")


def clean_up_checkpoints(run_file: Path) -> None:
    """In the supervisor, when every process of the run is gone."""
    try:
        report = clean_up_run(run_file)
    except (OSError, ValueError) as error:
        say(f"An incomplete checkpoint may be left: {error}")
        return
    print_cleanup(report, "the run ended")


def print_cleanup(report: CleanupReport, cause: str) -> None:
    for folder in report.removed:
        say(f"Removed {folder}: {cause} while it was written")
    for folder in report.overwritten:
        say(f"{folder} is incomplete: {cause} while it was overwritten")


LAST_LINES = 5  # of the view's output, in the log when it ends by itself
END_S = 5.0  # from asking it to end until it is killed


@contextmanager
def viewing(folder: Path, host: str, port: int) -> Iterator[None]:
    """In the block, the run in `folder` is shown at an address that is printed to stderr; if not, the log says why."""
    arguments = [str(folder.absolute()), f"--host={host}", f"--port={port}", f"--ends-with={os.getpid()}"]
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "seamless_verl.tools.view", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C in a terminal is for the run, which then ends it
        )
    except OSError as error:
        logger.warning("The view does not start, and the run goes on without: %s", error)
        yield
        return
    ending = threading.Event()
    reader = threading.Thread(target=follow, args=(process, ending), name="view", daemon=True)
    reader.start()
    try:
        yield
    finally:
        ending.set()
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(END_S)


def follow(process: subprocess.Popen[str], ending: threading.Event) -> None:
    """Prints the address, and logs what the process said last if it ends before the run does."""
    assert process.stdout is not None
    lines: deque[str] = deque(maxlen=LAST_LINES)
    with process.stdout:
        for line in process.stdout:
            if line.startswith("http"):
                sys.stderr.write(f"The view of this run: {line.strip()}\n")  # a log file is for others too
            else:
                lines.append(line.strip())
    if not ending.is_set():
        logger.warning("The view has ended, and the run goes on without: %s", " ".join(lines) or process.wait())
