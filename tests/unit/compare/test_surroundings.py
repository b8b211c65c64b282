"""Which variables a manifest has."""

from __future__ import annotations

from seamless_verl.compare.surroundings import kept_environment


def test_what_steers_a_run_is_kept_and_no_secret() -> None:
    steering = {"SEAMLESS_LOG": "1", "VERL_PLATFORM": "cpu", "NCCL_DEBUG": "INFO"}
    secrets = ("SEAMLESS_RUNNER_KEY", "SEAMLESS_SESSION_KEY", "VERL_TOKEN", "SEAMLESS_secret", "VERL_DB_PASSWORD")
    assert kept_environment({**steering, **dict.fromkeys(secrets, "s"), "HOME": "/root"}) == steering
