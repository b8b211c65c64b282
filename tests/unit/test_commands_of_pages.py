"""Every command that the documents show is real: its program, subcommand and options, and the settings it gives."""

from __future__ import annotations

import argparse
import ast
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.config import compose_ours
from support.pages import CURRENT, FENCE, INLINE, Command, commands_in, commands_of, page_name
from support.paths import ROOT

from seamless_verl.cli.main import make_parser, settings_first
from seamless_verl.config import SeamlessConfig
from seamless_verl.config.composing import GROUPS, HERE, verl_config_dir
from seamless_verl.tools.compare.command import FLAGS

FOREIGN = {".", "bash", "codex", "export", "pip", "ray", "sed", "tail"}
OTHER_MODULES = {"json.tool"}
"""Programs that are not ours."""
HYDRA = {"seamless_verl.main_ppo", "seamless_verl.check", "verl.trainer.main_ppo"}
HYDRA_OPTIONS = {"--config-dir", "--config-name", "--config-path", "--help"}
STACKS = {"cpu", "pinned"}
YOURS = {"recipes/my_task/run.sh"}
"""What a reader makes."""
KEY = r"[a-z_]+(?:\.\w+)+"
SETTING = re.compile(rf"(?:^|[\s:,])([+~]*)({KEY})=(.*?)(?=$|[:,]{KEY}=)", re.DOTALL)
GROUP = re.compile(r"\+?([a-z_]+)=(\w+)")
FILLED_IN = re.compile(r"^$|\.\.\.|[A-Z]{3}")  # of a value: what the reader is to fill in
COMMANDS = [command for page in CURRENT for command in commands_of(page)]
OURS = [command for command in COMMANDS if command.words[0] not in FOREIGN]


def test_commands_are_found() -> None:
    block = "a='b c'\n$a --x 1 && Y=2 d \\\n  'e f' > out  # why\n"
    assert list(commands_in(block)) == [("b", "c", "--x", "1"), ("d", "e f")]
    assert len(OURS) > 100 and {command.page for command in OURS} > {"README.md", "docs/layouts.md", "docs/cpu.md"}


@pytest.mark.parametrize("command", OURS, ids=str)
def test_a_command_is_real(command: Command) -> None:
    program, *arguments = command.words
    if re.search(r"(^|/)python3?$", program):
        program, *arguments = arguments
        if program == "-m":
            program, *arguments = arguments
            if program not in OTHER_MODULES:
                check_options(command, arguments, module_options(program))
            return
    if program == "seamless-verl":
        check_subcommand(command, arguments)
    elif program == "scripts/test":
        check_tests(arguments)
    elif program not in YOURS:
        file = ROOT / program
        assert file.is_file(), f"{command}: there is no {program}"
        assert program != command.words[0] or os.access(file, os.X_OK), f"{command}: {program} cannot be run"
        check_options(command, arguments, options_in(shell_code(file)))


def check_options(command: Command, arguments: list[str], known: set[str]) -> None:
    given = {word.partition("=")[0] for word in arguments if re.match(r"--\w", word)}
    assert given <= known, f"{command}: no option {given - known}; there are {sorted(known)}"


@cache
def module_options(module: str) -> set[str]:
    """The options that the module's code names; those of hydra, too, where it composes a config."""
    if module == "verl.trainer.main_ppo":
        return HYDRA_OPTIONS
    path = ROOT / module.replace(".", "/")
    assert module.startswith("seamless_verl"), f"{module} is not ours"
    files = sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    assert not path.is_dir() or path / "__main__.py" in files, f"{module} is no program"
    constants = (node.value for file in files for node in ast.walk(ast.parse(file.read_text())) if is_text(node))
    named = {text for text in constants if re.fullmatch(r"--[a-z][a-z-]*", text)}
    return named | {"--help"} | (HYDRA_OPTIONS if module in HYDRA else set())


def is_text(node: ast.AST) -> Any:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def shell_code(file: Path) -> str:
    lines = file.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("#"))


def options_in(code: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]*", code))


def check_subcommand(command: Command, arguments: list[str]) -> None:
    """In a block the arguments are parsed; in a text they may be cut short, but each word is there."""
    if arguments[:1] == ["check"]:
        check_options(command, arguments[1:], module_options("seamless_verl.check"))
        return
    parser, rest = make_parser(), list(arguments)
    while rest and (choices := subcommands(parser)):
        assert rest[0] in choices, f"{command}: no subcommand {rest[0]}; there are {', '.join(choices)}"
        parser = choices[rest.pop(0)]
    check_options(command, rest, set(parser._option_string_actions))
    if command.whole:
        ordered = [*arguments[:1], *settings_first(arguments[1:], FLAGS)] if arguments[0] == "compare" else arguments
        assert make_parser().parse_args(ordered).run


def subcommands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next((dict(action.choices) for action in actions), {})


def check_tests(arguments: list[str]) -> None:
    """Of scripts/test: folders, files, its own words, pytest's options of one letter, and the option of our own."""
    own = {*re.findall(r"[\w-]+", shell_code(ROOT / "scripts/test")), *STACKS}
    own |= options_in((ROOT / "tests/conftest.py").read_text())
    unknown = [word for word in arguments if word not in own and not re.fullmatch(r"-\w|\d/\d", word)]
    assert [word for word in unknown if not (ROOT / word.partition("::")[0]).exists()] == []


def takes_settings(command: Command) -> bool:
    recipe = re.fullmatch(r"recipes/\w+/run\.sh", command.words[0])
    return bool(recipe or {*command.words} & {*HYDRA, "plan", "check", "compare", "--set", "scripts/quickstart"})


@cache
def config() -> Mapping[str, Any]:
    """The config of a run with our defaults, its interpolations as they are written."""
    return dict(OmegaConf.to_container(compose_ours()))  # type: ignore[arg-type]


def exists(key: str) -> bool:
    node: Any = config()
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return False
        node = node[name]
    return True


def settings_of(command: Command) -> list[tuple[str, str, str]]:
    """Each setting as its sign, key and value."""
    return [found for word in command.words[1:] for found in SETTING.findall(word)]


def groups_of(command: Command) -> list[tuple[str, str]]:
    """Each choice of a config group, and the group."""
    found = [match.groups() for word in command.words[1:] if (match := GROUP.fullmatch(word))]
    return [(group, name) for group, name in found if group in {*GROUPS, "cluster"}]


@pytest.mark.parametrize("command", [command for command in OURS if takes_settings(command)], ids=str)
def test_settings_of_a_command_exist(command: Command) -> None:
    for sign, key, _ in settings_of(command):
        known = exists(key.rpartition(".")[0] if "+" in sign else key)
        assert known or key.startswith("hydra."), f"{command}: the config has no {key}"
    for group, name in groups_of(command):
        folders = [HERE, verl_config_dir(), ROOT / Path(command.words[0]).parent]
        assert any((folder / group / f"{name}.yaml").is_file() for folder in folders), f"{command}: no {group}={name}"
    ours = [(key, value) for _, key, value in settings_of(command) if key.startswith("seamless.")]
    given = OmegaConf.from_dotlist([f"{key}={value}" for key, value in ours if not FILLED_IN.search(value)])
    SeamlessConfig.parse(OmegaConf.merge({"seamless": config()["seamless"]}, given).seamless)


@pytest.mark.parametrize("page", CURRENT, ids=page_name)
def test_settings_that_a_page_names_exist(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    named = {key for code in INLINE.findall(text) for key in re.findall(r"^seamless\.[a-z\d_.]+\w", code)}
    assert [key for key in sorted(named) if not exists(key)] == []
