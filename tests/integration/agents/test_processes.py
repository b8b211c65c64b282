"""However a command ends, no process of it is left; nothing foreign is touched."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from support.agents import ENDPOINT, fifo, limits, line_of, private_tmp, python, ran, running
from support.paths import child_environment

from seamless_verl.agents.command import AgentCommand, run_command
from seamless_verl.agents.outcome import AgentOutcome, AgentStatus
from seamless_verl.agents.processes import end_processes

pytestmark = pytest.mark.integration
S = AgentStatus
# Forks twice with a session of its own each time, so that init adopts it; says its pid once it is a daemon.
DAEMON = """
import os, signal, sys, time
{before}
ready, tell = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        {ignore}
        os.write(tell, str(os.getpid()).encode())
        while True: time.sleep(600)
    os._exit(0)
os.wait()
daemon = os.read(ready, 20).decode()
print(daemon, flush=True)
{after}
"""


def daemon(*, before: str = "", ignore: str = "pass", after: str = "") -> list[str]:
    return python(DAEMON.format(before=before, ignore=ignore, after=after))


IGNORE = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@pytest.mark.parametrize(
    ("after", "status"),
    [
        ("", S.FINISHED),
        ("sys.exit(3)", S.FAILED),
        ("time.sleep(600)", S.TIMED_OUT),
        ("os.kill(os.getpid(), 9)", S.FAILED),
    ],
)
@pytest.mark.parametrize("ignore", ["pass", IGNORE])
def test_a_daemon_that_left_the_group_is_ended(after: str, status: AgentStatus, ignore: str) -> None:
    wall_s = 6.0 if status == S.TIMED_OUT else 20.0
    outcome = ran(daemon(after=after, ignore=ignore), limits=limits(wall_s=wall_s, grace_s=0.1))
    assert outcome.status == status and not running(int(outcome.output))


def test_a_flood_takes_its_daemon_along() -> None:
    flood = "while True: print('x' * 9999)"
    outcome = ran(daemon(after=flood), limits=limits(output_bytes=100_000, tail_bytes=200_000))
    assert outcome.status == S.OUTPUT_LIMIT and not running(int(outcome.output.split()[0]))


def test_children_are_found_by_their_session_or_parent_when_their_environment_is_cleared() -> None:
    code = """
    sleep 600 & echo $!
    env -i sleep 600 & echo $!
    env -i setsid sleep 600 & echo $!
    sleep 0.2
    """
    pids = ran(f"{textwrap.dedent(code)}exec sleep 600", limits=limits(wall_s=4.0)).output.split()
    assert len(pids) == 3 and not any(running(int(pid)) for pid in pids)


def test_one_that_ignores_the_request_to_end_is_killed_after_its_grace() -> None:
    began = time.monotonic()
    outcome = ran("trap '' TERM; echo begun; while :; do sleep 600; done", limits=limits(wall_s=2.0, grace_s=0.3))
    assert (outcome.status, outcome.exit_code) == (S.TIMED_OUT, -9)
    assert 2.3 <= time.monotonic() - began < 6.8


def test_one_that_heeds_it_may_clear_up_and_is_not_waited_for_longer() -> None:
    began = time.monotonic()
    outcome = ran("trap 'echo bye; exit 7' TERM; sleep 600 & wait", limits=limits(wall_s=2.0, grace_s=60.0))
    assert (outcome.status, outcome.exit_code, outcome.output) == (S.TIMED_OUT, 7, "bye\n")
    assert time.monotonic() - began < 11.7


def test_a_stopped_process_and_a_swarm_are_ended_too() -> None:
    swarm = "import os, time\nfor _ in range(5): os.fork()\nprint(os.getpid(), flush=True)\ntime.sleep(600)"
    pids = ran(python(swarm), limits=limits(wall_s=6.0, grace_s=0.2)).output.split()
    assert len(pids) == 32 and not any(running(int(pid)) for pid in pids)
    assert ran("kill -STOP $$", limits=limits(wall_s=2.0, grace_s=0.1)).exit_code == -9


def test_a_neighbour_is_not_touched() -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as neighbour:
        ran("exec sleep 600", limits=limits(wall_s=0.1, grace_s=0.0))
        assert neighbour.poll() is None
        neighbour.kill()


async def test_two_sessions_with_one_id_do_not_end_each_other() -> None:
    async def main() -> list[AgentOutcome]:
        commands = (AgentCommand(text, limits=limits()) for text in ("exit 0", "sleep 0.5; echo whole"))
        return list(await asyncio.gather(*(run_command(command, {}, ENDPOINT) for command in commands)))

    assert (await main())[1].output == "whole\n"


# What a daemon() does next: tells both pids through a named pipe.
TELL = "open('{}', 'w').write(f'{{daemon}} {{os.getpid()}}\\n')\ntime.sleep(600)"


@pytest.mark.parametrize("times", [1, 3])
def test_a_cancellation_clears_everything_up_before_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    tmp, pid_pipe = private_tmp(tmp_path, monkeypatch), fifo(tmp_path / "pid_pipe")

    async def main() -> str:
        command = AgentCommand(daemon(ignore=IGNORE, after=TELL.format(pid_pipe)), limits=limits(grace_s=0.2))
        task = asyncio.create_task(run_command(command, {}, ENDPOINT))
        pids = await line_of(pid_pipe)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.02)
        with pytest.raises(asyncio.CancelledError):
            await task
        return pids

    pids = asyncio.run(main()).split()
    assert len(pids) == 2 and not any(running(int(pid)) for pid in pids) and list(tmp.iterdir()) == []


def test_the_end_of_the_event_loop_is_a_cancellation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp, pid_pipe = private_tmp(tmp_path, monkeypatch), fifo(tmp_path / "pid_pipe")

    async def main() -> int:
        command = AgentCommand(f"trap '' TERM; echo $$ >{pid_pipe}; sleep 600", limits=limits(grace_s=0.1))
        task = asyncio.create_task(run_command(command, {}, ENDPOINT))
        pid = int(await line_of(pid_pipe))
        assert not task.done()
        return pid

    assert not running(asyncio.run(main())) and list(tmp.iterdir()) == []


@pytest.mark.parametrize("moment", [0.0, 0.001, 0.01, 0.03])
def test_a_cancellation_at_the_very_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: float
) -> None:
    tmp = private_tmp(tmp_path, monkeypatch)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run_command(AgentCommand("sleep 600", limits=limits()), {}, ENDPOINT), moment)

    asyncio.run(main())
    assert list(tmp.iterdir()) == [] and mentioned(str(tmp)) == []


def mentioned(text: str) -> list[int]:
    """Running processes that have the text in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and text.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_it_dies_with_us(tmp_path: Path) -> None:
    pid_pipe = fifo(tmp_path / "pid_pipe")
    code = f"""
    import asyncio
    from support.agents import *
    asyncio.run(run_command(AgentCommand("echo $$ >{pid_pipe}; exec sleep 600"), {{}}, ENDPOINT))
    """
    env = os.environ | child_environment() | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=env) as parent:
        handle = os.pidfd_open(int(pid_pipe.read_text()))
        parent.send_signal(signal.SIGKILL)
    assert select.select([handle], [], [], 10)[0] == [handle]
    os.close(handle)


