"""Write reward.json: nine tenths for the tests that pass, a tenth for the share of the last reply that is plain ASCII.

    judge.py TESTS REPLY

TESTS is a folder with tests that the agent has not seen, and REPLY a file with its last words. The tenth is for models
that cannot write yet. The agent's sources run in this process: it is no sandbox.
recipes/swe_agent has a stricter judge.
"""

from __future__ import annotations

import json
import shutil
import sys
import unittest
from pathlib import Path

HIDDEN = "test_hidden"
READABLE_SHARE = 0.1


def main(tests: str, reply: str) -> None:
    shutil.copy(Path(tests) / f"{HIDDEN}.py", ".")
    sys.path.insert(0, str(Path.cwd()))
    text = Path(reply).read_text(encoding="utf-8", errors="replace")
    share = passing_share()
    reward = (1 - READABLE_SHARE) * share + READABLE_SHARE * readable(text)
    Path("reward.json").write_text(json.dumps({"reward": reward, "tests": share, "reply": text[:1000]}))


def passing_share() -> float:
    """The share of the tests that pass; sources that cannot be imported are one test that fails."""
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromName(HIDDEN).run(result)
    failed = len(result.failures) + len(result.errors)
    return 1 - failed / max(1, result.testsRun)


def readable(text: str) -> float:
    """The share of printable ASCII and line ends; 0 without a reply."""
    return sum(" " <= character <= "~" or character == "\n" for character in text) / max(1, len(text))


if __name__ == "__main__":
    main(*sys.argv[1:])
