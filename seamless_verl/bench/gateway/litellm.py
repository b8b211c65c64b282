"""The LiteLLM proxy, as its own documentation starts it, in an environment of its own.

`prepare` makes that environment once, under the cache folder; nothing of it enters ours.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seamless_verl.bench.gateway.pace import MODEL
from seamless_verl.bench.gateway.processes import started

VERSION = "1.106.0"
START_S, LOOK_S = 120.0, 0.2
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False", "LITELLM_LOG": "ERROR"}


def cache() -> Path:
    """Where what a run needs is kept: SEAMLESS_CACHE, or the user's cache folder."""
    base = os.environ.get("SEAMLESS_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(base) / "seamless_verl"


def prepare() -> Path:
    """Makes the environment if it is not there; returns the proxy's command.

    Raises:
        subprocess.CalledProcessError: pip could not install it; what it said is on stderr.
    """
    folder = cache() / f"litellm-{VERSION}"
    command, complete = folder / "bin" / "litellm", folder / ".complete"
    if not complete.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", f"litellm[proxy]=={VERSION}"]
        subprocess.run(pip, check=True)
        complete.touch()
    return command


@contextmanager
def proxy(command: Path, folder: Path, engine_port: int, *, key: str, pinned: set[int]) -> Iterator[tuple[int, int]]:
    """A proxy of one worker before the engine's OpenAI face, without database or logs; gives its port and pid.

    It checks one key, without which it does not start, as our gateway checks its sessions'.

    Raises:
        RuntimeError: it does not listen.
    """
    params = {"model": f"openai/{MODEL}", "api_base": f"http://127.0.0.1:{engine_port}/v1", "api_key": "none"}
    config = folder / "litellm.json"  # which is YAML, too
    config.write_text(json.dumps({"model_list": [{"model_name": MODEL, "litellm_params": params}]}))
    port = _free_port()
    told = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    env = OFFLINE | {"LITELLM_MASTER_KEY": key}
    with (
        (folder / "litellm.log").open("w") as log,
        started([str(command), *told], pinned=pinned, env=env, log=log) as process,
    ):
        until = time.monotonic() + START_S
        while not _listens(port):  # which is all that it lets anybody know
            if _ended(process, LOOK_S) or time.monotonic() > until:
                raise RuntimeError(f"the LiteLLM proxy does not listen: {Path(log.name).read_text()[-2000:]}")
        yield port, process.pid


def _ended(process: subprocess.Popen[str], within_s: float) -> bool:
    """Whether it has ended, or does so within that time."""
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
