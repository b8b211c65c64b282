"""Words of a command line that are no KEY=VALUE: one mistake for each override that was meant."""

from __future__ import annotations

import pickle
import shlex

import pytest
from support.mistakes import composed

from seamless_verl.cli.main import settings_first
from seamless_verl.config.composing import composing
from seamless_verl.errors import ConfigError

MACHINES = "seamless.resources=[{count: 1, devices: 2, tags: [train, rollout]}]"
SPLIT = MACHINES.replace("=", "='") + f"': the shell split this into 7 words. Write '{MACHINES}'"
COMMANDS = [
    (MACHINES, SPLIT),
    (f"trainer.nnodes=1 {MACHINES} trainer.n_gpus_per_node=2", SPLIT),
    (
        f"'{MACHINES.replace('rollout]', 'rollout')}'",
        "seamless.resources='[{count: 1, devices: 2, tags: [train, rollout}]': a bracket is not closed: "
        "[train, rollout. Close it with ]",
    ),
    ("trainer.logger=[console", "trainer.logger='[console': a bracket is not closed: [console. Close it with ]"),
    (
        "trainer.logger=[console, file trainer.nnodes=1",
        "trainer.logger='[console, file': the shell split this into 2 words, and a bracket is not closed: "
        "[console, file. Close it with ], and write it in single quotes",
    ),
    ("trainer.nnodes=1 seamless.max_staleness 3", "3: is no KEY=VALUE. Write seamless.max_staleness=3"),
    ("seamless.max_staleness = 3", "3: is no KEY=VALUE. Write seamless.max_staleness=3"),
    ("seamless.max_staleness= 3", "3: is no KEY=VALUE. Write seamless.max_staleness=3"),
    ("platform cpu", "cpu: is no KEY=VALUE. Write platform=cpu"),
    ("seamless.max_staleness", "seamless.max_staleness: is no KEY=VALUE. Write seamless.max_staleness=VALUE"),
    ("more", "more: is no KEY=VALUE. Write key=value"),
    ("''", "'': is no KEY=VALUE. Write key=value"),
    (
        "trainer.project_name=my project",
        "project: is no KEY=VALUE. Write key=value, or 'trainer.project_name=my project' if this is part of it",
    ),
    ("trainer.project_name=a(b", "trainer.project_name='a(b': a bracket is not closed: (b. Close it with )"),
    ("trainer.project_name=a)b", "Quote special characters: 'trainer.project_name=\"a)b\"'"),
]


@pytest.mark.parametrize(("command", "expected"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_an_override_that_was_meant_is_said(command: str, expected: str) -> None:
    words = shlex.split(command)
    with pytest.raises(ConfigError) as caught, composing(words):
        composed(tuple(words))
    assert expected in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_words_of_a_setting_that_the_shell_split_stay_together() -> None:
    words = shlex.split(f"--json {MACHINES} --top 3 a.b 3")
    expected = [*shlex.split(MACHINES), "a.b", "3", "--json", "--top", "3"]
    assert settings_first(words, ["--json"], target=False) == expected
    assert settings_first(["sums", *shlex.split(MACHINES), "--top", "3"], [])[:8] == ["sums", *shlex.split(MACHINES)]
