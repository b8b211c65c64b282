"""Real shells see a task's values as they are, and never as code."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.agents import python, ran

from seamless_verl.agents.command import AgentCommand
from seamless_verl.errors import ConfigError

pytestmark = pytest.mark.integration
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
QUICK = settings(max_examples=40, deadline=None)
HARM = ': > "$CANARY"'
NASTY = [
    *(f"$({HARM})", f"`{HARM}`", f"'; {HARM}; '", f'"; {HARM}; "', f"\n{HARM}\n", f"\\'; {HARM}; #", f"a[$({HARM})]"),
    *(f'\\"; {HARM}; #', f"x; {HARM}", "CANARY", "2", "\\", "'", '"'),
]
PIECES = ["echo ", "{x}", "{y}", "'", '"', "\\", "#", " ", "\n", "$", "`", "$(echo ", ")", "((", "[[ ", " ]]", "x="]
PIECES += ["<<", ";", "&&", "${{z:-", "}}", "|", ":", "$'", "2", "case a in ", ") ", ";;", "esac"]
PIECES += ["{x}", "{y}", " ", "echo "] * 4  # so that about a third has a field and is accepted


@QUICK
@given(TEXT, TEXT)
def test_the_shell_sees_every_value_as_one_literal_word(a: str, b: str) -> None:
    command = AgentCommand("printf '%s\\0' {a} --x={b} $(printf %s {a}|wc -c)")
    out = subprocess.run(command.arguments({"a": a, "b": b}), capture_output=True, check=True).stdout
    assert out.split(b"\0")[:-1] == [a.encode(), b"--x=" + b.encode(), str(len(a.encode())).encode()]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=9), st.sampled_from(NASTY), st.sampled_from(NASTY))
def test_no_template_that_is_accepted_runs_a_value_as_code(pieces: list[str], x: str, y: str) -> None:
    try:
        arguments = AgentCommand("".join(pieces)).arguments({"x": x, "y": y})
    except ConfigError:
        return
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder, "canary")
        for shell in ("sh", "bash"):
            env = {"CANARY": str(canary), "PATH": "/usr/bin:/bin"}
            subprocess.run([shell, *arguments[1:]], cwd=folder, env=env, capture_output=True, stdin=subprocess.DEVNULL)
        assert not canary.exists(), arguments


def test_quotes_comments_and_braces_around_a_field_do_not_disturb_it() -> None:
    command = "x='a b' # don't\necho \"${{x}}\" \\\"{p}'!'  # isn't"
    assert ran(command, {"p": "it's $x"}).output == "a b \"it's $x!\n"


def test_a_value_is_always_quoted_also_when_it_looks_harmless() -> None:
    assert ran("echo {n}>out; cat out", {"n": 2}).output == "2\n"


def test_a_list_takes_values_as_they_are_and_structures_as_json() -> None:
    task = {"p": "a 'b' $HOME", "turns": [{"role": "user"}]}
    out = ran([*python("import sys; print(sys.argv[1:])"), "--p={p}", "{turns}", "{{p}}"], task).output
    assert out == f"{['--p=' + task['p'], json.dumps(task['turns']), '{p}']}\n"
