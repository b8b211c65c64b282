"""Kill -9 under load, again and again: what was acknowledged is there, once, in order, and goes on.

A child process runs agents on a journal. Each acknowledgement is written to a pipe after it happened;
what reached the pipe is what the journal has to answer for. The token ids of a session count up from 0,
prompts included, so a hole, a repetition or a tear shows. SEAMLESS_KILLS sets the number of rounds; the
journal grows through all of them.
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
    Delta,
    HandedOver,
    HandOverBegun,
    JournalReader,
    SessionClosed,
    SessionOpened,
    SqliteJournal,
    Stage,
    StoredSession,
)
from seamless_verl.trajectory.records import Finish, logprobs, tokens

ROUNDS = int(os.environ.get("SEAMLESS_KILLS", "25"))
AGENTS, TURNS, DELTAS, PROMPT = 8, 4, 12, 30
LONGEST = 0.15  # seconds from a child's first acknowledgement to its death


def length(record: StoredSession) -> int:
    """Tokens of the conversation, having checked that they count up through prompts and generated ids."""
    whole: list[int] = []
    for call in record.calls:
        prompt = call.prompt_ids.tolist()
        assert prompt[: len(whole)] == whole, f"{call.call_id}: its prompt does not begin with the calls before it"
        produced = [token for segment in call.segments for token in segment.ids]
        assert [-float(token % 64) for token in produced] == [v for s in call.segments for v in s.logprobs]
        whole = prompt + produced
    assert whole == [*range(len(whole))], f"{record.session_id}: a token is missing, repeated or out of order"
    return len(whole)


class Load:
    """What the child does: agents that go on where the journal left them, and a consumer that is a folder."""

    def __init__(self, journal: SqliteJournal, folder: Path, pipe: int) -> None:
        self.journal, self.folder, self.pipe = journal, folder, pipe

    def tell(self, *words: object) -> None:
        os.write(self.pipe, (" ".join(map(str, words)) + "\n").encode())

    async def put(self, record: StoredSession) -> None:
        """Keep it whole or not at all; one that is kept already, because its mark was lost, comes again the same."""
        new, kept = self.folder / "new", self.folder / record.session_id
        new.write_text(str(length(record)))
        assert not kept.exists() or kept.read_text() == new.read_text()
        new.replace(kept)

    async def give(self, session_id: str) -> None:
        """As the data plane hands over: begun is marked before the consumer is touched, over once it has all."""
        record = self.journal.read(session_id)
        assert record is not None
        if record.stage is Stage.CLOSED:
            await self.journal.append(HandOverBegun(session_id))
        await self.put(record)
        await self.journal.append(HandedOver(session_id, time()))

    async def run(self) -> None:
        for left in self.journal.sessions():
            if left.stage in (Stage.CLOSED, Stage.HANDING):
                await self.give(left.session_id)
        waiting = list(self.journal.restore())
        await asyncio.gather(*(self.agent(waiting.pop() if waiting else None) for _ in range(AGENTS)))

    async def agent(self, record: StoredSession | None) -> None:
        while True:
            session_id = record.session_id if record else os.urandom(6).hex()
            if record is None:
                await self.journal.append(SessionOpened(session_id, "u", {}, 0.0))
                self.tell("ack", session_id, 0)
            await self.session(session_id, record)
            await self.journal.append(SessionClosed(session_id, "done"))
            self.tell("closed", session_id)
            await self.give(session_id)
            self.tell("handed", session_id)
            await self.journal.compact(0.0, max_bytes=1_000_000)
            record = None

    async def session(self, session_id: str, record: StoredSession | None) -> None:
        calls = list(record.calls) if record else []
        count = length(record) if record else 0
        for turn in range(max(0, len(calls) - 1), TURNS):
            done = calls[turn] if turn < len(calls) else None
            if done is None:
                count += PROMPT
                prompt = tokens(range(count))
                await self.journal.append(CallStarted(session_id, f"{session_id}-{turn}", str(turn), prompt))
                self.tell("ack", session_id, count)
            if done is None or done.cut:
                count = await self.call(session_id, f"{session_id}-{turn}", count)

    async def call(self, session_id: str, call_id: str, count: int) -> int:
        for version in range(DELTAS):
            ids = range(count, count + 1 + version % 5)
            values = logprobs([-float(token % 64) for token in ids])
            await self.journal.append(Delta(call_id, tokens(ids), values, version // 4, "r"))
            count += len(ids)
            self.tell("ack", session_id, count)
        await self.journal.append(CallEnded(call_id, Finish.STOP, {"count": count}))
        self.tell("ended", session_id, call_id)
        return count


def child(folder: Path) -> None:
    with SqliteJournal(folder / "journal.sqlite") as journal:
        (folder / "consumer").mkdir(exist_ok=True)
        asyncio.run(Load(journal, folder / "consumer", sys.stdout.fileno()).run())


def kill_one(folder: Path, rng: random.Random, while_it_starts: bool) -> list[list[str]]:
    """Run a child, kill it at a random instant, and return what it said; its start takes about LONGEST."""
    run = subprocess.Popen([sys.executable, __file__, str(folder)], stdout=subprocess.PIPE)
    assert run.stdout is not None
    pipe = run.stdout.fileno()
    said = b"" if while_it_starts else os.read(pipe, 1 << 16)
    stop = monotonic() + rng.random() * LONGEST
    while (left := stop - monotonic()) > 0:
        if select([pipe], [], [], left)[0]:
            said += os.read(pipe, 1 << 16)
    run.send_signal(signal.SIGKILL)
    said += run.stdout.read()
    assert run.wait() == -signal.SIGKILL, "the child ended by itself"
    run.stdout.close()
    return [line.split() for line in said.decode().splitlines()]


class Books:
    """What the children said, over all rounds, and what the journal must therefore hold."""

    def __init__(self) -> None:
        self.acknowledged: Counter[str] = Counter()
        self.ended: dict[str, set[str]] = {}
        self.closed: set[str] = set()
        self.handed: set[str] = set()
        self.seen: set[str] = set()
        self.tokens = 0

    def hear(self, lines: list[list[str]]) -> None:
        for word, session_id, *rest in lines:
            if word == "ack":
                self.acknowledged[session_id] = max(self.acknowledged[session_id], int(rest[0]))
            elif word == "ended":
                self.ended.setdefault(session_id, set()).add(rest[0])
            else:
                (self.closed if word == "closed" else self.handed).add(session_id)

    def check(self, reader: JournalReader, consumer: Path) -> None:
        reader.check_integrity()
        assert all(reader.stage(session_id) in (None, Stage.HANDED) for session_id in self.handed - self.seen)
        self.seen |= self.handed
        settled: list[str] = []
        for session_id, count in self.acknowledged.items():
            record = reader.read(session_id)
            if record is None or session_id in self.handed:
                kept = consumer / session_id
                assert kept.exists(), f"{session_id}: acknowledged, and neither on record nor handed over"
                assert int(kept.read_text()) >= count
                settled.append(session_id)
                continue
            assert length(record) >= count, f"{session_id}: {count} tokens acknowledged, {length(record)} on record"
            ended = {call.call_id for call in record.calls if not call.cut}
            assert self.ended.get(session_id, set()) <= ended
            assert session_id not in self.closed or record.stage is not Stage.OPEN
        for session_id in settled:  # its consumer has it; the journal answers for it no more
            self.tokens += self.acknowledged.pop(session_id)


def test_killed_at_any_instant_no_acknowledged_token_is_lost(tmp_path: Path) -> None:
    rng, books, reader = random.Random(), Books(), JournalReader(tmp_path / "journal.sqlite")
    for turn in range(ROUNDS):
        books.hear(kill_one(tmp_path, rng, while_it_starts=turn % 4 == 3))
        books.check(reader, tmp_path / "consumer")
    with SqliteJournal(tmp_path / "journal.sqlite") as journal:
        assert len(journal.restore()) <= AGENTS
    assert books.handed and books.tokens > ROUNDS * 50, "the load was too light to mean anything"


if __name__ == "__main__":
    child(Path(sys.argv[1]))
