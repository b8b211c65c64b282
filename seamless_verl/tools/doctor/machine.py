"""Probes of the machine: devices, memory, huge pages, clock, and the limits of a process."""

from __future__ import annotations

from seamless_verl.config.checks.settings import Problem
from seamless_verl.errors import ConfigError
from seamless_verl.resources.visible_devices import ORDER, PCI, VARIABLE, order_problem, visible_devices
from seamless_verl.tools.doctor.facts import ClockFacts, Facts
from seamless_verl.tools.doctor.finding import GIB, Finding, error, gib, note, of_problem, ok, warning

THREADS = "OMP_NUM_THREADS"
HUGE_TENSORS = "THP_MEM_ALLOC_ENABLE"  # torch's: its allocator then asks for transparent huge pages
NEEDED_MEMORY = 8 * GIB  # docs/cpu.md, for the smallest model
RESERVED_SHARE = 0.05  # of memory in reserved huge pages, which nothing of a run takes
CLOCK_ERROR_S = 0.1  # between machines: the shares of the ledger's shortest stages
FILES_AHEAD_S = 60.0  # a server of files may have another clock
LEAST_FILES, ENOUGH_FILES = 1024, 8192  # Ray's warning recommends the second
RAISED_FILES = 65536  # to which Ray raises the soft limit, as far as the hard one allows
ENOUGH_TASKS = 4096  # threads and processes: each of Ray's workers has dozens


def probe_devices(facts: Facts) -> list[Finding]:
    return _cores(facts) if facts.software.cpu else _accelerators(facts)


def _cores(facts: Facts) -> list[Finding]:
    cores, threads = facts.machine.cores, facts.environ.get(THREADS)
    found = [ok("devices", f"{cores} cores that a run may use as devices")]
    if threads is not None and threads.strip() != "1":
        text = f"{THREADS}={threads!r}: each process would compute with so many threads on the one core of its device"
        found = [warning("devices", text, f"Unset it, or set {THREADS}=1")]
    return found


def _accelerators(facts: Facts) -> list[Finding]:
    machine, value = facts.machine, facts.environ.get(VARIABLE)
    if not machine.devices:
        if machine.nvidia_files:
            text = "the NVIDIA driver has devices in /dev, and nvidia-smi lists none"
            return [error("devices", text, "Run nvidia-smi and mend what it says, or install it beside the driver")]
        if machine.other_files:
            text = "accelerators that are not NVIDIA's: nothing of this package was tested with them"
            return [warning("devices", text, "Use NVIDIA devices for what is documented")]
        if facts.joins_named_cluster:
            return [ok("devices", "none here: those of the cluster in RAY_ADDRESS are not looked at")]
        return []  # reported by the probe of the platform
    try:
        visible = visible_devices(machine.devices, value)
    except ConfigError as mistake:
        return [of_problem("devices", Problem.of(mistake))]
    order = facts.environ.get(ORDER)
    if (reason := order_problem(machine.devices, value, order)) is not None:
        return [warning("devices", f"{ORDER}={order!r}: {reason}", f"Set {ORDER}={PCI}")]
    sizes = sorted({gib(device.memory_bytes) for device in visible})
    of_list = "" if value is None else f" in {VARIABLE}={value}"
    return [ok("devices", f"{len(visible)} with {' or '.join(sizes)} each{of_list}")]


def probe_memory(facts: Facts) -> list[Finding]:
    total, available = facts.machine.memory, facts.machine.memory_available
    if total is None:
        return [ok("memory", f"{gib(available)} available")]
    text = f"{gib(total)}, of which {gib(available)} are available"
    if total < NEEDED_MEMORY:
        way_out = f"Use a machine, or a container's limit, of {gib(NEEDED_MEMORY)} or more"
        return [warning("memory", f"{text}: the smallest run needs {gib(NEEDED_MEMORY)}", way_out)]
    if available < NEEDED_MEMORY / 2:
        return [warning("memory", f"{text}: other programs have the rest", "End those that you do not need")]
    return [ok("memory", text)]


