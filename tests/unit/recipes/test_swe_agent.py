"""The swe_agent recipe's repositories and what is read of an agent, without any process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pyarrow import parquet
from support.recipes import SWE_AGENT, load

from seamless_verl.errors import ConfigError

BUGS, DATA, COLLECT, SOLVE = load(SWE_AGENT, "bugs", "data", "collect", "solve")


def test_only_sources_are_collected(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    for name in ("a.py", "pkg/b.py", "test_a.py", "notes.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "link.py").symlink_to("/etc/hostname")
    (tmp_path / "bytes.py").write_bytes(b"\xff")
    (tmp_path / "long.py").write_text("#" * (COLLECT.FILE_BYTES + 1))
    os.mkfifo(tmp_path / "pipe.py")
    assert {str(Path(name).relative_to(tmp_path)): text for name, text in COLLECT.sources(tmp_path).items()} == {
        "a.py": "a.py",
        "pkg/b.py": "pkg/b.py",
    }


def test_all_replies_are_read_from_the_log(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": "a command"},
        {"role": "user", "content": "its output", "extra": {"returncode": 0}},
        {"role": "user", "content": "no command", "extra": {"model_response": "b" * (COLLECT.REPLY_CHARS + 1)}},
        {"role": "assistant", "content": None},
    ]
    log = tmp_path / "log.json"
    log.write_text(json.dumps({"messages": messages}))
    assert COLLECT.replies(log) == ["a command", "b" * COLLECT.REPLY_CHARS]


@pytest.mark.parametrize(("replies", "part"), [([], 0.0), (["ab\n", " \ufffd"], 0.8), (["\t\x7f"], 0.0)])
def test_readable_is_a_share(replies: list[str], part: float) -> None:
    assert SOLVE.readable(replies) == part


def test_the_agents_environment_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_ENV", str(tmp_path))
    with pytest.raises(ConfigError, match=r"AGENT_ENV=.*no mini-swe-agent.*setup\.sh"):
        SOLVE.interpreter()


def test_the_data_is_the_seeds(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        DATA.make_split(tmp_path / name, "train", seed, 5)
    a, b, c = (content(tmp_path / name) for name in "abc")
    assert a == b != c and len(a) == 5 * (2 + 1) + 2 + sum(name.endswith("rates.py") for name in a)
    rows = parquet.read_table(tmp_path / "a" / "train.parquet").to_pylist()
    assert [row["extra_info"]["index"] for row in rows] == list(range(5))
    for row in rows:
        info, [message] = row["extra_info"], row["prompt"]
        [shown] = Path(info["repository"]).glob("test_*.py")
        assert shown.name in message["content"] and Path(info["tests"], DATA.HIDDEN).is_file()


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.py"))}
