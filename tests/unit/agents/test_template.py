"""A command whose fields could not be quoted, or are none of the task's, is refused."""

from __future__ import annotations

import pytest

from seamless_verl.agents.command import AgentCommand
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
