"""A command whose fields could not be quoted, or are none of the task's, is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from seamless_verl.agents.command import AgentCommand, question_of
from seamless_verl.errors import ConfigError


@pytest.mark.parametrize(
    ("template", "stands"),
    [
        ('echo "{p}"', 'between " quotes'),
        ("echo '{p}'", "between ' quotes"),
        ("echo hi # {p}", "in a comment"),
        ("# don't\necho '{p}'", "between ' quotes"),
        ("echo \\{p}", "after"),
        ("echo ${p}", "after"),
        ("echo `cat {p}`", "beside `"),
        ("cat <<END\n{p}\nEND", "beside <<"),
        ("echo $(({p}))", "beside \\(\\("),
        ("echo $'it\\'s {p}'", "beside \\$'"),
        ("echo {p} 'open", "never closed"),
        ("echo {}", "names no field"),
        ("echo {p!r}", "names no field"),
        ("echo {p:>3}", "names no field"),
        ("echo {p", "expected '}'"),
    ],
)
def test_a_field_where_it_cannot_be_quoted_is_refused_before_any_task(template: str, stands: str) -> None:
    with pytest.raises(ConfigError, match=stands):
        AgentCommand(template)


def test_a_field_the_task_has_not_is_named() -> None:
    with pytest.raises(ConfigError, match=r"command='{prompt}'.*It has: answer, question"):
        AgentCommand("echo {prompt}").arguments({"question": "", "answer": ""})


def test_a_field_may_be_within_a_column() -> None:
    command, task = (
        AgentCommand(["run", "{extra_info.repo}/{extra_info.at.commit}"]),
        {"repo": "r", "at": {"commit": 3}},
    )
    assert command.arguments({"extra_info": task}) == ["run", "r/3"]
    for wrong in ({}, {"extra_info": "text"}, {"extra_info": {"repo": "r"}}):
        with pytest.raises(ConfigError, match="the task has no such field"):
            command.arguments(wrong)


def test_a_folder_may_differ_by_task(tmp_path: Path) -> None:
    command = AgentCommand("true", folder=f"{tmp_path}/{{extra_info.repo}}")
    assert command.folder_of({"extra_info": {"repo": "one"}}) == tmp_path / "one"
    assert AgentCommand("true", folder=tmp_path).folder_of({}) == tmp_path
    with pytest.raises(ConfigError, match="is no folder"):
        AgentCommand("true", folder=tmp_path / "none")


@pytest.mark.parametrize(
    ("prompt", "question"),
    [
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "a"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "c"}], "c"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}], "x"),
        ("whole", "whole"),
        ([{"role": "system", "content": "s"}], None),
        (None, None),
    ],
)
def test_the_question_is_the_last_user_text(prompt: object, question: str | None) -> None:
    assert question_of({"prompt": prompt}) == question
