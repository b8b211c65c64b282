"""The environments of tasks: containers where docker or podman runs, else a root of their own on this system.

SANDBOX chooses: `docker`, `podman` or `plain`; without it the first that works here. Each has the agent's command and
then the verifier's run in it, with no process of the agent's left between the two.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from harbor_task import HarborTask, plain_steps

from seamless_verl.agents.command import OURS, AgentCommand
from seamless_verl.agents.endpoint import MODEL_VARIABLES
from seamless_verl.agents.failures import ToolFailedError
from seamless_verl.agents.limits import CommandLimits
from seamless_verl.errors import ConfigError

logger = logging.getLogger(__name__)
HERE = Path(__file__).resolve().parent
SYSTEM = {"bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "usr"}  # enter.sh shows them
USERS, FIRST_USER = 4000, 61184  # users of the agents, of the range that systemd gives to services
PROCESSES = 512  # of a session, where it has a user of its own
PROC = ("mount", "-t", "proc", "proc", "/proc")  # what enter.sh needs most
RUNTIMES = ("HOME", "XDG_RUNTIME_DIR", "DOCKER_HOST", "DOCKER_CONTEXT", "CONTAINER_HOST")  # by which theirs is found
users = itertools.count(os.getpid() * 64)


@dataclass(frozen=True)
class Inside(AgentCommand):
    """A command line for a shell in a sandbox; raises ConfigError for variables that are the session's."""

    sandbox: Plain | Container | None = None

    def arguments(self, task: Mapping[str, Any]) -> list[str]:
        assert self.sandbox is not None
        variables = sorted(OURS - {"HOME", "TMPDIR"} | MODEL_VARIABLES.keys() | self.env.keys())
        return [*self.sandbox.prefix(variables), *super().arguments(task)]


@cache
def kind() -> str:
    """What runs the sandboxes here; raises ConfigError if nothing does."""
    asked = os.environ.get("SANDBOX") or None
    tests = {"docker": ["docker", "info"], "podman": ["podman", "info"], "plain": [*unshare(), *PROC]}
    if asked not in (None, *tests):
        raise ConfigError("SANDBOX", asked, "is no sandbox", f"Name one of {', '.join(tests)}")
    for name in tests if asked is None else [asked]:
        if shutil.which(tests[name][0]) and not subprocess.run(tests[name], capture_output=True).returncode:
            return name
    raise ConfigError("SANDBOX", asked, "does not work here", "It takes docker, podman, or rights to `unshare --mount`")


def unshare() -> list[str]:
    """A command ends with all processes that it left: they are in a namespace of which it is the first."""
    own = ["--user", "--map-root-user"] if os.geteuid() else []
    return ["unshare", *own, "--mount", "--pid", "--fork", "--kill-child"]


def limits() -> CommandLimits:
    """Of each process; a container has those of its task's `memory_mb`, and of CONTAINER_OPTIONS."""
    if kind() != "plain":
        return CommandLimits()
    processes = None if os.geteuid() else PROCESSES
    return CommandLimits(address_space_bytes=32 << 30, file_bytes=4 << 30, open_files=4096, processes=processes)


@asynccontextmanager
async def sandbox_of(task: HarborTask) -> AsyncIterator[Plain | Container]:
    """A new one; raises ConfigError where the task cannot run in it here, ToolFailedError where it failed."""
    if kind() == "plain":
        with tempfile.TemporaryDirectory(prefix="harbor-", ignore_cleanup_errors=True) as folder:
            yield await asyncio.to_thread(Plain, task, Path(folder))
        return
    container = Container(task, f"seamless-harbor-{os.getpid()}-{next(users)}")
    try:
        await container.start()
        yield container
    finally:
        try:
            await asyncio.shield(call(kind(), "rm", "--force", container.name))
        except ToolFailedError as error:  # what the task came to stands
            logger.warning("%s was not removed: %s", container.name, error)


