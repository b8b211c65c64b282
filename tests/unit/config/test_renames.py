"""Old keys, values and names of code are refused with the new ones."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.config import assert_refused, refused, tiny_plain

from seamless_verl.config import SeamlessConfig, composing, renames
from seamless_verl.errors import ConfigError

LOOPS = "seamless_verl.trainer.data_plane.agent_loop"


@pytest.mark.parametrize(("old", "new"), renames.SETTINGS.items())
def test_an_old_setting_is_refused_with_the_new_one(old: str, new: str) -> None:
    node: Mapping[str, Any] = {}
    for part in reversed(old.partition("=")[0].split(".")[1:]):
        node = {part: node or old.partition("=")[2]}
    with pytest.raises(ConfigError) as caught:
        SeamlessConfig.parse(node)
    assert str(caught.value).endswith(f": was renamed. Write {new}")
    *nodes, name = new.partition("=")[0].split(".")[1:]
    given: Any = {name: new.partition("=")[2]}
    for part in reversed(nodes):
        given = {part: given}
    SeamlessConfig.parse(given)


def test_the_old_hand_over(tmp_path: Path) -> None:
    config = tiny_plain(tmp_path, "seamless.handover=shared", "seamless.plot=3")
    assert [str(problem) for problem in refused(config)] == [
        "seamless.handover='shared': was renamed. Write seamless.handover=resident",
        "seamless.plot=3: must be true or false. Set seamless.plot=true or seamless.plot=false",
    ]


def test_an_old_key_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composing, "SETTINGS", {"seamless.old": "seamless.ahead"})
    with pytest.raises(ConfigError) as caught, composing.composing(["seamless.old=3"]):
        raise composing.HydraException("Could not override 'seamless.old'.")
    assert str(caught.value) == "seamless.old='3': was renamed. Write seamless.ahead"


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        (
            "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
            f"{LOOPS}.CommandAgentLoop",
            "seamless_verl.agent_loops.loops.CommandAgentLoop",
        ),
        (
            "ray_kwargs.ray_init.runtime_env.py_executable",
            "python -m seamless_verl.platform.zygote.launcher",
            "python -m seamless_verl.platform.forkserver.launcher",
        ),
    ],
)
def test_old_code_is_refused_with_the_new_name(tmp_path: Path, key: str, old: str, new: str) -> None:
    assert_refused(tiny_plain(tmp_path, f"{key}={old}"), key, old, f"Write {key}={new}")


def test_old_code_in_a_list_is_found(tmp_path: Path) -> None:
    key = "ray_kwargs.ray_init.runtime_env.py_modules"
    config = tiny_plain(tmp_path, f"{key}=[mine,seamless_verl.platform.zygote]")
    assert [problem.key for problem in refused(config)] == [f"{key}[1]"]


@pytest.mark.parametrize(("old", "new"), renames.CODE.items())
def test_new_code_exists_and_old_code_does_not(old: str, new: str) -> None:
    assert find_spec(new) is not None
    with pytest.raises(ModuleNotFoundError):
        assert find_spec(old) is None and find_spec(f"{old}.x") is None
