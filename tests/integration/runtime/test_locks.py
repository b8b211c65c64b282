"""Who writes a folder: one process, until it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from seamless_verl.runtime.locks import is_locked, only_writer

pytestmark = pytest.mark.integration
HOLD = """
import sys
from pathlib import Path
from seamless_verl.runtime.locks import only_writer
with only_writer(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_folder_has_one_writer_whose_lock_ends_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    assert not is_locked(folder)
    with subprocess.Popen([sys.executable, "-c", HOLD, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        with pytest.raises(BlockingIOError), only_writer(folder):
            pass
        assert is_locked(folder)
        other.send_signal(signal.SIGKILL)
    for _ in range(2):
        with only_writer(folder):
            assert is_locked(folder)
    assert not is_locked(folder) and not folder.exists()
