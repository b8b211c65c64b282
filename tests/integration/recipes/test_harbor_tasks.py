"""Tasks in Harbor's layout: how a trial ends, with this system as the sandbox, and two steps of training on three."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
from support.paths import RECIPES
from support.recipes import load, train

from seamless_verl.agents.endpoint import Endpoint
from seamless_verl.agents.outcome import AgentOutcome, AgentStatus
from seamless_verl.client.runner import TaskRefusedError
from seamless_verl.errors import ConfigError

RECIPE = RECIPES / "harbor_tasks"
_, sandbox, trial, data = load(RECIPE, "harbor_task", "sandbox", "trial", "data")
STEPS, PROMPTS, SAMPLES = 2, 3, 2
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        subprocess.run([*sandbox.unshare(), "mount", "-t", "tmpfs", "x", "/mnt"]).returncode != 0,
        reason="no mount namespace can be had here",
    ),
]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SANDBOX", "plain")
    sandbox.kind.cache_clear()
    yield
    sandbox.kind.cache_clear()


@pytest.fixture
def posted() -> Iterator[tuple[str, list[bytes]]]:
    """The address of a gateway that takes rewards, and what was posted."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()


async def tried(
    folder: Path, agent: str, monkeypatch: pytest.MonkeyPatch, address: str = "http://127.0.0.1:9"
) -> AgentOutcome:
    async def paused() -> float:
        return 0.0

    monkeypatch.setattr(trial, "AGENT", agent)
    return await trial.run({"extra_info": {"folder": str(folder)}}, Endpoint(address, "key", "id"), 120.0, paused)


def changed(name: str, folder: Path, **files: str) -> Path:
    """A copy of a task with other files, `/` in their names as `__`."""
    copy = folder / name
    shutil.copytree(RECIPE / "tasks" / name, copy)
    for file, text in files.items():
        place = copy / {"toml": "task.toml", "dockerfile": "environment/Dockerfile", "test": "tests/test.sh"}[file]
        place.write_text(text)
    return copy


@pytest.mark.parametrize("name", ["greeting", "total", "sorted_words"])
async def test_the_verdict_is_the_reward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RECIPE / "tasks" / name
    solved = await tried(
        folder, (folder / "solution" / "solve.sh").read_text().replace("{", "{{").replace("}", "}}"), monkeypatch
    )
    assert (solved.status, solved.reward) == (AgentStatus.FINISHED, 1.0), solved
    idle = await tried(folder, "true", monkeypatch)
    assert (idle.status, idle.reward) == (AgentStatus.FINISHED, 0.0), idle


async def test_the_agent_has_the_instruction_and_the_session_and_no_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = (
        "echo {question}; echo $OPENAI_BASE_URL $LC_ALL; pwd; id -u; ls / /tests /logs /work /root 2>&1; "
        f"cat {RECIPE}/tasks/total/tests/total.txt; touch /usr/x /etc/x; exit 75"
    )
    ended = await tried(RECIPE / "tasks" / "sorted_words", seen, monkeypatch)
    assert ended.status is AgentStatus.TOOL_FAILED
    assert "Sort the words" in ended.output and "http://127.0.0.1:9/v1 C\n/app\n" in ended.output
    assert "test.sh" not in ended.output and "42" not in ended.output.splitlines()
    if os.geteuid() == 0:
        assert ended.output.count("Permission denied") >= 2, ended.output


async def test_no_process_of_an_agent_outlives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one without its variables, session and parent either, which would write a verdict of its own."""
    cheat = "while :; do echo 1 >/logs/verifier/reward.txt; sleep 0.01; done"
    left = f"/usr/bin/env -i /usr/bin/setsid /bin/sh -c '{cheat}' >/dev/null 2>&1 & sleep 0.3"
    ended = await tried(RECIPE / "tasks" / "greeting", left, monkeypatch)
    alive = [one for one in psutil.process_iter(["cmdline"]) if cheat in " ".join(one.info["cmdline"] or [])]
    for one in alive:
        one.kill()
    assert (ended.status, ended.reward, alive) == (AgentStatus.FINISHED, 0.0, [])


async def test_an_agent_cannot_hinder_its_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = await tried(RECIPE / "tasks" / "greeting", "rm -r /logs/verifier; echo 1 >/logs/verifier", monkeypatch)
    assert (ended.status, ended.reward) == (AgentStatus.FINISHED, 0.0), ended


async def test_a_verdict_that_the_gateway_does_not_take_is_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the agent has posted one: here nobody listens."""
    ended = await tried(RECIPE / "tasks" / "greeting", "exit 3", monkeypatch)
    assert ended.status is AgentStatus.TOOL_FAILED and "the verdict was not taken" in ended.error


