"""scripts/lib/environment.sh: what it refuses before it installs anything."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.integration


def check_machine(processor: Path) -> subprocess.CompletedProcess[str]:
    script = f". '{ROOT}/scripts/lib/environment.sh'; check_machine '{processor}'"
    return subprocess.run(["bash", "-euc", script], capture_output=True, text=True, timeout=30)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="any other is refused for itself")
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
