"""The command line: where the CPU platform's config group goes."""

from __future__ import annotations

import pytest

from seamless_verl.main_ppo import with_cpu_group


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([], ["+platform=cpu"]),
        (["a.b=1", "--cfg", "job"], ["+platform=cpu", "a.b=1", "--cfg", "job"]),
        (
            ["--config-dir", "d", "--config-name", "c", "a=1"],
            ["--config-dir", "d", "--config-name", "c", "+platform=cpu", "a=1"],
        ),
        (["--cfg", "job"], ["--cfg", "job", "+platform=cpu"]),
        (["+platform=cpu", "a=1"], ["+platform=cpu", "a=1"]),
    ],
)
def test_the_platform_joins_the_overrides(given: list[str], wanted: list[str]) -> None:
    assert with_cpu_group(["main", *given]) == ["main", *wanted]
