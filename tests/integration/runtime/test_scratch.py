"""A scratch folder that another process holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.scratch import parent

from seamless_verl.runtime.scratch import remove_abandoned, scratch_folder

__all__ = ["parent"]

pytestmark = pytest.mark.integration
HOLDER = """
from seamless_verl.runtime.scratch import scratch_folder
with scratch_folder() as folder:
    print(folder, flush=True)
    input()
"""


def test_only_what_nobody_holds_is_removed(parent: Path) -> None:
    others = {parent / "sf-download", parent / "seamless-agent-12345678"}
    for other in others:
        other.mkdir()
    command = [sys.executable, "-c", HOLDER]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as holder,
        scratch_folder() as own,
    ):
        assert holder.stdout is not None
        theirs = Path(holder.stdout.readline().strip())
        remove_abandoned(parent)
        assert set(parent.iterdir()) == others | {own, theirs}
        holder.kill()
        holder.wait()
        assert theirs.exists()
        remove_abandoned(parent)
        assert set(parent.iterdir()) == others | {own}
    assert set(parent.iterdir()) == others
