"""The check of the arms says which one it is at: each takes seconds, and a recipe makes its data first."""

from __future__ import annotations

from pathlib import Path

import pytest

from seamless_verl.compare.arms import JobFacts, Machines, parse_arms
from seamless_verl.compare.job import job_named
from seamless_verl.compare.plan import Options
from seamless_verl.compare.probing import probe_arms
from seamless_verl.errors import ConfigError


def test_each_arm_is_named_before_it_is_checked(tmp_path: Path) -> None:
    """Neither of these has the devices that it needs, so that no process checks them."""
    job, said = job_named(None, ["a=1"], tmp_path), list[str]()
    facts = JobFacts(Machines(1, 1, accelerator=False), batch=4, mini_batch=4, pool_backend="gloo")
    arms = parse_arms("separate_async,separate_async:a.b=1")
    with pytest.raises(ConfigError, match="none can run here"):
        probe_arms(job, arms, facts, Options(), tmp_path, said.append)
    assert said == ["checking arm 1 of 2: separate_async\n", "checking arm 2 of 2: separate_async:a.b=1\n"]
