"""Runs every test that takes a `server` against the gateway and against vLLM's own server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.conformance_differences import listed
from support.conformance_server import GATEWAY, VLLM, Server, Servers, running_servers

POINTS = pytest.StashKey[set[str]]()


@pytest.fixture(scope="session")
def servers(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with running_servers(nano / "model", tmp_path_factory.mktemp("journal") / "journal.sqlite") as servers:
        yield servers


@pytest.fixture(params=[GATEWAY, VLLM])
def server(request: pytest.FixtureRequest, servers: Servers) -> Server:
    return servers.server(request.param)


@pytest.fixture
def points(request: pytest.FixtureRequest) -> set[str]:
    """The names of all collected tests that take a server."""
    return request.config.stash[POINTS]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    points = config.stash.setdefault(POINTS, set())
    for item in items:
        name = getattr(item, "callspec", None) and item.callspec.params.get("server")
        if name is None or "servers" not in item.fixturenames:
            continue
        points.add(point := point_of(item, name))
        if (known := listed(point, name)) is not None:
            item.add_marker(pytest.mark.xfail(strict=True, reason=known.reason, raises=known.raises))


def point_of(item: Any, server: str) -> str:
    """The name that both servers' tests share."""
    parameters = f"-{item.callspec.id}-".replace(f"-{server}-", "-", 1).strip("-")
    module = item.path.stem.removeprefix("test_conformance_")
    return f"{module}::{item.originalname}" + (f"[{parameters}]" if parameters else "")
