"""Probes of the network of this host: its name, connections to itself, proxies, ports, and Ray clusters."""

from __future__ import annotations

import os
from ipaddress import ip_address

from seamless_verl.config.checks.gateway import PORT
from seamless_verl.errors import Finding, Level
from seamless_verl.runtime.scratch import RAY_SOCKETS, SOCKET_PATH_BYTES
from seamless_verl.tools.doctor.gather import Facts

INTERFACES = "GLOO_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"
ENOUGH_PORTS = 10_000
EPHEMERAL = "/proc/sys/net/ipv4/ip_local_port_range"


def probe_connections(facts: Facts) -> list[Finding]:
    """This host's processes reach each other; gloo finds its interface by the host's name."""
    network = facts.network
    if not network.loopback_connects:
        return [Finding("network", Level.ERROR, f"{LOOPBACK} cannot be connected to", "Bring it up: ip link set lo up")]
    if not network.connects:
        text = f"a port of {network.address}, this host's own address, cannot be connected to"
        return [Finding("network", Level.ERROR, text, "Let the firewall accept connections of this host to itself")]
    if network.resolved is None and not facts.environ.get(INTERFACES):
        text = f"the host's name {network.host_name!r} cannot be resolved, and gloo asks for it"
        return [
            Finding("network", Level.ERROR, text, f"Add it to /etc/hosts, or set {INTERFACES} to a network interface")
        ]
    if facts.joins_named_cluster and network.resolved is not None and _is_loopback(network.resolved):
        text = f"the host's name {network.host_name!r} stands for {network.resolved}, where no other machine reaches it"
        if not facts.environ.get(INTERFACES):
            way_out = f"Give it this host's address in /etc/hosts, or set {INTERFACES} to a network interface"
            return [Finding("network", Level.WARNING, text, way_out)]
    return [Finding("network", Level.OK, f"{network.host_name} at {network.address}")]


def probe_proxies(facts: Facts) -> list[Finding]:
    """The gateway is reached without a proxy, to which SDKs give every address; agents in a run are kept from that."""
    proxies = _proxies(facts)
    hosts = dict.fromkeys((LOOPBACK, facts.network.address))
    if not {"http", "all"} & set(proxies):
        return [Finding("proxies", Level.OK, "none for http")]
    excepted = [entry.strip() for entry in proxies.get("no", "").split(",")]
    through = [host for host in hosts if not {"*", host} & set(excepted)]
    if not through:
        return [Finding("proxies", Level.OK, "not for this host")]
    text = f"http requests to {' and '.join(through)}, where the gateway listens, go to a proxy, but for a run's agents"
    return [
        Finding(
            "proxies", Level.WARNING, text, f"Set NO_PROXY={','.join(['localhost', *hosts])}, and no_proxy to the same"
        )
    ]


def probe_ports(facts: Facts) -> list[Finding]:
    network = facts.network
    found = [_port(port, reason) for port, reason in network.ports.items()]
    if network.ephemeral is not None:
        low, high = network.ephemeral
        text = f"{high - low + 1} for connections ({low} to {high})"
        if high - low + 1 < ENOUGH_PORTS:
            way_out = f"Allow more: echo '32768 60999' > {EPHEMERAL}"
            found.append(Finding("ports", Level.WARNING, f"{text}, of which each open call takes one or two", way_out))
        else:
            found.append(Finding("ports", Level.OK, text))
    return found


def _port(port: int, reason: str | None) -> Finding:
    if reason is None:
        return Finding("ports", Level.OK, f"{port} is free")
    return Finding(
        "ports",
        Level.ERROR,
        f"{port} cannot be listened to: {reason}",
        f"Take another one, or {PORT}=0 for any that is free",
    )


def probe_ray(facts: Facts) -> list[Finding]:
    """Which cluster a run joins, and Ray nodes that run on this host already."""
    return [_cluster(facts), *_ray_folder(facts), *_nodes(facts)]


def _cluster(facts: Facts) -> Finding:
    found, named = facts.ray, facts.environ.get("RAY_ADDRESS")
    if facts.joins_named_cluster:
        if found.named_answers is False:
            way_out = "Start the cluster, mend the address, or unset RAY_ADDRESS for a run on this machine"
            return Finding("Ray", Level.ERROR, f"RAY_ADDRESS={named}: nobody listens there", way_out)
        state = "" if found.named_answers is None else ", which answers"
        return Finding("Ray", Level.OK, f"a run joins RAY_ADDRESS={named}{state}")
    if found.local_address is None or named or facts.software.cpu:
        return Finding("Ray", Level.OK, "a run starts a cluster of its own")  # on the CPU platform, whatever runs here
    if found.local_answers:
        text = f"a run joins the cluster that runs here, at {found.local_address}, with its processes' environment"
        return Finding("Ray", Level.WARNING, text, "RAY_ADDRESS=local gives a run its own")
    text = f"{found.address_file} names {found.local_address}, where no cluster answers"
    return Finding("Ray", Level.WARNING, text, f"Remove that file: rm {found.address_file}")


def _ray_folder(facts: Facts) -> list[Finding]:
    folder = facts.environ.get("RAY_TMPDIR")
    if folder is None or len(os.fsencode(folder)) + RAY_SOCKETS <= SOCKET_PATH_BYTES:
        return []
    most = SOCKET_PATH_BYTES - RAY_SOCKETS
    text = f"RAY_TMPDIR={folder} is too long for the paths of Ray's sockets"
    return [Finding("Ray", Level.ERROR, text, f"Unset it, or name a folder of at most {most} bytes")]


def _nodes(facts: Facts) -> list[Finding]:
    nodes = facts.ray.nodes
    if not nodes:
        return []
    of = {node.pid: "" if node.run is None else f", of the run of process {node.run}" for node in nodes}
    named = ", ".join(f"process {node.pid} ({node.session}{of[node.pid]})" for node in nodes)
    text = f"Ray runs here already, and shares cores and memory with a run: {named}"
    runs = dict.fromkeys(str(node.run) for node in nodes if node.run is not None)
    alone = [str(node.pid) for node in nodes if node.run is None]
    ways_out = [f"Wait for that run, or stop it: kill {' '.join(runs)}"] if runs else []
    ways_out += [f"End what no program uses: kill {' '.join(alone)}"] if alone else []
    return [Finding("Ray", Level.WARNING, text, ". ".join(ways_out))]


def _proxies(facts: Facts) -> dict[str, str]:
    """By scheme, with `no` for hosts without one; lower case goes before upper case, as SDKs read them."""
    upper = {name.lower(): value for name, value in facts.environ.items() if name.isupper()}
    lower = {name: value for name, value in facts.environ.items() if name.islower()}
    suffix = "_proxy"
    names = {name: value for name, value in (upper | lower).items() if name.endswith(suffix) and value}
    return {name.removesuffix(suffix): value for name, value in names.items()}


def _is_loopback(address: str) -> bool:
    return ip_address(address).is_loopback
