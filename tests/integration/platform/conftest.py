"""A forkserver for Megatron's ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.forkserver import forkserver_with
from support.megatron_runs import MODULE
from support.paths import child_environment


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Of processes that are forks of one, as a run's workers are: most of a rank's time would be its imports."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (child_environment() | {"PYTHONWARNINGS": "ignore"}).items():
            patch.setenv(name, value)
        with forkserver_with(MODULE, tmp_path_factory.mktemp("forkserver"), import_s=240) as environ:
            yield environ
