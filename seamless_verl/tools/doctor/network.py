"""Probes of the network of this host: its name, connections to itself, proxies, ports, and Ray clusters."""

from __future__ import annotations

import os
from ipaddress import ip_address

from seamless_verl.config.checks.gateway import PORT
from seamless_verl.runtime.scratch import RAY_SOCKETS, SOCKET_PATH_BYTES
from seamless_verl.tools.doctor.facts import Facts, Judgement, error, ok, warning

INTERFACES = "GLOO_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"
ENOUGH_PORTS = 10_000


def probe_connections(facts: Facts) -> list[Judgement]:
    """This host's processes reach each other; gloo finds its interface by the host's name."""
    if not facts.loopback_connects:
        return error(f"{LOOPBACK} cannot be connected to", "Bring it up: ip link set lo up")
    if not facts.connects:
        text = f"a port of {facts.address}, this host's own address, cannot be connected to"
        return error(text, "Let the firewall accept connections of this host to itself")
    interface = f"set {INTERFACES} to a network interface"
    if facts.environ.get(INTERFACES):
        return ok(f"{facts.host_name} at {facts.address}")
    if facts.resolved is None:
        text = f"the host's name {facts.host_name!r} cannot be resolved, and gloo asks for it"
        return error(text, f"Add it to /etc/hosts, or {interface}")
    if facts.joins_named_cluster and ip_address(facts.resolved).is_loopback:
        text = f"the host's name {facts.host_name!r} stands for {facts.resolved}, where no other machine reaches it"
        return warning(text, f"Give it this host's address in /etc/hosts, or {interface}")
    return ok(f"{facts.host_name} at {facts.address}")


def probe_proxies(facts: Facts) -> list[Judgement]:
    """The gateway is reached without a proxy, to which SDKs give every address; agents in a run are kept from that."""
    proxies = _proxies(facts)
    hosts = dict.fromkeys((LOOPBACK, facts.address))
    if not {"http", "all"} & set(proxies):
        return ok("none for http")
    excepted = [entry.strip() for entry in proxies.get("no", "").split(",")]
    through = [host for host in hosts if not {"*", host} & set(excepted)]
    if not through:
        return ok("not for this host")
    text = f"http requests to {' and '.join(through)}, where the gateway listens, go to a proxy, but for a run's agents"
    return warning(text, f"Set NO_PROXY={','.join(['localhost', *hosts])}, and no_proxy to the same")


def _proxies(facts: Facts) -> dict[str, str]:
    """By scheme, with `no` for hosts without one; lower case goes before upper case, as SDKs read them."""
    upper = {name.lower(): value for name, value in facts.environ.items() if name.isupper()}
    lower = {name: value for name, value in facts.environ.items() if name.islower()}
    suffix = "_proxy"
    return {name.removesuffix(suffix): v for name, v in (upper | lower).items() if name.endswith(suffix) and v}


def probe_ports(facts: Facts) -> list[Judgement]:
    found = list[Judgement]()
    for port, reason in facts.ports.items():
        way_out = f"Take another one, or {PORT}=0 for any that is free"
        found += ok(f"{port} is free") if reason is None else error(f"{port} cannot be listened to: {reason}", way_out)
    if facts.ephemeral is not None:
        low, high = facts.ephemeral
        number = high - low + 1
        text = f"{number} for connections ({low} to {high})"
        way_out = "Allow more: echo '32768 60999' > /proc/sys/net/ipv4/ip_local_port_range"
        few = warning(f"{text}, of which each open call takes one or two", way_out)
        found += few if number < ENOUGH_PORTS else ok(text)
    return found


def probe_ray(facts: Facts) -> list[Judgement]:
    """Which cluster a run joins, and Ray nodes that run on this host already."""
    found, folder, most = _cluster(facts), facts.environ.get("RAY_TMPDIR"), SOCKET_PATH_BYTES - RAY_SOCKETS
    if folder is not None and len(os.fsencode(folder)) > most:
        text = f"RAY_TMPDIR={folder} is too long for the paths of Ray's sockets"
        found += error(text, f"Unset it, or name a folder of at most {most} bytes")
    return found + (_nodes(facts) if facts.ray_nodes else [])


def _cluster(facts: Facts) -> list[Judgement]:
    named, local = facts.environ.get("RAY_ADDRESS"), facts.local_address
    if facts.joins_named_cluster:
        if facts.named_answers is False:
            way_out = "Start the cluster, mend the address, or unset RAY_ADDRESS for a run on this machine"
            return error(f"RAY_ADDRESS={named}: nobody listens there", way_out)
        return ok(f"a run joins RAY_ADDRESS={named}{'' if facts.named_answers is None else ', which answers'}")
    if local is None or named or facts.on_cpu:
        return ok("a run starts a cluster of its own")  # on the CPU platform, whatever runs here
    if facts.local_answers:
        text = f"a run joins the cluster that runs here, at {local}, with its processes' environment"
        return warning(text, "RAY_ADDRESS=local gives a run its own")
    text = f"{facts.address_file} names {local}, where no cluster answers"
    return warning(text, f"Remove that file: rm {facts.address_file}")


def _nodes(facts: Facts) -> list[Judgement]:
    of = {node.pid: "" if node.run is None else f", of the run of process {node.run}" for node in facts.ray_nodes}
    named = ", ".join(f"process {node.pid} ({node.session}{of[node.pid]})" for node in facts.ray_nodes)
    runs = dict.fromkeys(str(node.run) for node in facts.ray_nodes if node.run is not None)
    alone = [str(node.pid) for node in facts.ray_nodes if node.run is None]
    ways_out = [f"Wait for that run, or stop it: kill {' '.join(runs)}"] if runs else []
    ways_out += [f"End what no program uses: kill {' '.join(alone)}"] if alone else []
    return warning(f"Ray runs here already, and shares cores and memory with a run: {named}", ". ".join(ways_out))
