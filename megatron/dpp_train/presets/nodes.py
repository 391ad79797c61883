"""The nodes of a job, which the environment names, and the torchrun of this one."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.dpp.errors import ConfigError, require
from megatron.dpp.hosts import addresses, is_loopback, own_interface, with_port

_OF_SLURM = {
    "NUM_NODES": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "NODE_RANK": ("SLURM_NODEID",),
}
"""Our variables, and those of SLURM that stand in for them."""
_MOST = 1 << 20
_ANNOUNCE_SECONDS = 5
_IP = re.compile(r"\d+(\.\d+){3}|[\da-fA-F:]+:[\da-fA-F:.%a-z]*")


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Placement and rendezvous of a job's processes, as seen from one node.

    Args:
        port: of node 0. None on a single node: torchrun finds a free one.
        wait: seconds that the nodes wait for each other.
        ips: addresses between nodes, one per node or one per rank; empty without ``NODE_IPS``.
    """

    count: int = 1
    rank: int = 0
    master: str = "localhost"
    port: int | None = None
    wait: int = 300
    ips: tuple[str, ...] = ()

    def torchrun(self, per_node: int) -> list[str]:
        """torchrun's arguments for ``per_node`` processes on this node."""
        words = ["--nproc-per-node", str(per_node), "--nnodes", str(self.count)]
        if self.port is None:
            return [*words, "--standalone"]
        words += ["--node-rank", str(self.rank), "--master-addr", self.master]
        return [*words, "--master-port", str(self.port), "--rdzv-conf", f"timeout={self.wait}"]


def whole(name: str, values: Mapping[str, str], default: int | None = None) -> int:
    """A variable's value.

    Raises:
        ConfigError: it is no whole number of at least 1.
    """
    text = values.get(name) or ("" if default is None else str(default))
    require(
        re.fullmatch(r"[1-9]\d*", text) and int(text) <= _MOST,
        f"{name}={text}: must be a whole number, 1 to {_MOST}",
    )
    return int(text)


def find_nodes(env: Mapping[str, str]) -> Nodes:
    """The nodes that the environment names. Each of our variables wins over SLURM's.

    Raises:
        ConfigError: an impossible value, or several SLURM tasks on a node.
    """
    values = dict(env) | {
        name: next(filter(None, map(env.get, (name, *slurm))), "")
        for name, slurm in _OF_SLURM.items()
    }
    count, port = whole("NUM_NODES", values, 1), values.get("MASTER_PORT") or ""
    require(
        not port or (re.fullmatch(r"[1-9]\d{0,4}", port) and int(port) <= 65535),
        f"MASTER_PORT={port}: must be a port number, 1 to 65535",
    )
    _refuse_tasks(env, count)
    if count == 1:
        return Nodes(port=int(port) if port else None)
    rank = values["NODE_RANK"]
    require(rank, "NODE_RANK is not set: number the nodes from 0")
    require(
        re.fullmatch(r"\d+", rank) and int(rank) < count,
        f"NODE_RANK={rank}: must be a whole number from 0 to {count - 1} (NUM_NODES={count})",
    )
    master = values.get("MASTER_ADDR") or _first_host(values.get("SLURM_JOB_NODELIST", ""))
    require(master, "MASTER_ADDR is not set: name the host of NODE_RANK=0")
    return Nodes(
        count=count,
        rank=int(rank),
        master=master,
        port=int(port or 6000),
        wait=whole("WAIT_SECONDS", values, 300),
        ips=_ips(values.get("NODE_IPS", "")),
    )


def _ips(text: str) -> tuple[str, ...]:
    ips = tuple(text.split(",")) if text else ()
    for address in ips:
        require(_IP.fullmatch(address), f"NODE_IPS={text}: {address!r} is not an IP address")
    return ips


def _refuse_tasks(env: Mapping[str, str], count: int) -> None:
    """Refuse several tasks of ``srun`` on one node, each of which would start a run of its own."""
    if env.get("NUM_NODES") or "SLURM_STEP_NUM_TASKS" not in env:
        return
    tasks = whole("SLURM_STEP_NUM_TASKS", env, 1)
    require(
        tasks == count,
        f"SLURM runs {tasks} tasks on {count} nodes: start one per node, srun "
        "--ntasks-per-node=1 --cpus-per-task=CORES megatron-dpp train ...",
    )


def _first_host(hosts: str) -> str:
    """The first of SLURM's ``node[03-07,11],other``."""
    if hosts and shutil.which("scontrol"):
        command = ["scontrol", "show", "hostnames", hosts]
        names = subprocess.run(command, capture_output=True, text=True).stdout.split()
        if names:
            return names[0]
    first = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)", hosts)
    return "".join(part or "" for part in first.groups()) if first else ""


def own_address() -> str:
    """An address of this host that others may reach, else ``localhost``."""
    own = [each for each in addresses() if not is_loopback(each)]
    return (own or ["localhost"])[0]


def meet(nodes: Nodes, per_node: int) -> dict[str, str]:
    """Wait for node 0, or announce it; variables that name this node's network interface.

    Raises:
        ConfigError: node 0 does not come, or an address of ``NODE_IPS`` is not one of this node.
    """
    own = nodes.ips[nodes.rank : nodes.rank + 1]
    if len(nodes.ips) != nodes.count:
        own = nodes.ips[nodes.rank * per_node :][:per_node]
    if nodes.rank:
        _wait_for_master(nodes)
    else:
        print(
            f"master   {with_port(nodes.master, nodes.port or 0)}, waiting {nodes.wait} s for "
            f"{nodes.count - 1} other nodes"
        )
    address, interface = own_interface(nodes.master, own)
    print(
        f"node     {nodes.rank} of {nodes.count}, {address}, interface {interface or 'unknown'}",
        flush=True,
    )
    if is_loopback(address):
        print(
            f"warning: MASTER_ADDR={nodes.master} is a loopback address here: other hosts cannot "
            "reach it",
            file=sys.stderr,
        )
    names = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    return names | ({"NCCL_SOCKET_IFNAME": f"={interface}"} if interface and nodes.ips else {})


def _wait_for_master(nodes: Nodes) -> None:
    where = with_port(nodes.master, nodes.port or 0)
    deadline, said = time.monotonic() + nodes.wait, float("inf")
    while True:
        try:
            socket.create_connection((nodes.master, nodes.port or 0), timeout=5).close()
            return
        except OSError:
            left = round(deadline - time.monotonic())
        if left <= 0:
            raise ConfigError(
                f"no master at {where} within WAIT_SECONDS={nodes.wait}: start run_master_*.sh "
                "there (or train with NODE_RANK=0), check MASTER_ADDR, MASTER_PORT and the firewall"
            )
        if said - left >= _ANNOUNCE_SECONDS:
            print(f"waiting for the master at {where}, {left} s left", flush=True)
            said = left
        time.sleep(1)
