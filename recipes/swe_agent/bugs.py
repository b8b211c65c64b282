"""The repositories of the swe_agent recipe: one or two modules, one bug, and tests of which some pass despite it.

Each kind of bug is a template with `$noun` and `$n` in it, so that one kind gives different repositories.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from string import Template

NOUNS = ("orders", "visits", "payments", "readings", "tickets", "parcels", "scores", "songs")
SHOWN = 2
"""The number of tests in the repository, the first of which fails; the reward is made of all tests."""


@dataclass(frozen=True)
class Bug:
    """One kind of bug. `module` holds `right`, which the bug replaces by `wrong`; `beside` is a second, correct module.

    tests: calls of `function` and their values, Python in text. With the bug the first fails, the second passes, and
    some of the others do.
    """

    module: str
    function: str
    code: str
    right: str
    wrong: str
    tests: tuple[tuple[str, str], ...]
    beside: tuple[str, str] | None = None


@dataclass(frozen=True)
class Repository:
    """What is written to disk (`files`, by name), the tests kept from the agent (`hidden`), and the fixed module."""

    kind: str
    issue: str
    files: dict[str, str]
    hidden: str
    module: str
    fixed: str


BUGS = {
    "off_by_one": Bug(
        "history.py",
        "last_$noun",
        "def last_$noun(items, count):\n    start = max(0, len(items) - count)\n    return items[start:]\n",
        "len(items) - count",
        "len(items) - count - 1",
        (("[1, 2, $n], 1", "[$n]"), ("[1, 2], $n", "[1, 2]"), ("[], 3", "[]"), ("[4, 5, 6, 7], 2", "[6, 7]")),
    ),
    "wrong_operator": Bug(
        "billing.py",
        "total_of_$noun",
        "from rates import tax\n\n\ndef total_of_$noun(amounts):\n    net = sum(amounts)\n    return net + tax(net)\n",
        "net + tax(net)",
        "net - tax(net)",
        (("[100]", "100 + $n"), ("[]", "0"), ("[200, 100]", "300 + 3 * $n"), ("[0, 0]", "0")),
        ("rates.py", "RATE = $n\n\n\ndef tax(amount):\n    return amount * RATE // 100\n"),
    ),
    "missing_branch": Bug(
        "bounds.py",
        "bounded_$noun",
        "def bounded_$noun(value, low, high):\n    if value < low:\n        return low\n"
        "    if value > high:\n        return high\n    return value\n",
        "    if value > high:\n        return high\n",
        "",
        (("9$n, 0, 10", "10"), ("-$n, 0, 10", "0"), ("5, 0, 10", "5"), ("11, 0, 10", "10"), ("10, 0, 10", "10")),
    ),
    "wrong_comparison": Bug(
        "levels.py",
        "enough_$noun",
        "LIMIT = $n\n\n\ndef enough_$noun(count):\n    return count >= LIMIT\n",
        "count >= LIMIT",
        "count > LIMIT",
        (("$n", "True"), ("$n - 1", "False"), ("$n + 1", "True"), ("0", "False")),
    ),
    "wrong_start": Bug(
        "peaks.py",
        "highest_of_$noun",
        "def highest_of_$noun(values):\n    best = values[0]\n    for value in values:\n"
        "        if value > best:\n            best = value\n    return best\n",
        "best = values[0]",
        "best = 0",
        (("[-9, -$n]", "max(-9, -$n)"), ("[2, $n, 1]", "max(2, $n)"), ("[-1]", "-1"), ("[0, -4]", "0")),
    ),
    "missing_tail": Bug(
        "pages.py",
        "pages_of_$noun",
        "def pages_of_$noun(items, size):\n"
        "    return [items[start : start + size] for start in range(0, len(items), size)]\n",
        "range(0, len(items), size)",
        "range(0, len(items) - size + 1, size)",
        (("[1, 2, $n], 2", "[[1, 2], [$n]]"), ("[1, $n], 1", "[[1], [$n]]"), ("[], 4", "[]"), ("[7], 3", "[[7]]")),
    ),
    "wrong_key": Bug(
        "words.py",
        "count_$noun",
        "def count_$noun(text):\n    counts = {}\n    for word in text.split():\n"
        "        word = word.lower()\n        counts[word] = counts.get(word, 0) + 1\n    return counts\n",
        "        word = word.lower()\n",
        "",
        (
            ("'One one'", "{'one': 2}"),
            ("'b a ' * $n", "{'b': $n, 'a': $n}"),
            ("''", "{}"),
            ("'X' * $n", "{'x' * $n: 1}"),
        ),
    ),
    "missing_sort": Bug(
        "middles.py",
        "middle_of_$noun",
        "def middle_of_$noun(values):\n    ordered = sorted(values)\n    return ordered[len(ordered) // 2]\n",
        "sorted(values)",
        "list(values)",
        (("[90, 1, $n]", "$n"), ("[1, $n, 90]", "$n"), ("[$n]", "$n"), ("[5, 4, 3, 2, 1]", "3")),
    ),
}


def draw_repository(draw: random.Random) -> Repository:
    """One repository; the same for the same state of `draw`."""
    kind = draw.choice(sorted(BUGS))
    return repository(kind, noun=draw.choice(NOUNS), n=draw.randint(3, 8))


def repository(kind: str, *, noun: str, n: int) -> Repository:
    """The repository of one kind of bug; `n` is a number from 3 to 8 in its code or its tests."""
    bug = BUGS[kind]
    words = {"noun": noun, "n": str(n)}
    code, function = Template(bug.code).substitute(words), Template(bug.function).substitute(words)
    right = Template(bug.right).substitute(words)
    assert code.count(right) == 1, kind
    tests = [tuple(Template(text).substitute(words) for text in test) for test in bug.tests]
    broken = code.replace(right, Template(bug.wrong).substitute(words))
    name = bug.module.removesuffix(".py")
    files = {bug.module: broken, f"test_{name}.py": test_file(name, function, tests[:SHOWN])}
    if bug.beside is not None:
        files[bug.beside[0]] = Template(bug.beside[1]).substitute(words)
    call, value = tests[0]
    issue = f"`{function}({call})` in {bug.module} should give `{value}`, and does not. test_{name}.py shows it."
    return Repository(kind, issue, files, test_file(name, function, tests), bug.module, code)


def test_file(module: str, function: str, tests: list[tuple[str, ...]]) -> str:
    """A file for the standard library's unittest, one method a test."""
    methods = [
        f"    def test_{number}(self):\n        self.assertEqual({function}({call}), {value})\n"
        for number, (call, value) in enumerate(tests, 1)
    ]
    head = f"import unittest\n\nfrom {module} import {function}\n\n\nclass Test{function.title().replace('_', '')}"
    return f"{head}(unittest.TestCase):\n" + "\n".join(methods)
