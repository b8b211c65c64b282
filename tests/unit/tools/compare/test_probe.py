"""The check of the arms says which one it is at: each takes seconds, and a recipe makes its data first."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.tools.compare import probe as probing
from seamless_verl.tools.compare.arms import JobFacts, Machines, parse_arms
from seamless_verl.tools.compare.job import Options, job_named
from seamless_verl.tools.compare.probe import ProbedArm, check_enough, check_steps, probe, probe_arms


def test_each_arm_is_named_before_it_is_checked(tmp_path: Path) -> None:
    """Neither of these has the devices that it needs, so that no process checks them."""
    job, said = job_named(None, ["a=1"], tmp_path), list[str]()
    facts = JobFacts(Machines(1, 1), batch=4, mini_batch=4, pool_backend="gloo")
    arms = parse_arms("separate_async,separate_async:a.b=1")
    with pytest.raises(ConfigError, match="none can run here"):
        probe_arms(job, arms, facts, Options(), tmp_path, said.append)
    assert said == ["checking arm 1 of 2: separate_async\n", "checking arm 2 of 2: separate_async:a.b=1\n"]


def test_a_check_that_takes_too_long_names_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        def wait(self, timeout: float) -> int:
            raise subprocess.TimeoutExpired("run.sh", timeout)

    def start(command: Sequence[str], log: BinaryIO, env: object) -> AbstractContextManager[Slow]:
        log.write(b"downloads 3 of 4")
        log.flush()
        return nullcontext(Slow())

    monkeypatch.setattr(probing, "managed_process", start)
    with pytest.raises(ConfigError, match=r"took longer than 900 s.*downloads 3 of 4.*log.txt") as refused:
        probe(job_named(None, ["a=1"], tmp_path), [], tmp_path)
    assert refused.value.key == "settings"


def probed(**reasons: str) -> list[ProbedArm]:
    """Arms by mode, each with the reason why it cannot run here, or "" if it can."""
    arms = parse_arms(",".join(reasons))
    return [ProbedArm(arm, (), None if reasons[arm.name] else {}, reasons[arm.name]) for arm in arms]


def test_one_arm_of_several_has_nothing_to_be_compared_with() -> None:
    with pytest.raises(ConfigError) as refused:
        check_enough(probed(sync="x=1: is bad. Set x=2.", seamless="", separate_async="one device"))
    assert str(refused.value) == (
        "--arms=['sync', 'seamless', 'separate_async']: only seamless can run here, which leaves nothing to compare it "
        "with. sync: x=1: is bad. Set x=2; separate_async: one device. "
        "Give two arms that can run here, or this one alone: --arms seamless"
    )
    check_enough(probed(seamless=""))
    check_enough(probed(sync="x", colocate_async="", seamless=""))


def test_an_arm_with_too_few_steps_of_its_own_is_refused() -> None:
    arms = {name: {"trainer": {"total_training_steps": steps}} for name, steps in (("grpo", 15), ("dars", 4))}
    with pytest.raises(ConfigError, match=r"total_training_steps=4: in arm dars leaves nothing.*Give it 5 or more"):
        check_steps(arms, Options(skip=4))
    check_steps(arms, Options(skip=3))


@pytest.mark.parametrize("every", [-1, 5])
def test_an_arm_that_validates_too_seldom_is_refused(every: int) -> None:
    arms = {"dars": {"trainer": {"total_training_steps": 12, "test_freq": every}}}
    options = Options(equal_tokens=True, validate=5)
    with pytest.raises(ConfigError, match=rf"test_freq={every}: in arm dars, with 12 steps.*Give it 1 to 4"):
        check_steps(arms, options)
    arms["dars"]["trainer"]["test_freq"] = 4
    check_steps(arms, options)
