"""The nodes of a job, which the environment names, and the torchrun of this one."""

from __future__ import annotations

import ipaddress
import re
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.dpp.errors import ConfigError, require
from megatron.dpp.hosts import addresses, is_loopback, own_interface, with_port
from megatron.dpp_train.presets.flags import number

_OF_SLURM = {
    "NUM_NODES": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "NODE_RANK": ("SLURM_NODEID",),
}
"""Our variables, and those of SLURM that stand in for them."""
_ANNOUNCE_SECONDS = 5


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


def find_nodes(env: Mapping[str, str]) -> Nodes:
    """The nodes that the environment names. Each of our variables wins over SLURM's.

    Raises:
        ConfigError: an impossible value, or several SLURM tasks on a node.
    """
    values = dict(env) | {
        name: next(filter(None, map(env.get, (name, *slurm))), "")
        for name, slurm in _OF_SLURM.items()
    }
    count, port = number(values, "NUM_NODES"), values.get("MASTER_PORT") or ""
    _refuse_tasks(env, count)
    if port:
        _require_within("MASTER_PORT", port, 1, 65535)
    if count == 1:
        return Nodes(port=int(port) if port else None)
    rank = values["NODE_RANK"]
    require(rank, "NODE_RANK is not set: number the nodes from 0")
    _require_within("NODE_RANK", rank, 0, count - 1)
    master = values.get("MASTER_ADDR") or _first_host(values.get("SLURM_JOB_NODELIST", ""))
    require(master, "MASTER_ADDR is not set: name the host of NODE_RANK=0")
    return Nodes(
        count=count,
        rank=int(rank),
        master=master,
        port=int(port or 6000),
        wait=number(values, "WAIT_SECONDS", 300),
        ips=_ips(values.get("NODE_IPS", "")),
    )


def _require_within(name: str, text: str, least: int, most: int) -> None:
    good = text.isdecimal() and least <= int(text) <= most
    require(good, f"{name}={text}: must be a whole number from {least} to {most}")


def _ips(text: str) -> tuple[str, ...]:
    ips = tuple(text.split(",")) if text else ()
    for address in ips:
        try:
            ipaddress.ip_address(address)
        except ValueError as error:
            raise ConfigError(f"NODE_IPS={text}: {error}") from None
    return ips


def _refuse_tasks(env: Mapping[str, str], count: int) -> None:
    """Refuse several tasks of ``srun`` on one node, each of which would start a run of its own."""
    if env.get("NUM_NODES") or "SLURM_STEP_NUM_TASKS" not in env:
        return
    tasks = number(env, "SLURM_STEP_NUM_TASKS")
    require(
        tasks == count,
        f"SLURM runs {tasks} tasks on {count} nodes: start one per node, srun "
        "--ntasks-per-node=1 --cpus-per-task=CORES megatron-dpp train ...",
    )


def _first_host(hosts: str) -> str:
    """The first of SLURM's ``node[03-07,11],other``."""
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
