"""Devices to cores: parsing, mapping, and what each mistake says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.errors import ConfigError
from seamless_verl.platform.cores import (
    CPU_CORES,
    VISIBLE_DEVICES,
    core_of_rank,
    device_cores,
    job_cores,
    parse_indices,
    thread_binding,
)


def environment(cores: str, devices: str) -> dict[str, str]:
    return {CPU_CORES: cores, VISIBLE_DEVICES: devices}


def test_devices_name_positions_among_the_jobs_cores_in_their_own_order() -> None:
    assert device_cores(environment("4,6,9", "2,0")) == (9, 4)


def test_no_devices_given_means_nothing_to_pin() -> None:
    assert device_cores({CPU_CORES: "0,1"}) is None
    assert device_cores({}) is None


@given(st.lists(st.integers(0, 500), min_size=1, unique=True))
def test_what_is_written_is_read_back(cores: list[int]) -> None:
    text = ",".join(map(str, cores))
    everyone = ",".join(str(device) for device in range(len(cores)))
    assert job_cores({CPU_CORES: text}) == tuple(cores)
    assert device_cores(environment(text, everyone)) == tuple(cores)


@pytest.mark.parametrize("text", ["", "a", "0,", "0-1", "-1", "0 1", "1.0", "²"])
def test_a_malformed_list_is_refused_by_key_and_value(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_indices(VISIBLE_DEVICES, text)
    assert (refused.value.key, refused.value.value) == (VISIBLE_DEVICES, text)
    assert VISIBLE_DEVICES in refused.value.way_out


def test_an_index_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        device_cores(environment("0,1", "1,1"))


def test_a_device_beyond_the_jobs_cores_is_refused_with_both_lists() -> None:
    with pytest.raises(ConfigError, match=r"device 2 does not exist: the job has 2 cores \[0, 1\]"):
        device_cores(environment("0,1", "1,2"))


def test_devices_without_the_jobs_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match=CPU_CORES):
        device_cores({VISIBLE_DEVICES: "0"})


def test_each_rank_has_a_core_of_its_own_or_none() -> None:
    assert [core_of_rank((9, 4), rank) for rank in range(2)] == [9, 4]
    with pytest.raises(ConfigError, match="worker 2 has no device"):
        core_of_rank((9, 4), 2)


def test_thread_binding_is_one_core_a_rank() -> None:
    assert thread_binding((9, 4)) == "9|4"


def test_a_core_that_is_not_there_is_refused_by_name() -> None:
    from seamless_verl.platform.cores import pin_process

    with pytest.raises(ConfigError, match="4000") as refused:
        pin_process({4000})
    assert refused.value.key == CPU_CORES
