"""After the imports are frozen, Python's collector comes as in a process that has imported nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration
CODE = """
import gc
from seamless_verl.runtime.process import freeze_imports
imported = [[] for _ in range(1_000_000)]
gc.collect()
freeze_imports()
assert gc.get_freeze_count() > 1_000_000
before = gc.get_stats()[2]["collections"]
kept = [[] for _ in range(150_000)]
print(gc.get_stats()[2]["collections"] - before)
"""


def test_garbage_does_not_wait_for_a_quarter_of_the_imports() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) >= 1
