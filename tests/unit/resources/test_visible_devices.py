"""CUDA_VISIBLE_DEVICES: its devices in its order, or refused by name."""

from __future__ import annotations

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.resources.visible_devices import (
    VARIABLE,
    InstalledDevice,
    order_problem,
    parse_devices,
    visible_devices,
)

LISTED = """0, GPU-aa, 81559, Disabled
1, GPU-bb, 40536, Disabled
2, GPU-cc, 81559, [N/A]
3, GPU-dd, 81559, Enabled
"""
ALL = parse_devices(LISTED)
WHOLE = ALL[:3]


def test_the_drivers_list_is_read() -> None:
    assert ALL[1] == InstalledDevice(1, "GPU-bb", 40536 * 2**20) and [d.divided for d in ALL] == [False] * 3 + [True]
    assert parse_devices("No devices were found\n") == ()


@pytest.mark.parametrize(("value", "indices"), [(None, [0, 1, 2]), ("2,0", [2, 0]), ("GPU-cc, 1", [2, 1]), ("1", [1])])
def test_devices_come_in_the_order_of_the_list(value: str | None, indices: list[int]) -> None:
    assert [device.index for device in visible_devices(WHOLE, value)] == indices


@pytest.mark.parametrize(
    ("value", "reason", "way_out"),
    [
        ("", "names no device", "Unset it, or name some of 0,1,2,3"),
        ("0,7", "7 is no device of this machine", "Name some of 0,1,2,3"),
        ("-1", "-1 is no device", "Name some of 0,1,2,3"),
        ("GPU-c", "GPU-c is no device", "whole UUIDs as nvidia-smi -L prints them"),
        ("0,GPU-aa", "names device 0 twice", "Name each device once"),
        ("MIG-1234", "MIG-1234 is a part of a device", "nvidia-smi -mig 0"),
        ("3", "device 3 is divided into parts (MIG)", "nvidia-smi -i 3 -mig 0"),
        (None, "device 3 is divided into parts (MIG)", f"leave the device out of {VARIABLE}"),
    ],
)
def test_other_lists_are_refused_by_name(value: str | None, reason: str, way_out: str) -> None:
    with pytest.raises(ConfigError) as caught:
        visible_devices(ALL, value)
    assert caught.value.key == VARIABLE and caught.value.value == value
    assert reason in caught.value.reason and way_out in caught.value.way_out


@pytest.mark.parametrize(
    ("value", "order", "unclear"),
    [("0,1", None, True), ("0,1", "FASTEST_FIRST", True), ("0,1", "PCI_BUS_ID", False), (None, None, False),
     ("GPU-aa", None, False)],
)  # fmt: skip
def test_indices_of_unlike_devices_need_the_bus_order(value: str | None, order: str | None, unclear: bool) -> None:
    assert (order_problem(WHOLE, value, order) is not None) is unclear
    assert order_problem(ALL[::2], value, order) is None  # of one size
