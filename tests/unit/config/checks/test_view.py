"""What is refused of the view's settings and the metrics' port: other trainer modes, and where nothing can listen."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support.config import assert_refused, refused, tiny_run

from seamless_verl.config import preflight

VIEW = "seamless.view"
ON = f"{VIEW}='127.0.0.1:0'"


def test_the_view_of_a_run_by_our_trainer_is_fine(tmp_path: Path) -> None:
    assert preflight(tiny_run(tmp_path, ON), devices=1, accelerator=False) == []
    everywhere = tiny_run(tmp_path, f"{VIEW}='0.0.0.0:0'")
    assert preflight(everywhere, devices=1, accelerator=False) == []


def test_other_trainers_write_nothing_to_show(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, ON, "trainer.v1.trainer_mode=sync")
    assert_refused(config, VIEW, "127.0.0.1:0", "Set trainer.v1.trainer_mode=seamless")


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = tiny_run(tmp_path, f"{VIEW}='{address}'")
        assert_refused(config, VIEW, address, f"Set {VIEW}=127.0.0.1:0 for any port that is free")
    assert preflight(config, devices=1, accelerator=False) == []


@pytest.mark.parametrize("address", ["127.0.0.1:65536", "127.0.0.1:9000", "127.0.0.1", "x:y"])
def test_addresses_that_cannot_be(tmp_path: Path, address: str) -> None:
    gateway = ("seamless.gateway.enabled=true", "seamless.gateway.port=8999", "seamless.gateway.shards=2")
    problems = refused(tiny_run(tmp_path, f"{VIEW}='{address}'", *gateway))
    (problem,) = [one for one in problems if one.key == VIEW]
    assert problem.value == address


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, f"{VIEW}='203.0.113.7:0'")
    assert_refused(config, VIEW, "203.0.113.7:0", f"Set {VIEW}=127.0.0.1:0")


METRICS = "seamless.metrics_port"


def test_metrics_of_a_run_by_our_trainer_are_fine(tmp_path: Path) -> None:
    assert preflight(tiny_run(tmp_path, f"{METRICS}=0"), devices=1, accelerator=False) == []


def test_other_trainers_serve_no_metrics(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, f"{METRICS}=0", "trainer.v1.trainer_mode=sync")
    assert_refused(config, METRICS, 0, "Set trainer.v1.trainer_mode=seamless")


def test_a_port_for_metrics_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        config = tiny_run(tmp_path, f"{METRICS}={port}")
        assert_refused(config, METRICS, port, f"Set {METRICS} to another one, or to 0")
    assert preflight(config, devices=1, accelerator=False) == []


def test_the_views_port_is_not_that_of_the_metrics(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    config = tiny_run(tmp_path, f"{VIEW}='127.0.0.1:{port}'", f"{METRICS}={port}")
    assert_refused(config, METRICS, port, f"Set {METRICS} to another one, or to 0")


@pytest.mark.parametrize("port", ["9000", "65536", "http", "-1"])
def test_ports_for_metrics_that_cannot_be(tmp_path: Path, port: str) -> None:
    gateway = ("seamless.gateway.enabled=true", "seamless.gateway.port=8999", "seamless.gateway.shards=2")
    (problem,) = [one for one in refused(tiny_run(tmp_path, f"{METRICS}={port}", *gateway)) if one.key == METRICS]
    assert str(problem.value) == port and "Set " in str(problem)


def test_an_exporter_that_is_not_installed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "tempo")
    traced = tiny_run(tmp_path, "seamless.gateway.enabled=true")
    assert_refused(traced, "OTEL_TRACES_EXPORTER", "tempo", "Set OTEL_TRACES_EXPORTER=otlp, console or none")
    assert preflight(tiny_run(tmp_path), devices=1, accelerator=False) == [], "it has no sessions to trace"
