"""Environments with reset and step: an episode with scripted replies, and two steps of training."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from support.paths import RECIPES, ROOT
from support.recipes import load, train

from seamless_verl.agents.endpoint import Endpoint
from seamless_verl.agents.failures import ToolFailedError

pytestmark = pytest.mark.integration
RECIPE = RECIPES / "environments"
STEPS, PROMPTS, SAMPLES = 2, 2, 4
[environments] = load(RECIPE, "environments")
Replies = Callable[..., Endpoint]
SERVER = """
import random, sys, uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Say(Action):
    number: str

class Seen(Observation):
    text: str = ""

class Numbers(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State(step_count=0)

    def reset(self, seed=None, **more):
        self.number, self.left = random.Random(seed).randrange(10), 3
        return Seen(text=f"Say {self.number}", reward=0.0, done=False)

    def step(self, action, **more):
        self.left -= 1
        return Seen(text=f"Say {self.number}", reward=float(action.number == str(self.number)), done=not self.left)

uvicorn.run(create_app(Numbers, Say, Seen, max_concurrent_envs=32), port=int(sys.argv[1]), log_level="critical")
"""


@pytest.fixture
def replying() -> Iterator[Replies]:
    """An endpoint that gives these replies, then a 403 as for a session without turns."""
    servers: list[HTTPServer] = []

    def start(*replies: str, seen: list[str]) -> Endpoint:
        rest = list(replies)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                seen.append(body["messages"][-1]["content"])
                message = {"role": "assistant", "content": rest.pop(0)} if rest else None
                choice = {"index": 0, "finish_reason": "stop", "message": message}
                good = {"id": "1", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
                answer = good if message else {"error": {"message": "no turns", "code": "quota_exceeded"}}
                text = json.dumps(answer).encode()
                self.send_response(200 if message else 403)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *words: object) -> None: ...

        servers.append(server := HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return Endpoint(f"http://127.0.0.1:{server.server_port}", "key", "id")

    yield start
    for server in servers:
        server.shutdown()


async def test_an_episode_has_the_sum_of_its_rewards(replying: Replies) -> None:
    async def step(text: str) -> tuple[str, float, bool]:
        if not text.isdecimal():
            raise environments.NoActionError("No number.")
        return f"{text}!", 10 / int(text), text == "5"

    seen = list[str]()
    assert await environments.play(replying("2", "two", "5", "1", seen=seen), "Begin", step) == 7.0
    assert seen == ["Begin", "2!", "No number."]
    assert await environments.play(replying("4", seen=seen), "Begin", step) == 2.5, "it has no turns left"
    with pytest.raises(ToolFailedError, match="ZeroDivisionError"):
        await environments.play(replying("0", seen=seen), "Begin", step)


@pytest.mark.long
def test_an_episode_of_gymnasium(replying: Replies) -> None:
    seen, env = list[str](), os.environ | {"GYM_ENV": "FrozenLake-v1", "GYM_KWARGS": '{"is_slippery": false}'}
    endpoint = replying("down: 1", "1", "north", "2", "7", "1", "I go 2", "2", "0", seen=seen)
    code = (
        "import asyncio, sys; from environments import gymnasium; from seamless_verl.agents.endpoint import Endpoint\n"
        "print(asyncio.run(gymnasium({'extra_info': {'index': 1}}, Endpoint(sys.argv[1], 'key', 'id'))))"
    )
    words, paths = [packages() / "bin" / "python", "-c", code, endpoint.base_url], f"{ROOT}{os.pathsep}{RECIPE}"
    run = subprocess.run(words, env=env | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True, check=True)
    assert run.stdout == "1.0\n"
    assert len(seen) == 8 and seen[3] == seen[5] == "This is no action of Discrete(4)." and "(Down)" in seen[1]
    failed = subprocess.run(
        words, env=env | {"PYTHONPATH": paths, "GYM_ENV": "No-v1"}, stderr=subprocess.PIPE, text=True
    )
    assert "ToolFailedError" in failed.stderr and "NameNotFound" in failed.stderr


@pytest.mark.parametrize(("name", "value"), [("TURNS", "x"), ("TURNS", "0"), ("KIND", "gym")])
def test_settings_are_refused_before_the_run(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert environments.main() == 2
    assert capsys.readouterr().err.startswith(f"{name}={value!r}: ")


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"GYM_ENV": "No-v1"}, "GYM_ENV='No-v1'"),
        ({"GYM_KWARGS": "{is_slippery: 0}"}, "GYM_KWARGS='{is_slippery: 0}'"),
        ({"GYM_KWARGS": "[1]"}, "GYM_KWARGS='[1]'"),
        ({"KIND": "openenv"}, "OPENENV_URL=None"),
        ({"KIND": "openenv", "OPENENV_URL": "http://127.0.0.1:9"}, "OPENENV_URL='http://127.0.0.1:9'"),
        ({}, ""),
    ],
)
def test_an_environment_that_cannot_begin_is_refused_before_the_run(given: dict[str, str], says: str) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "GYM_ENV": "FrozenLake-v1"} | given
    words = [packages() / "bin" / "python", RECIPE / "environments.py"]
    run = subprocess.run(words, env=env, stderr=subprocess.PIPE, text=True)
    assert run.returncode == (2 if says else 0), run.stderr
    assert says in run.stderr and "Traceback" not in run.stderr


def packages() -> Path:
    """The environment of packages, made as run.sh makes it where it is missing."""
    folder = Path(os.environ.get("PACKAGES") or RECIPES.parent / "runs" / "environments" / "packages")
    if not (folder / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "-r", RECIPE / "requirements.txt"]
        subprocess.run(install, check=True)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gymnasium", "openenv"])
def test_two_steps_on_episodes(kind: str, tmp_path: Path) -> None:
    python = packages() / "bin" / "python"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([python, "-c", SERVER, str(port)]) if kind == "openenv" else None
    try:
        until = time.monotonic() + 60
        while server is not None and time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        run = train(
            "environments",
            tmp_path,
            f"data.train_batch_size={PROMPTS}",
            f"actor_rollout_ref.rollout.n={SAMPLES}",
            "data.max_response_length=64",
            f"trainer.total_training_steps={STEPS}",
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",
            "trainer.save_freq=-1",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            KIND=kind,
            PACKAGES=str(packages()),
            OPENENV_URL=f"http://127.0.0.1:{port}",
            OPENENV_FIELD="number",
            EPISODES="16",
            VAL="2",
            TURNS="3",
        )
    finally:
        if server is not None:
            server.kill()
            server.wait()
    run.check_counts(STEPS)
    played = [record for record in run.records() if record.reason == "finished"]
    assert len(played) >= STEPS * PROMPTS * SAMPLES
    assert max(len(record.calls) for record in played) == 3
