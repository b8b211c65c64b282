"""All probes, in the order in which their findings are mended: later ones often follow from earlier ones."""

from __future__ import annotations

from collections.abc import Callable

from seamless_verl.tools.doctor.facts import Facts
from seamless_verl.tools.doctor.finding import Finding
from seamless_verl.tools.doctor.machine import (
    probe_clock,
    probe_devices,
    probe_huge_pages,
    probe_locked_memory,
    probe_memory,
    probe_open_files,
    probe_processes,
)
from seamless_verl.tools.doctor.network import probe_connections, probe_ports, probe_proxies, probe_ray
from seamless_verl.tools.doctor.software import (
    probe_package,
    probe_platform,
    probe_python,
    probe_stack,
    probe_system,
    probe_versions,
    probe_vllm_name,
)
from seamless_verl.tools.doctor.storage import probe_disks, probe_shared_memory, probe_temporary

PROBES: tuple[Callable[[Facts], list[Finding]], ...] = (
    probe_system,
    probe_python,
    probe_package,
    probe_versions,
    probe_vllm_name,
    probe_stack,
    probe_platform,
    probe_devices,
    probe_memory,
    probe_shared_memory,
    probe_huge_pages,
    probe_open_files,
    probe_processes,
    probe_locked_memory,
    probe_temporary,
    probe_disks,
    probe_clock,
    probe_connections,
    probe_proxies,
    probe_ports,
    probe_ray,
)


def diagnose(facts: Facts) -> list[Finding]:
    """Every finding, those that are in order too."""
    return [finding for probe in PROBES for finding in probe(facts)]
