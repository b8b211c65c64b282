"""scripts/lib/environment.sh: what it refuses before it installs anything, and where it finds torch and Python.

Python, pip and uv are stubs here, which write down their calls; a real installation takes minutes.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.integration
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="any other is refused for itself")
TORCH = "torch==2.13.0+cpu"
# As python3.11, as uv, and in the environments that it makes. $HAS_TORCH: which of the three ways finds torch.
STUB = """#!/bin/bash
echo "${0#$HOME/} $*" >>"$HOME/calls"
self="$(basename "$0")"
case "$*" in
  "-c "*) [ "$0" != "$HOME/bin/$self" ] || [ -n "$HAS_PYTHON" ] ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/bin/activate" ;;
  "-m pip install --quiet uv"*) cp "$0" "$(dirname "$0")/uv" ;;
  "python install"*) mkdir -p "$UV_PYTHON_INSTALL_DIR" && cp "$0" "$UV_PYTHON_INSTALL_DIR/python3.11" ;;
  "python find"*) echo "$UV_PYTHON_INSTALL_DIR/python3.11" ;;
  *"--torch-backend cpu torch=="*) [ "$HAS_TORCH" = index ] ;;
  *"--no-deps torch=="*)
    [ "$HAS_TORCH" != interrupted ] || kill -INT "$PPID"
    [ "$HAS_TORCH" = "$self" ] || { echo "$self has no torch"; exit 1; } ;;
esac
"""


def check_machine(processor: Path) -> subprocess.CompletedProcess[str]:
    script = f". '{ROOT}/scripts/lib/environment.sh'; check_machine '{processor}'"
    return subprocess.run(["bash", "-euc", script], capture_output=True, text=True, timeout=30)


@on_x86
def test_a_processor_without_the_instructions_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("flags : sse2 avx\n")
    refused = check_machine(file)
    assert refused.returncode == 2 and refused.stderr.startswith(f"{file}: the processor has no AVX2")
    file.write_text("flags : sse2 avx avx2 fma\n")
    warned = check_machine(file)
    assert warned.returncode == 0 and "no AVX-512" in warned.stderr
    file.write_text("flags : sse2 avx avx2 avx512f\n")
    taken = check_machine(file)
    assert (taken.returncode, taken.stderr) == (0, "")


def test_another_kind_of_machine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "uname").write_text("#!/bin/sh\necho Darwin arm64\n")
    (tmp_path / "uname").chmod(0o755)
    script = f"PATH='{tmp_path}':$PATH; . '{ROOT}/scripts/lib/environment.sh'; check_machine"
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and done.stderr.startswith("Darwin arm64: the lock file is for Linux on x86_64")


@dataclass(frozen=True)
class Machine:
    """A checkout without environments, and commands that are stubs; everything is in its HOME."""

    home: Path

    def make(self, **env: str) -> subprocess.CompletedProcess[str]:
        library = self.home / "checkout/scripts/lib/environment.sh"
        script = f"set -euo pipefail; . '{library}'; ensure_environment; echo $PYTHON"
        kept = {"PATH": f"{self.home}/bin:/usr/bin:/bin", "HOME": str(self.home), "HAS_PYTHON": "1", "HAS_TORCH": ""}
        command = [
            "env",
            "--default-signal=INT",
            "bash",
            "-c",
            script,
        ]  # tests in the background ignore it, as a trap then
        return subprocess.run(command, env=kept | env, capture_output=True, text=True, timeout=60)

    def calls(self) -> list[str]:
        return (self.home / "calls").read_text().replace(f"{self.home}/", "").splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    checkout, commands = tmp_path / "checkout", tmp_path / "bin"
    shutil.copytree(ROOT / "scripts/lib", checkout / "scripts/lib")
    shutil.copytree(ROOT / "requirements", checkout / "requirements")
    shutil.copy(ROOT / "setup.py", checkout)
    commands.mkdir()
    for name in ("python3.11", "python3", "python"):
        (commands / name).write_text(STUB)
        (commands / name).chmod(0o755)
    return Machine(tmp_path)


@on_x86
def test_an_installation_that_is_interrupted_leaves_no_temporary_folder(machine: Machine) -> None:
    made = machine.make(HAS_TORCH="interrupted")
    assert made.returncode == 130 and machine.calls()[-1].endswith(TORCH)
    assert (machine.home / "checkout/.venv/bin/uv").exists() and not (machine.home / "checkout/.venv/tmp").exists()
    assert machine.make(HAS_TORCH="uv").returncode == 0


@on_x86
@pytest.mark.parametrize(
    ("found_by", "last_try"),
    [
        ("uv", f"uv pip install --quiet --python checkout/.venv/bin/python --no-deps {TORCH}"),
        ("python", f"python -m pip install --quiet --no-deps {TORCH}"),
        ("index", f"--torch-backend cpu {TORCH}"),
    ],
)
def test_torch_is_where_the_environment_or_uv_knows_it(machine: Machine, found_by: str, last_try: str) -> None:
    made = machine.make(HAS_TORCH=found_by)
    assert made.returncode == 0 and made.stdout == f"{machine.home}/checkout/.venv/bin/python\n", made.stderr
    tries = [call for call in machine.calls() if TORCH in call]
    assert tries[-1].endswith(last_try) and any(call.endswith("requirements/cpu.lock") for call in machine.calls())
    assert {path.name for path in machine.home.iterdir()} == {"bin", "calls", "checkout", ".cache"}
    assert not (machine.home / "checkout/.venv/tmp").exists()
    (machine.home / "calls").unlink()
    assert machine.make().returncode == 0 and not (machine.home / "calls").exists(), "it was made already"


@on_x86
def test_without_torchs_cpu_build_the_pinned_stack_takes_its_place(machine: Machine) -> None:
    refused = machine.make(SEAMLESS_STACK="cpu")
    assert refused.returncode == 2 and "uv has no torch\npython has no torch\n" in refused.stderr
    assert "PIP_FIND_LINKS" in refused.stderr.splitlines()[-1]
    for again in (False, True):
        made = machine.make()
        assert made.returncode == 0 and made.stdout == f"{machine.home}/checkout/.venv-pinned/bin/python\n", made.stderr
        assert made.stderr.count("GB to fetch") == (0 if again else 1), made.stderr
    assert (machine.home / "checkout/.venv").readlink() == Path(".venv-pinned")
    assert (machine.home / "checkout/.venv/bin/activate").read_text() == "export VERL_PLATFORM=cpu\n"
    assert machine.make(SEAMLESS_STACK="cpu", HAS_TORCH="uv").stdout == f"{machine.home}/checkout/.venv/bin/python\n"
    assert not (machine.home / "checkout/.venv").is_symlink(), "the link gives way"
    assert (machine.home / "checkout/.venv-pinned").is_dir()


@on_x86
@pytest.mark.parametrize("has_uv", [False, True])
def test_a_missing_python_comes_by_uv(machine: Machine, has_uv: bool) -> None:
    if has_uv:
        shutil.copy(machine.home / "bin/python", machine.home / "bin/uv")
    made = machine.make(HAS_PYTHON="", HAS_TORCH="uv")
    assert made.returncode == 0 and "uv fetches one into .venv-uv" in made.stderr, made.stderr
    uv = "bin/uv" if has_uv else "checkout/.venv-uv/bin/uv"
    assert f"{uv} python install --quiet 3.11" in machine.calls()
    assert "checkout/.venv-uv/python/python3.11 -m venv checkout/.venv" in machine.calls()