async def test_an_agent_out_of_time_is_judged_by_what_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, posted: tuple[str, list[bytes]]
) -> None:
    task = changed("greeting", tmp_path, toml="[agent]\ntimeout_sec = 1\n[verifier]\ntimeout_sec = 20\n")
    ended = await tried(task, "echo hello >hello.txt; sleep 60", monkeypatch, posted[0])
    assert (ended.status, posted[1]) == (AgentStatus.TIMED_OUT, [b'{"reward":1.0}'])
    assert ended.duration_s < 20


async def test_a_crash_is_the_agents_own(monkeypatch: pytest.MonkeyPatch, posted: tuple[str, list[bytes]]) -> None:
    ended = await tried(RECIPE / "tasks" / "greeting", "exit 3", monkeypatch, posted[0])
    assert (ended.status, ended.reward, ended.exit_code) == (AgentStatus.FAILED, None, 3)
    missing = await tried(RECIPE / "tasks" / "greeting", "/no/such/agent", monkeypatch)
    assert missing.status is AgentStatus.TOOL_FAILED and "/no/such/agent" in missing.error


@pytest.mark.parametrize(
    ("test", "says"),
    [
        ("#!/bin/sh\nexit 3\n", "no reward by its verifier, exit code 3"),
        ("#!/bin/sh\n:\n", "no reward by its verifier"),
        ("#!/bin/sh\necho nan >/logs/verifier/reward.txt\n", "no finite number"),
        ("#!/bin/sh\necho >/logs/verifier/reward.txt\n", "could not convert"),
        ("#!/bin/sh\necho '{}' >/logs/verifier/reward.json\n", "needs the key 'reward'"),
        ("#!/bin/sh\nln -s /tests/secret /logs/verifier/reward.txt; echo 1 >/tests/secret\n", "no reward"),
        ("#!/bin/sh\nsleep 60\n", "its 1 s are over"),
    ],
)
async def test_a_verifier_that_fails_is_no_zero(
    test: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = "1" if "sleep" in test else "20"
    task = changed("greeting", tmp_path, test=test, toml=f"[verifier]\ntimeout_sec = {limit}\n")
    cheats = "echo 1 >/logs/verifier/reward.txt; ln -sf /usr /logs/agent/x"
    ended = await tried(task, cheats, monkeypatch)
    assert (ended.status, ended.reward) == (AgentStatus.TOOL_FAILED, None)
    assert says in ended.error


async def test_what_needs_a_container_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = changed("total", tmp_path, dockerfile="FROM debian\nRUN apt-get update && \\\n  apt-get install gcc\n")
    with pytest.raises(TaskRefusedError, match=r"total.*RUN apt-get.*takes a container"):
        await tried(task, "true", monkeypatch)


DOCKER = """#!/bin/sh
echo "$*" >>"$0.log"
case "$*" in *fails*) exit 125 ;; *build*) echo an_image ;; *reward.txt*) echo 0.5 ;; esac
"""


async def test_the_commands_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for docker, which runs nothing, is asked what a container needs, in its order."""
    docker = tmp_path / "docker"
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SANDBOX", "docker")
    task = changed("greeting", tmp_path, dockerfile="FROM debian\nRUN apt-get install gcc\n")
    ended = await tried(task, "solve {question}", monkeypatch)
    assert (ended.status, ended.reward) == (AgentStatus.FINISHED, 0.5), ended
    failed = await tried(task, "fails", monkeypatch)
    assert failed.status is AgentStatus.TOOL_FAILED
    lines = (tmp_path / "docker.log").read_text().splitlines()
    verbs = ["info", "build", "run", "exec", "exec", "exec", "cp", "exec", "exec", "exec", "exec", "rm"]
    assert [line.split()[0] for line in lines[: len(verbs)]] == verbs
    assert "--env OPENAI_API_KEY" in lines[4] and lines[4].endswith(
        "solve 'Write the word hello into the file hello.txt.'"
    )
    assert "kill -9 -1" in lines[5] and lines[8].endswith("/bin/sh -c /tests/test.sh") and lines[-1].startswith("rm ")


def test_tasks_are_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder with a task"):
        data.tasks_of(tmp_path, 100.0)
    changed("greeting", tmp_path, dockerfile="FROM debian\nWORKDIR /usr/src\n")
    with pytest.raises(ConfigError, match=r"/usr/src.*this system's"):
        data.tasks_of(tmp_path, 100.0)
    (tmp_path / "greeting" / "environment" / "Dockerfile").write_text("FROM debian\nWORKDIR /app\nENV HOME=/root\n")
    with pytest.raises(ConfigError, match=r"HOME.*is set for each session"):
        data.tasks_of(tmp_path, 100.0)
    with pytest.raises(ConfigError, match="Set TIME_LIMIT_S=90"):
        data.tasks_of(tmp_path, 60.0)
    (tmp_path / "greeting" / "environment" / "Dockerfile").write_text(
        "FROM debian\nCOPY . /app\nWORKDIR /app/Dockerfile\n"
    )
    with pytest.raises(ConfigError, match=r"its environment cannot be made: .*File exists.*/app/Dockerfile"):
        data.tasks_of(tmp_path, 1000.0)
    (tmp_path / "greeting" / "task.toml").write_text("[[steps]]\nname = 'one'\n[environment]\ngpus = 1\n")
    with pytest.raises(ConfigError, match="needs GPUs, several steps"):
        data.tasks_of(tmp_path, 1000.0)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"toml": 'agent = "x"'}, r"greeting.*\$\.agent"),
        ({"toml": '[verifier]\ntimeout_sec = "60"'}, r"greeting.*\$\.verifier\.timeout_sec"),
        ({"toml": "[environment]\nenv = [1]"}, r"greeting.*\$\.environment\.env"),
        ({"dockerfile": "FROM debian\nENV MSG=don't\n"}, "greeting.*ENV MSG=don't"),
        ({"dockerfile": "FROM debian\nENV\n"}, "greeting.*`ENV`"),
    ],
)
def test_a_malformed_task_is_refused_by_name(files: dict[str, str], says: str, tmp_path: Path) -> None:
    changed("greeting", tmp_path, **files)
    with pytest.raises(ConfigError, match=says):
        data.tasks_of(tmp_path, 1000.0)


def test_a_sandbox_that_does_not_work_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (enter := tmp_path / "enter.sh").write_text("#!/bin/sh\necho no groups >&2\nexit 125\n")
    enter.chmod(0o755)
    monkeypatch.setattr(sandbox, "HERE", tmp_path)
    changed("greeting", tmp_path)
    with pytest.raises(ConfigError, match=r"its environment cannot be made: .*no groups"):
        data.tasks_of(tmp_path, 1000.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="all the others are tests of it, where the tests are not run by root")
def test_a_plain_sandbox_of_a_user_who_is_not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *sandbox.unshare()]
    if subprocess.run([*user, *sandbox.PROC]).returncode:
        pytest.skip("no user namespace can be had here")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        for name in ("own/app", "own/tmp/home", "root"):
            Path(folder, name).mkdir(parents=True)
        shutil.copy(RECIPE / "enter.sh", folder)
        subprocess.run(["chown", "-R", "65534:65534", folder], check=True)
        enter = [f"{folder}/enter.sh", f"{folder}/own", "", "0", "/app"]
        work = "pwd; echo done >left; touch /usr/x"
        run = subprocess.run([*user, *enter, "sh", "-c", work], capture_output=True, text=True)
        assert run.stdout == "/app\n" and "Permission denied" in run.stderr, run.stderr
        assert Path(folder, "own/app/left").read_text() == "done\n"


def test_a_runner_without_slots_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["trial.py", "--connect", "http://127.0.0.1:9", "--slots", "0"])
    monkeypatch.setenv("SEAMLESS_RUNNER_KEY", "key")
    assert trial.main() == 2
    assert capsys.readouterr().err.startswith("--slots=0: ")


@pytest.mark.long
def test_two_steps_on_three_tasks(tmp_path: Path) -> None:
    steps = (f"trainer.total_training_steps={STEPS}", "trainer.test_freq=-1", "trainer.val_before_train=false")
    run = train("harbor_tasks", tmp_path, *steps, f"actor_rollout_ref.rollout.n={SAMPLES}", "trainer.save_freq=-1")
    run.check_counts(STEPS)
    judged = [record for record in run.records() if record.reason in ("finished", "limit_reached")]
    assert len(judged) >= STEPS * PROMPTS * SAMPLES
    assert all(0 <= record.handed["rewards"]["reward"] <= 1 for record in judged)
    assert max(len(record.calls) for record in judged) > 1, "an agent sees what its command printed"
