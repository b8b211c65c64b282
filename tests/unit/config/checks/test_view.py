"""What is refused of the view's settings: other trainer modes, and addresses at which nothing can listen."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support.config import assert_refused, refused, tiny_run

from seamless_verl.config import preflight

ON = "seamless.view.enabled=true"


def test_the_view_of_a_run_by_our_trainer_is_fine(tmp_path: Path) -> None:
    assert preflight(tiny_run(tmp_path, ON), devices=1, accelerator=False) == []
    everywhere = tiny_run(tmp_path, ON, "seamless.view.host='0.0.0.0'")
    assert preflight(everywhere, devices=1, accelerator=False) == []


def test_other_trainers_write_nothing_to_show(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, ON, "trainer.v1.trainer_mode=sync")
    assert_refused(config, "seamless.view.enabled", True, "Set trainer.v1.trainer_mode=seamless")


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = tiny_run(tmp_path, ON, f"seamless.view.port={port}")
        assert_refused(config, "seamless.view.port", port, "or to 0 for any that is free")
    assert preflight(config, devices=1, accelerator=False) == []


@pytest.mark.parametrize("port", [65536, 9000])
def test_ports_that_cannot_be(tmp_path: Path, port: int) -> None:
    gateway = ("seamless.gateway.enabled=true", "seamless.gateway.port=8999", "seamless.gateway.shards=2")
    problems = refused(tiny_run(tmp_path, ON, f"seamless.view.port={port}", *gateway))
    (problem,) = [one for one in problems if one.key == "seamless.view.port"]
    assert problem.value == port


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, ON, "seamless.view.host='203.0.113.7'")
    assert_refused(config, "seamless.view.host", "203.0.113.7", "Set seamless.view.host=127.0.0.1")


def test_settings_of_a_view_that_is_off_bring_a_warning(tmp_path: Path) -> None:
    (warning,) = preflight(tiny_run(tmp_path, "seamless.view.port=8000"), devices=1, accelerator=False)
    assert "seamless.view.port=8000: is not read while seamless.view.enabled=false" in warning
