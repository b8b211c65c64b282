"""Run the tests of this folder on sources that were handed in; the share that passes becomes reward.json.

The sources run in this very process. They cannot reach the tests' files, and one that ends the process, or
writes a reward of its own without the word it is not told, has none. One that studies this process can cheat.
"""

from __future__ import annotations

import json
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

TESTS = "test_hidden"


def main() -> int:
    given = json.load(sys.stdin)
    Path("task.json").unlink()  # the word is in it
    for name, text in given["files"].items():
        write_source(name, text)
    sys.path.insert(0, str(Path.cwd()))
    tests = list(cases(unittest.defaultTestLoader.loadTestsFromName(TESTS)))
    passed = sum(passes(test) for test in tests)
    share = {"reward": passed / len(tests), "passed": passed, "tests": len(tests), "word": given["word"]}
    Path("reward.json").write_text(json.dumps(share))
    return 0


def write_source(name: str, text: str) -> None:
    """ValueError for a name that leads out of this folder, or to a test."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.suffix != ".py" or path.name.startswith("test_"):
        raise ValueError(f"files: {name!r} is no source of the repository")
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text, encoding="utf-8")


def cases(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """Each test; sources that cannot be imported make it one, which fails."""
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
