"""Runs for tests of the view: folders as a run leaves them, with small journals, and with many sessions."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from seamless_verl.journal import (
    CallStarted,
    Event,
    GroupDecided,
    GroupOutcome,
    HandedOver,
    HandOverBegun,
    RewardPosted,
    SessionClosed,
    SessionOpened,
    SqliteJournal,
)
from seamless_verl.resources.ledger.ledger import Ledger
from seamless_verl.resources.ledger.trace import Trace
from seamless_verl.runtime.files import RunDescription
from seamless_verl.runtime.step_metrics import StepMetrics
from seamless_verl.trajectory.records import tokens
from support.journal import call_ended, chunk_appended, write
from support.ledger import activity_report, span

JOURNAL = "trajectories.sqlite"
CUT = "9f2c41d07a5be3c8"  # a session whose second call a weight update cut
OPENED = 1795000000.0
REPLY = "two plus two"


def make_tokenizer(folder: Path) -> Path:
    """A tokenizer of bytes, in which the ids of ASCII letters are in the order of letters; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def ids_of(folder: Path, text: str) -> list[int]:
    """The text's ids by the tokenizer in this folder."""
    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return ids


def make_run(folder: Path) -> Path:
    """A run of two steps and three groups, in the folder `run` beside its tokenizer; returns the run's folder."""
    model, run = make_tokenizer(folder / "model"), folder / "run"
    RunDescription("recipe/seamless", OPENED, "colocated", str(model), (str(run / JOURNAL),), 1).write(run)
    for step in (1, 2):
        StepMetrics.beside(str(run)).add(
            step, {"critic/score/mean": step / 4, "seamless/device/idle_share": 0.25, "perf/throughput": 1500.0}
        )
    make_trace(run)
    with SqliteJournal(run / JOURNAL) as journal:
        write_cut_session(journal, model)
        for number in range(3):
            write(journal, *session_events(f"plain{number}", "p1" if number else "p2", number))
    return run


def make_trace(run: Path) -> None:
    """One device that generates for four seconds, trains for four and waits for two."""
    trace = Trace(run / "devices.trace.json", ["train-0"], 0.0)
    ledger = Ledger(["train-0"], 0.0, trace=trace)
    ledger.add(activity_report(span("rollout", 0, 4, "train-0"), span("train", 4, 8, "train-0")))
    ledger.close(10, "step 1")


def write_cut_session(journal: SqliteJournal, model: Path) -> None:
    """Versions 3 and 4 in its second call, of two replicas; its third call leaves the record within the second."""
    one, two, three = (f"{CUT}.{number}" for number in (1, 2, 3))
    prompt, reply, result = (ids_of(model, text) for text in ("What is 2+2?", REPLY, "go on"))
    first, later = ids_of(model, "is the same"), ids_of(model, " as four")
    whole = [*prompt, *reply, *result, *first]
    settings = {"metadata": {"session": "0"}}
    write(journal, SessionOpened(CUT, "p0", settings, OPENED), started(CUT, one, prompt))
    write(journal, chunk_appended(reply, one, 3, "replica-0"), call_ended(one))
    write(journal, started(CUT, two, [*prompt, *reply, *result]), chunk_appended(first, two, 3, "replica-0"))
    write(journal, chunk_appended(later, two, 4, "replica-1"), call_ended(two))
    edited = ids_of(model, "!?")
    write(journal, started(CUT, three, [*whole, *edited]), chunk_appended(reply, three, 4, "replica-0"))
    write(journal, call_ended(three), RewardPosted(CUT, "reward", 1.0), SessionClosed(CUT, "finished"))
    write(journal, HandOverBegun(CUT), HandedOver(CUT, OPENED + 60, {"kept": True}))
    details = {"policy": "mask_older_than:0", "version": 4, "advantages": {"0": [0.25, -0.5, 0.75]}}
    write(journal, GroupDecided("p0", GroupOutcome.TRAINED, 2, details))


def started(session: str, call: str, prompt: list[int]) -> CallStarted:
    request = {"messages": [{"role": "user", "content": f"<b>question</b> of {call}"}]}
    return CallStarted(session, call, f"digest of {call}", tokens(prompt), request)


def session_events(session: str, uid: str, number: int) -> Iterator[Event]:
    """One call in two chunks, closed and handed over; every fourth session failed and was dropped."""
    call, failed = f"{session}.1", number % 4 == 3
    yield SessionOpened(session, uid, {}, OPENED + number)
    yield started(session, call, [20, 21, 22])
    yield chunk_appended([number % 90 + at for at in range(number % 30 + 1)], call, number // 8, "replica-0")
    yield chunk_appended([5, 6], call, number // 8 + number % 2, f"replica-{number % 2}")
    yield call_ended(call)
    yield RewardPosted(session, "reward", number % 5 / 4)
    yield SessionClosed(session, "failed" if failed else "finished")
    yield HandOverBegun(session)
    yield HandedOver(session, OPENED + number + 9, {"kept": not failed} | ({"dropped": "session"} if failed else {}))


def write_many(journal: SqliteJournal, sessions: int, group: int = 8) -> None:
    """So many sessions in groups, by the journal's own writer."""
    for begin in range(0, sessions, 500):
        numbers = range(begin, min(begin + 500, sessions))
        write(journal, *(e for n in numbers for e in session_events(f"{n:016x}", f"prompt-{n // group}", n)))


@contextmanager
def served(folder: Path, *options: str) -> Iterator[str]:
    """`seamless-verl view` as a process; the address of its page."""
    command = [sys.executable, "-m", "seamless_verl.cli", "view", str(folder), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().strip() == str(folder)
            yield process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
