"""Which cluster a run names: its setting, or the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from seamless_verl.runtime.ray_address import named_cluster, send_token


@pytest.mark.parametrize(("address", "variable", "named"), [
    (None, "", ""),
    (None, "10.0.0.1:6379", "10.0.0.1:6379"),
    ("", "local", "local"),
    ("local", "10.0.0.1:6379", "local"),
    ("10.0.0.2:6379", "local", "10.0.0.2:6379"),
    ("auto", "10.0.0.1:6379", "10.0.0.1:6379"),
    ("auto", "local", "local"),
    ("auto", "", "auto"),
])  # fmt: skip
def test_a_cluster_is_named_as_ray_reads_it(address: str | None, variable: str, named: str) -> None:
    assert named_cluster(address, {"RAY_ADDRESS": variable}) == named


def test_a_token_that_is_kept_is_shown_unless_the_user_chose(tmp_path: Path) -> None:
    nothing = {"HOME": str(tmp_path)}
    send_token(nothing)
    assert nothing == {"HOME": str(tmp_path)}
    (tmp_path / ".ray").mkdir()
    (kept := tmp_path / ".ray" / "auth_token").write_text("0")
    for environ in ({"HOME": str(tmp_path)}, {"RAY_AUTH_TOKEN": "0"}, {"RAY_AUTH_TOKEN_PATH": str(kept)}):
        send_token(environ)
        assert environ["RAY_AUTH_MODE"] == "token"
    chosen = {"HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled"}
    send_token(chosen)
    assert chosen["RAY_AUTH_MODE"] == "disabled"
