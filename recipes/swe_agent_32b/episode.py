"""One session: mini-swe-agent works in a task's container; its patch is judged by tests in a second, fresh one.

The task is JSON on standard input (`extra_info`: image, folder, tests, test_patch), the reward goes to reward.json: 1
if the tests pass with the patch, 0 if they do not, or if there is no patch. Runs in the agents' environment and needs
Docker's command line, or one like it (DOCKER=podman). Exits with 1, and no reward, if a container cannot be run.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DOCKER = os.environ.get("DOCKER", "docker")
AGENT_S, JUDGE_S = 2850, 600
LIMITS = ("--memory", "16g", "--cpus", "4", "--pids-limit", "2048")
TESTS_FAILED = 10  # the judge's exit code; Docker's own failures have 125 and more
SETTINGS = {
    "MSWEA_CONFIGURED": "true",  # no questions at the first start
    "MSWEA_SILENT_STARTUP": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would be downloaded
}


def main() -> int:
    task = json.load(sys.stdin)
    info, issue = task["extra_info"], task["prompt"][-1]["content"]
    patch = solve(info, issue)
    reward = judge(info, patch) if patch.strip() else 0.0
    temporary = Path(".reward.json")
    temporary.write_text(json.dumps({"reward": reward, "patch_chars": len(patch)}))
    temporary.replace("reward.json")
    return 0


def solve(info: dict[str, Any], issue: str) -> str:
    """The patch that the agent submits; empty if it submits none in time."""
    container = {
        "environment_class": "docker",
        "executable": DOCKER,
        "image": info["image"],
        "cwd": info["folder"],
        "run_args": ["--rm", *LIMITS],
        "container_timeout": f"{AGENT_S}s",  # a container that a killed agent leaves ends by itself
    }
    Path("container.yaml").write_text(json.dumps({"environment": container}))  # JSON is YAML
    mini = str(Path(sys.executable).with_name("mini"))
    command = [mini, "-c", str(HERE / "mini.yaml"), "-c", "container.yaml", "-o", "trajectory.json", "-t", issue]
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, env=os.environ | SETTINGS, timeout=AGENT_S, check=True)
    except subprocess.TimeoutExpired:
        return ""
    return str(json.loads(Path("trajectory.json").read_text())["info"].get("submission") or "")


def judge(info: dict[str, Any], patch: str) -> float:
    """1.0 if the tests pass in a fresh container with the patch, 0.0 if it does not apply, they fail or take too long.

    Raises subprocess.CalledProcessError if the container cannot be run.
    """
    command = [DOCKER, "run", "--rm", "-i", "--network", "none", *LIMITS, "-w", info["folder"], info["image"]]
    inside = [*command, "timeout", str(JUDGE_S), "bash", "-s"]
    done = subprocess.run(inside, input=judging_script(info, patch), text=True, timeout=JUDGE_S + 120)
    if done.returncode >= 125:  # 124 is `timeout`'s own
        raise subprocess.CalledProcessError(done.returncode, inside)
    return float(done.returncode == 0)


def judging_script(info: dict[str, Any], patch: str) -> str:
    """Applies the agent's patch, then that of the tests over it, and runs the tests."""
    lines = [f"printf '%s\\n' {shlex.quote(patch)} | git apply - || exit {TESTS_FAILED}"]
    if info.get("test_patch"):
        lines.append(f"printf '%s\\n' {shlex.quote(info['test_patch'])} | git apply - || exit {TESTS_FAILED}")
    return "\n".join([*lines, f"( {info['tests']}\n) || exit {TESTS_FAILED}", ""])


if __name__ == "__main__":
    sys.exit(main())