class Plain:
    """A root with this system's programs, in which the task's folders are new ones."""

    def __init__(self, task: HarborTask, folder: Path) -> None:
        self.task, self.own = task, folder / "own"
        self.user = 0 if os.geteuid() else FIRST_USER + next(users) % USERS
        self.env, self.workdir = dict[str, str](), Path("/")
        folder.chmod(0o755)
        for name in ("tmp/home", "tests", "logs/agent", "logs/verifier", "logs/artifacts", "../root"):
            (self.own / name).mkdir(parents=True)
        for step, words in plain_steps(task):
            if step == "ENV":
                pairs = words if "=" in words[0] else [f"{words[0]}={' '.join(words[1:])}"]
                self.env |= {name: value for name, _, value in (pair.partition("=") for pair in pairs)}
            elif step == "WORKDIR":
                self.workdir /= words[0]
                self.place(self.workdir).mkdir(parents=True, exist_ok=True)
            else:
                self.copy(words[:-1], words[-1])
        self.env |= task.env
        self.workdir /= task.workdir or ""
        self.place(self.workdir).mkdir(parents=True, exist_ok=True)

    def place(self, path: Path) -> Path:
        """Where a path of the sandbox is in this system; raises ConfigError for one of the system's own folders."""
        path = Path(os.path.normpath(path))
        if len(path.parts) < 2 or path.parts[1] in SYSTEM:
            reason = f"writes to {path}, which is this system's without a container"
            raise ConfigError("task", str(self.task.folder), reason, "Give it a WORKDIR such as /app, or containers")
        return self.own / path.relative_to("/")

    def copy(self, sources: list[str], target: str) -> None:
        folder, into = self.task.dockerfile.parent, self.place(self.workdir / target)
        names = [os.path.normpath(source.lstrip("/") or ".") for source in sources]
        found = [path for name in names for path in ([folder] if name == "." else sorted(folder.glob(name)))]
        if not found or any(not path.resolve().is_relative_to(folder.resolve()) for path in found):
            reason = f"its Dockerfile copies {' '.join(sources)}, which is not in environment/"
            raise ConfigError("task", str(self.task.folder), reason, "Correct it, or take the task out")
        for path in found:
            if path.is_dir():
                shutil.copytree(path, into, symlinks=True, dirs_exist_ok=True)
            else:
                one = into / path.name if target.endswith(("/", ".")) or len(found) > 1 or into.is_dir() else into
                one.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, one)

    def prefix(self, variables: Iterable[str]) -> tuple[str, ...]:
        """The words before a command that runs in it; it has the variables of the first one."""
        more = os.environ.get("SANDBOX_PATHS", "").split(":")
        seen = ":".join(filter(None, (sys.prefix, sys.base_prefix, str(HERE / "agent.py"), *more)))
        return *unshare(), str(HERE / "enter.sh"), str(self.own), seen, str(self.user), str(self.workdir)

    async def add_tests(self) -> None:
        """Removes the agent's rewards, and puts the tests where they belong."""

        def add() -> None:
            for name in ("tests", "logs/verifier"):
                path = self.own / name
                if path.is_symlink() or not path.is_dir():
                    path.unlink(missing_ok=True)
                else:
                    shutil.rmtree(path)
            shutil.copytree(self.task.folder / "tests", self.own / "tests")
            (self.own / "tests/test.sh").chmod(0o755)
            (self.own / "logs/verifier").mkdir(parents=True)

        await asyncio.to_thread(add)

    async def read(self, path: str) -> bytes | None:
        """A file of it, at most 1 MiB; None where there is none."""
        file = self.own / path.lstrip("/")
        if not file.is_file() or file.resolve() != self.own.resolve() / path.lstrip("/"):
            return None  # a link may lead out of the sandbox
        with file.open("rb") as opened:
            return opened.read(1 << 20)


class Container:
    """A container of the task's image, which runs until it is removed."""

    def __init__(self, task: HarborTask, name: str) -> None:
        self.task, self.name, self.env = task, name, task.env

    async def start(self) -> None:
        """Of its Dockerfile the image is built; the runtime's own cache makes that short from the second time on."""
        image = self.task.image
        if image is None:
            built = await call(kind(), "build", "--quiet", str(self.task.dockerfile.parent), limit_s=self.task.build_s)
            image = built.decode().strip()
        options = shlex.split(os.environ.get("CONTAINER_OPTIONS", "--network host"))
        memory = [f"--memory={self.task.memory_mb}m"] if self.task.memory_mb else []
        start = ["run", "--detach", "--name", self.name, *memory, *options, "--entrypoint", "sleep", image, "infinity"]
        await call(kind(), *start)
        await self.shell("mkdir -p /logs/agent /logs/verifier /logs/artifacts")

    def prefix(self, variables: Iterable[str]) -> tuple[str, ...]:
        """The words before a command that runs in it, with these variables of the first one's environment."""
        flags = [word for name in variables for word in ("--env", name)]
        workdir = ["--workdir", self.task.workdir] if self.task.workdir else []
        own = [f"{name}={os.environ[name]}" for name in RUNTIMES if name in os.environ]
        return "env", *own, kind(), "exec", *flags, *workdir, self.name

    async def add_tests(self) -> None:
        """Kills what the agent left, which outlives its `exec`, and removes its rewards before the tests are there."""
        await self.shell("kill -9 -1; rm -rf /tests /logs/verifier && mkdir -p /logs/verifier")
        await call(kind(), "cp", str(self.task.folder / "tests"), f"{self.name}:/tests")
        await self.shell("chmod +x /tests/test.sh")

    async def read(self, path: str) -> bytes | None:
        return await self.shell(f"if [ -f {path} ]; then head -c 1048576 {path}; fi") or None

    async def shell(self, line: str) -> bytes:
        return await call(kind(), "exec", "--user", "root", self.name, "sh", "-c", line)


async def call(*words: str, limit_s: float = 120.0) -> bytes:
    """The output of a command of the container runtime; raises ToolFailedError with its last words."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(limit_s):
            out, error = await process.communicate()
    except TimeoutError:
        raise ToolFailedError(f"{shlex.join(words[:2])}: not done in {limit_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise ToolFailedError(f"{shlex.join(words[:2])}: {error.decode(errors='replace')[-1000:]}")
    return out
