"""The folder of a bench or a comparison may have any characters that hydra reads as its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from seamless_verl.tools.bench.soak import overrides_of
from seamless_verl.tools.compare.job import Options, job_named, shared_overrides

ODD = Path("/out/a,b = {c} 'd' #1/[x]: (y)\\")


def of_soak() -> list[str]:
    return overrides_of(ODD)


def of_comparison() -> list[str]:
    job = job_named("w2", (), ODD)
    return [*job.overrides, *shared_overrides(Options(), 1, ODD)]


@pytest.mark.parametrize("overrides", [of_soak, of_comparison])
def test_hydra_reads_the_folders_as_they_are(overrides: Callable[[], list[str]]) -> None:
    found = {one.key_or_group: one.value() for one in OverridesParser.create().parse_overrides(overrides())}
    folders = {key: value for key, value in found.items() if str(value).startswith("/out")}
    assert folders["trainer.default_local_dir"] == str(ODD / "checkpoints")
    assert folders["hydra.run.dir"] == str(ODD / "hydra")
    assert all(value.startswith(str(ODD)) for value in folders.values())