# In a process of its own: threads that earlier tests left would open and close theirs meanwhile.
DESCRIPTORS = """
import os
from support.agents import limits, ran
def opened():
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]  # which has one for itself, until it ends
    return {link: os.readlink(link) for link in links if os.path.lexists(link)}
ran("true")
before = opened()
for command in ("true", "yes", ["no-such-command"]):
    ran(command, limits=limits(output_bytes=10))
assert opened() == before, (opened(), before)
"""


def test_no_descriptor_is_left_open() -> None:
    environment = {**os.environ, **child_environment()}
    ended = subprocess.run([sys.executable, "-c", DESCRIPTORS], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_cancelled_commands_leave_nothing_and_those_beside_them_their_outcomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp, pid_pipe = private_tmp(tmp_path, monkeypatch), fifo(tmp_path / "pid_pipe")

    async def main() -> tuple[list[AgentOutcome | BaseException], int]:
        texts = ["exit 0", f"echo $$ >{pid_pipe}; exec sleep 600", "exit 1", "exec sleep 600"]
        commands = [AgentCommand(text, limits=limits()) for text in texts]
        tasks = [asyncio.create_task(run_command(command, {}, ENDPOINT)) for command in commands]
        pid = int(await line_of(pid_pipe))
        await asyncio.wait([tasks[0], tasks[2]])
        for task in tasks:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True), pid

    ended, pid = asyncio.run(main())
    statuses = [one.status if isinstance(one, AgentOutcome) else type(one) for one in ended]
    assert statuses == [S.FINISHED, asyncio.CancelledError, S.FAILED, asyncio.CancelledError]
    assert not running(pid) and list(tmp.iterdir()) == []


def test_a_process_of_an_earlier_time_is_never_taken_for_one_of_ours() -> None:
    """The mark alone decides for strangers: a younger process without it, in another session, lives."""
    with (
        subprocess.Popen(["sleep", "600"], start_new_session=True) as leader,
        subprocess.Popen(["sleep", "600"], start_new_session=True) as younger,
    ):
        assert end_processes(leader.pid, b"MARK=none", 5.0) == []
        assert younger.poll() is None and not running(leader.pid)
        younger.kill()
