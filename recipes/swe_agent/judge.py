"""Run the tests of this folder on the agent's sources; the share that passes is written to reward.json.

The sources run in this process. They cannot change the tests' files. Sources that end the process get no reward, nor
do those that write a reward of their own without the secret. Sources that inspect this process can cheat.
"""

from __future__ import annotations

import json
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

TESTS = "test_hidden"


def main() -> int:
    task = json.load(sys.stdin)
    Path("task.json").unlink()  # the secret is in it
    for name, text in task["files"].items():
        write_source(name, text)
    sys.path.insert(0, str(Path.cwd()))
    tests = list(cases(unittest.defaultTestLoader.loadTestsFromName(TESTS)))
    passed = sum(passes(test) for test in tests)
    share = {"reward": passed / len(tests), "passed": passed, "tests": len(tests), "secret": task["secret"]}
    Path("reward.json").write_text(json.dumps(share))
    return 0


def write_source(name: str, text: str) -> None:
    """Write one source; raises ValueError for a name outside of this folder, or of a test."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.suffix != ".py" or path.name.startswith("test_"):
        raise ValueError(f"files: {name!r} is no source of the repository")
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text, encoding="utf-8")


def cases(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """Each test; when the sources cannot be imported, unittest gives one, which fails."""
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from cases(test)
        else:
            yield test


def passes(test: unittest.TestCase) -> bool:
    result = unittest.TestResult()
    test.run(result)
    return result.testsRun == 1 and result.wasSuccessful() and not result.skipped


if __name__ == "__main__":
    sys.exit(main())
