"""An agent is found by its name, or the mistake in the name is told."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from seamless_verl.agents.callable import load_agent
from seamless_verl.errors import ConfigError

FILE = """
from dataclasses import dataclass
@dataclass
class Kept:
    n: int
    async def run(self, task, endpoint): return self.n
class Space:
    async def agent(task, endpoint): return 1.0
async def agent(task, endpoint): return 0.5
number = 3
"""


def written(tmp_path: Path, text: str = FILE) -> Path:
    path = tmp_path / "my agent.py"
    path.write_text(text)
    return path


def test_from_a_module_and_from_a_file(tmp_path: Path) -> None:
    assert load_agent("seamless_verl.agents.callable:load_agent") is load_agent
    path = written(tmp_path)
    assert load_agent(f"{path}:agent").__name__ == "agent"
    assert load_agent(f"{path}:Space.agent").__qualname__ == "Space.agent"
    kept = load_agent(f"{path}:Kept")(3)
    assert pickle.loads(pickle.dumps(kept)) == kept


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("agent", "is not of the form place:name"),
        ("pkg.module:", "is not of the form place:name"),
        ("no_such_pkg.module:agent", "there is no module 'no_such_pkg'"),
        ("json.nothing:agent", "there is no module 'json.nothing'"),
        ("json:agent", "json has no 'agent'.*It has: .*loads"),
        ("json:codecs", "'codecs' is a module, which cannot be called"),
        ("nowhere/agent.py:agent", "there is no file nowhere/agent.py.*working directory"),
    ],
)
def test_mistakes_name_the_key_the_value_and_the_way_out(where: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.agent='{where}': .*{says}"):
        load_agent(where, key="rollout.agent")


@pytest.mark.parametrize("body", ["import no_such_thing", "1 / 0", "def ("])
def test_a_file_that_does_not_import_is_named_with_its_error(tmp_path: Path, body: str) -> None:
    with pytest.raises(ConfigError, match="importing it raised") as caught:
        load_agent(f"{written(tmp_path, body)}:agent")
    assert caught.value.__cause__ is not None


def test_a_module_that_lacks_a_module_is_not_taken_for_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_other.py").write_text("import no_such_thing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="importing it raised ModuleNotFoundError: No module named 'no_such_thing'"):
        load_agent("needs_other:agent")
