"""The list of differences names points that there are."""

from __future__ import annotations

import pytest
from support.conformance_differences import LISTED, Listed

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.serial]


@pytest.mark.parametrize("one", LISTED, ids=lambda one: one.point)
def test_what_is_listed_is_a_point(one: Listed, points: set[str]) -> None:
    module, _, name = one.point.partition("::")
    if not any(point.startswith(f"{module}::") for point in points):
        pytest.skip(f"{module} is not part of this run")
    assert any(one.covers(point) for point in points), name
    assert one.reason and one.servers