def probe_huge_pages(facts: Facts) -> list[Finding]:
    """Reserved huge pages are lost to a run, and transparent ones come as the kernel's mode says."""
    machine, asked = facts.machine, facts.environ.get(HUGE_TENSORS) == "1"
    if machine.memory and machine.reserved_huge > RESERVED_SHARE * machine.memory:
        text = f"{gib(machine.reserved_huge)} of memory are reserved as huge pages, which nothing of a run takes"
        return [warning("huge pages", text, "Give them back: sysctl vm.nr_hugepages=0")]
    mode = machine.transparent_huge
    if asked and mode == "never":
        text = f"{HUGE_TENSORS}=1 asks for transparent huge pages, and the kernel gives none"
        way_out = f"echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, or unset {HUGE_TENSORS}"
        return [warning("huge pages", text, way_out)]
    reserved = gib(machine.reserved_huge) if machine.reserved_huge else "none"
    return [ok("huge pages", f"{reserved} reserved, transparent ones: {mode or 'not known'}")]


def probe_clock(facts: Facts) -> list[Finding]:
    """Machines of one run agree about the time, by which device-seconds and journals are ordered."""
    clock = facts.clock
    if clock.behind_files > FILES_AHEAD_S:
        text = f"it is {clock.behind_files:.0f} s behind the time of this package's files"
        return [warning("clock", text, "Set it: timedatectl set-ntp true, or date -s")]
    if clock.synchronized and (clock.max_error is None or clock.max_error <= CLOCK_ERROR_S):
        return [ok("clock", "synchronized, as the kernel has it")]
    way_out = "Run an NTP client on every machine, such as chrony"
    if clock.synchronized is None:
        text = f"not known whether it is synchronized: the kernel does not say, and {_clients(clock)}"
        return [note("clock", text, way_out)]
    state = f"may be {clock.max_error:.1f} s off" if clock.synchronized else "is not synchronized, as the kernel has it"
    if not facts.joins_named_cluster:
        return [note("clock", f"{state}, and {_clients(clock)}; that matters only between machines", way_out)]
    text = f"{state}, and {_clients(clock)}; the devices' time is added up over the machines of RAY_ADDRESS"
    return [warning("clock", text, way_out)]


def _clients(clock: ClockFacts) -> str:
    """A container does not see those of its host."""
    return f"{' and '.join(clock.clients)} runs" if clock.clients else "no NTP client is seen to run here"


def probe_open_files(facts: Facts) -> list[Finding]:
    """What a process of the run may open: Ray raises the soft limit as far as the hard one allows."""
    soft, hard = facts.limits.open_files
    if soft is None:
        return [ok("open files", "no limit")]
    most = max(soft, min(RAISED_FILES if hard is None else hard, RAISED_FILES))
    text = f"at most {most} in a process, and each call of an agent takes one in the gateway"
    way_out = f"ulimit -Hn {RAISED_FILES} before the run; for a container --ulimit nofile={RAISED_FILES}"
    if most < ENOUGH_FILES:
        return [(error if most < LEAST_FILES else warning)("open files", text, way_out)]
    return [ok("open files", f"at most {most} in a process")]


def probe_processes(facts: Facts) -> list[Finding]:
    """Threads and processes, by the user's limit and by that of a container."""
    found, limits = list[Finding](), facts.limits
    if limits.processes is not None and limits.processes < ENOUGH_TASKS:
        text = f"this user may have {limits.processes} processes and threads, and each of Ray's workers has dozens"
        found.append(warning("processes", text, f"ulimit -u {ENOUGH_TASKS} before the run, or unlimited"))
    if limits.container_tasks is not None and limits.container_tasks < ENOUGH_TASKS:
        text = f"this container may start {limits.container_tasks} more, and each of Ray's workers has dozens"
        found.append(warning("processes", text, "Start the container with --pids-limit -1"))
    return found or [ok("processes", "enough threads and processes allowed")]


def probe_locked_memory(facts: Facts) -> list[Finding]:
    """On accelerators staged weights are pinned, once for each process that maps them."""
    size = facts.limits.locked_memory
    if facts.software.cpu:
        return []
    if size is None:
        return [ok("locked memory", "no limit")]
    text = f"{gib(size)} may be locked: staged weights beyond that are not pinned, and load more slowly"
    return [warning("locked memory", text, "ulimit -l unlimited; for a container --ulimit memlock=-1")]
