"""Which cluster a run names: its setting, or the environment."""

from __future__ import annotations

import pytest

from seamless_verl.runtime.supervisor import named_cluster


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
