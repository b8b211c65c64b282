"""Kills the writer under load many times: acknowledged tokens are on record once, in order, and sessions continue.

A child process runs agents on a journal. It writes each acknowledgement to a pipe after it happened; the journal must
hold everything that reached the pipe. The token ids of a session count up from 0, prompts included, so a gap, a
repetition or a wrong order is detected. SEAMLESS_KILLS sets the least number of rounds; one journal serves all of them.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from select import select
from time import monotonic, time

from seamless_verl.journal import (
    CallEnded,
    CallStarted,
    ChunkAppended,
    HandedOver,
    HandOverBegun,
    JournalReader,
    SessionClosed,
    SessionOpened,
    SqliteJournal,
    Stage,
    StoredSession,
)
from seamless_verl.trajectory.records import Finish, TokenChunk, logprobs, tokens

ROUNDS = int(os.environ.get("SEAMLESS_KILLS", "25"))
AGENTS, TURNS, CHUNKS, PROMPT = 8, 4, 12, 30
MAX_LIFE_S = 0.15  # seconds from a child's first acknowledgement to its death


def checked_length(record: StoredSession) -> int:
    """The number of tokens in the conversation; asserts that they count up through prompts and generated ids."""
    ids: list[int] = []
    for call in record.calls:
        prompt = call.prompt_ids.tolist()
        assert prompt[: len(ids)] == ids, f"{call.call_id}: its prompt does not begin with the calls before it"
        generated = [token for segment in call.segments for token in segment.ids]
        assert [-float(token % 64) for token in generated] == [v for s in call.segments for v in s.logprobs]
        ids = prompt + generated
    assert ids == [*range(len(ids))], f"{record.session_id}: a token is missing, repeated or out of order"
    return len(ids)


class Load:
    """The child's work: agents that continue the journal's open sessions, and a consumer that is a folder."""

    def __init__(self, journal: SqliteJournal, folder: Path, pipe: int) -> None:
        self.journal, self.folder, self.pipe = journal, folder, pipe

    def report(self, *words: object) -> None:
        os.write(self.pipe, (" ".join(map(str, words)) + "\n").encode())

    async def store(self, record: StoredSession) -> None:
        """Stores the session completely or not at all. If it was stored before, its content must be the same."""
        new, stored = self.folder / "new", self.folder / record.session_id
        new.write_text(str(checked_length(record)))
        assert not stored.exists() or stored.read_text() == new.read_text()
        new.replace(stored)

    async def hand_over(self, session_id: str) -> None:
        """As the data plane: records the beginning before the consumer receives anything, the end when it has all."""
        record = self.journal.read(session_id)
        assert record is not None
        if record.stage is Stage.CLOSED:
            await self.journal.append(HandOverBegun(session_id))
        await self.store(record)
        await self.journal.append(HandedOver(session_id, time()))

    async def run(self) -> None:
        for session in self.journal.sessions():
            if session.stage in (Stage.CLOSED, Stage.HANDING):
                await self.hand_over(session.session_id)
        interrupted = list(self.journal.restore())
        await asyncio.gather(*(self.agent(interrupted.pop() if interrupted else None) for _ in range(AGENTS)))

    async def agent(self, record: StoredSession | None) -> None:
        while True:
            session_id = record.session_id if record else os.urandom(6).hex()
            if record is None:
                await self.journal.append(SessionOpened(session_id, "u", {}, 0.0))
                self.report("ack", session_id, 0)
            await self.session(session_id, record)
            await self.journal.append(SessionClosed(session_id, "done"))
            self.report("closed", session_id)
            await self.hand_over(session_id)
            self.report("handed_over", session_id)
            await self.journal.compact(0.0, max_bytes=1_000_000)
            record = None

    async def session(self, session_id: str, record: StoredSession | None) -> None:
        calls = list(record.calls) if record else []
        count = checked_length(record) if record else 0
        for turn in range(max(0, len(calls) - 1), TURNS):
            done = calls[turn] if turn < len(calls) else None
            if done is None:
                count += PROMPT
                prompt = tokens(range(count))
                await self.journal.append(CallStarted(session_id, f"{session_id}-{turn}", str(turn), prompt))
                self.report("ack", session_id, count)
            if done is None or done.interrupted:
                count = await self.call(session_id, f"{session_id}-{turn}", count)

    async def call(self, session_id: str, call_id: str, count: int) -> int:
        for version in range(CHUNKS):
            ids = range(count, count + 1 + version % 5)
            values = logprobs([-float(token % 64) for token in ids])
            await self.journal.append(ChunkAppended(call_id, TokenChunk(tokens(ids), values, version // 4, "r")))
            count += len(ids)
            self.report("ack", session_id, count)
        await self.journal.append(CallEnded(call_id, Finish.STOP, {"count": count}))
        self.report("ended", session_id, call_id)
        return count


def child(folder: Path) -> None:
    with SqliteJournal(folder / "journal.sqlite") as journal:
        (folder / "consumer").mkdir(exist_ok=True)
        asyncio.run(Load(journal, folder / "consumer", sys.stdout.fileno()).run())


def kill_one(folder: Path, rng: random.Random, while_it_starts: bool) -> list[list[str]]:
    """Runs a child, kills it at a random instant, and returns its reports; its start takes about MAX_LIFE_S."""
    run = subprocess.Popen([sys.executable, __file__, str(folder)], stdout=subprocess.PIPE)
    assert run.stdout is not None
    pipe = run.stdout.fileno()
    output = b"" if while_it_starts else os.read(pipe, 1 << 16)
    stop = monotonic() + rng.random() * MAX_LIFE_S
    while (remaining := stop - monotonic()) > 0:
        if select([pipe], [], [], remaining)[0]:
            output += os.read(pipe, 1 << 16)
    run.send_signal(signal.SIGKILL)
    output += run.stdout.read()
    assert run.wait() == -signal.SIGKILL, "the child ended by itself"
    run.stdout.close()
    return [line.split() for line in output.decode().splitlines()]


class Expectations:
    """The children's reports over all rounds, and so what the journal must hold."""

    def __init__(self) -> None:
        self.acknowledged: Counter[str] = Counter()
        self.ended: dict[str, set[str]] = {}
        self.closed: set[str] = set()
        self.handed_over: set[str] = set()
        self.checked: set[str] = set()
        self.tokens = 0

    def add(self, lines: list[list[str]]) -> None:
        for word, session_id, *rest in lines:
            if word == "ack":
                self.acknowledged[session_id] = max(self.acknowledged[session_id], int(rest[0]))
            elif word == "ended":
                self.ended.setdefault(session_id, set()).add(rest[0])
            else:
                (self.closed if word == "closed" else self.handed_over).add(session_id)

    def check(self, reader: JournalReader, consumer: Path) -> None:
        reader.check_integrity()
        assert all(reader.stage(session_id) in (None, Stage.HANDED) for session_id in self.handed_over - self.checked)
        self.checked |= self.handed_over
        verified: list[str] = []
        for session_id, count in self.acknowledged.items():
            record = reader.read(session_id)
            if record is None or session_id in self.handed_over:
                stored = consumer / session_id
                assert stored.exists(), f"{session_id}: acknowledged, and neither on record nor handed over"
                assert int(stored.read_text()) >= count
                verified.append(session_id)
                continue
            assert checked_length(record) >= count, (
                f"{session_id}: {count} tokens acknowledged, {checked_length(record)} on record"
            )
            ended = {call.call_id for call in record.calls if not call.interrupted}
            assert self.ended.get(session_id, set()) <= ended
            assert session_id not in self.closed or record.stage is not Stage.OPEN
        for session_id in verified:  # its consumer has it; the journal may delete it
            self.tokens += self.acknowledged.pop(session_id)


def test_killed_at_any_instant_no_acknowledged_token_is_lost(tmp_path: Path) -> None:
    rng, expected, reader = random.Random(), Expectations(), JournalReader(tmp_path / "journal.sqlite")
    for turn in range(10 * ROUNDS):
        expected.add(kill_one(tmp_path, rng, while_it_starts=turn % 4 == 3))
        expected.check(reader, tmp_path / "consumer")
        if turn + 1 >= ROUNDS and expected.handed_over and expected.tokens > ROUNDS * 50:
            break  # on a busy machine few tokens are acknowledged in a life
    with SqliteJournal(tmp_path / "journal.sqlite") as journal:
        assert len(journal.restore()) <= AGENTS
    assert expected.handed_over and expected.tokens > ROUNDS * 50, "the load was too light to mean anything"


if __name__ == "__main__":
    child(Path(sys.argv[1]))
