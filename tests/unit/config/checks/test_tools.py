"""Tools of verl's agent loops: a file, class or parser that verl could not use is refused; what it can use passes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.config import assert_refused, refused, tiny_plain

from seamless_verl.config import preflight
from seamless_verl.config.checks.agents import DEFAULT
from seamless_verl.config.checks.sources import derives_from
from seamless_verl.config.checks.tools import BASE, FORMAT, FUNCTIONS, TOOLS

CODE = """
import json as base_tool
from verl.tools import base_tool as verl_tools
from verl.tools.base_tool import BaseTool
from verl.tools.base_tool import BaseTool as Named
from .other import Elsewhere

class Search(BaseTool): ...
class Nested(Search): ...
class Renamed(Named): ...
class ByModule(verl_tools.BaseTool): ...
class Beside(object, Search): ...
class Wrong: ...
class WrongToo(Wrong, dict): ...
class Unknown(Elsewhere): ...
class BaseTool(BaseTool): ...
def function(): ...
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package on the path whose module `own` has classes of both kinds."""
    folder = tmp_path / "tools_of_a_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .own import Search as Shown\n")
    (folder / "own.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "tools_of_a_test"


def tools(folder: Path, *names: str, kind: str = "native") -> str:
    entries = "".join(f"- {{class_name: {name}, config: {{type: {kind}}}}}\n" for name in names)
    (folder / "tools.yaml").write_text(f"tools:\n{entries}")
    return f"{TOOLS}={folder}/tools.yaml"


def test_tools_that_verl_can_use(tmp_path: Path, package: str) -> None:
    config = tiny_plain(
        tmp_path, tools(tmp_path, f"{package}.own.Search", BASE, f"{package}.Shown"), f"{DEFAULT}=tool_agent"
    )
    assert preflight(config, devices=1, accelerator=False) == []


@pytest.mark.parametrize("name", ["Search", "Nested", "Renamed", "ByModule", "Beside", "Unknown", "BaseTool"])
def test_a_class_that_derives(package: str, name: str) -> None:
    """By any way of naming the base; what the sources do not show is taken to derive."""
    assert derives_from(f"{package}.own.{name}", BASE)


@pytest.mark.parametrize("name", ["Wrong", "WrongToo", "function"])
def test_a_class_that_does_not(tmp_path: Path, package: str, name: str) -> None:
    wrong = f"{package}.own.{name}"
    config = tiny_plain(tmp_path, tools(tmp_path, BASE, wrong))
    assert_refused(config, f"{TOOLS}[1].class_name", wrong, "Derive it, or name a class that does")


def test_a_tool_of_verls_examples(tmp_path: Path, package: str) -> None:
    """verl's package has none of them; other packages are said with their modules, too."""
    for example, module in (("verl.tools.gsm8k_tool.Gsm8kTool", "gsm8k_tool"), ("verl.tools.Gsm8kTool", "Gsm8kTool")):
        config = tiny_plain(tmp_path, tools(tmp_path, example))
        assert_refused(config, f"{TOOLS}[0].class_name", example, "verl 0.9.1 has no example tools: copy the class")
        (problem,) = refused(config)
        assert problem.reason == f"the package verl.tools has no module {module!r}"
        assert "It has: base_tool, function_tool, schemas, tool_registry. " in problem.way_out
    (problem,) = refused(tiny_plain(tmp_path, tools(tmp_path, f"{package}.owm.Search")))
    assert problem.way_out == "Did you mean own? It has: own. Install it, or put its folder on PYTHONPATH"


def test_every_mistake_of_every_entry(tmp_path: Path, package: str) -> None:
    names = ("no_such_package.Tool", f"{package}.own.Serch", "Tool")
    problems = refused(tiny_plain(tmp_path, tools(tmp_path, *names, kind="mcp")))
    ways_out = {problem.key: problem.way_out for problem in problems}
    assert "put its folder on PYTHONPATH" in ways_out[f"{TOOLS}[0].class_name"]
    assert "Did you mean Search?" in ways_out[f"{TOOLS}[1].class_name"]
    assert "Write `tools:`" in ways_out[f"{TOOLS}[2].class_name"]
    assert all("type: native" in ways_out[f"{TOOLS}[{i}].config.type"] for i in range(3)) and len(ways_out) == 6


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "there is no such file"),
        ("tools: [", "is not YAML"),
        ("- class_name: x\n", "has no list `tools`"),
        ("tools: none\n", "has no list `tools`"),
    ],
)
def test_a_file_of_tools_that_cannot_be_read(tmp_path: Path, text: str | None, reason: str) -> None:
    file = tmp_path / "tools.yaml"
    if text is not None:
        file.write_text(text)
    (problem,) = refused(tiny_plain(tmp_path, f"{TOOLS}={file}"))
    assert (problem.key, problem.value) == (TOOLS, str(file)) and reason in problem.reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "there is no such file"), ("def (", "is not Python")],
)
def test_a_file_of_function_tools_that_cannot_be_read(tmp_path: Path, text: str | None, reason: str) -> None:
    file = tmp_path / "functions.py"
    if text is not None:
        file.write_text(text)
    (problem,) = refused(tiny_plain(tmp_path, f"{FUNCTIONS}={file}"))
    assert (problem.key, problem.value) == (FUNCTIONS, str(file)) and reason in problem.reason


@pytest.mark.parametrize(("decorator", "warnings"), [("@function_tool", 0), ('@function_tool("add")', 0), ("", 1)])
def test_function_tools_are_decorated(tmp_path: Path, decorator: str, warnings: int) -> None:
    (tmp_path / "functions.py").write_text(f"{decorator}\ndef add(a: int, b: int) -> int:\n    return a + b\n")
    config = tiny_plain(tmp_path, f"{FUNCTIONS}={tmp_path}/functions.py", f"{DEFAULT}=tool_agent")
    assert len(preflight(config, devices=1, accelerator=False)) == warnings


def test_a_parser_that_verl_does_not_have(tmp_path: Path) -> None:
    assert_refused(tiny_plain(tmp_path, f"{FORMAT}=hermess"), FORMAT, "hermess", "Did you mean hermes?")
    assert_refused(tiny_plain(tmp_path, f"{FORMAT}=llama3_json"), FORMAT, "llama3_json", "Valid: ")
    own = tiny_plain(tmp_path, f"{FORMAT}=mine", "actor_rollout_ref.model.external_lib=my_parsers")
    (warning,) = preflight(own, devices=1, accelerator=False)
    assert warning.startswith(FORMAT)


def test_code_that_ray_brings_is_not_looked_for(tmp_path: Path) -> None:
    brings = "ray_kwargs.ray_init.runtime_env.working_dir=."
    config = tiny_plain(tmp_path, tools(tmp_path, "no_such_package.Tool"), f"{DEFAULT}=tool_agent", brings)
    assert preflight(config, devices=1, accelerator=False) == []
