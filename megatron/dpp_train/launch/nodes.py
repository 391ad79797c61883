"""Finds the nodes of a run in the environment: in our variables, else in SLURM's."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.dpp.errors import ConfigError, require
from megatron.dpp_train.launch.job import node_rank, whole_variable

_OF_SLURM = {
    "NUM_NODES": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "NODE_RANK": ("SLURM_NODEID",),
}
"""Our variables, and those of SLURM that stand in for them."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of a job, as seen from one of them."""

    count: int = 1
    rank: int = 0
    master: str = ""

    def environment(self) -> dict[str, str]:
        """The variables that ``job.find_job`` reads."""
        values = {"NUM_NODES": str(self.count), "NODE_RANK": str(self.rank)}
        return values | ({"MASTER_ADDR": self.master} if self.master else {})


def find_nodes(env: Mapping[str, str]) -> Nodes:
    """The nodes that the environment names. Each of our variables wins over SLURM's.

    Raises:
        ConfigError: an impossible value, or several SLURM tasks on a node.
    """
    values = {
        name: next(filter(None, map(env.get, (name, *slurm))), "")
        for name, slurm in _OF_SLURM.items()
    }
    count = whole_variable("NUM_NODES", {"NUM_NODES": values["NUM_NODES"] or "1"})
    if count == 1:
        refuse_tasks(env)
        return Nodes()
    if not env.get("NUM_NODES"):
        _one_task_per_node(env, count)
    require(values["NODE_RANK"], "NODE_RANK is not set: number the nodes from 0")
    rank = node_rank(values["NODE_RANK"], count)
    master = env.get("MASTER_ADDR") or _first_host(env.get("SLURM_JOB_NODELIST", ""))
    require(master, "MASTER_ADDR is not set: name the host of NODE_RANK=0")
    return Nodes(count=count, rank=rank, master=master)


def refuse_tasks(env: Mapping[str, str]) -> None:
    """Refuse several tasks of ``srun`` on one node: each would start a whole run of its own. A
    batch script may have them too, and starts this once.

    Raises:
        ConfigError: there are several, and ``NUM_NODES`` does not say that this is meant.
    """
    if env.get("NUM_NODES") or (env.get("SLURM_NNODES") or "1") != "1":
        return
    values = {"SLURM_STEP_NUM_TASKS": env.get("SLURM_STEP_NUM_TASKS") or "1"}
    tasks = whole_variable("SLURM_STEP_NUM_TASKS", values)
    if tasks > 1:
        raise ConfigError(
            f"SLURM runs {tasks} tasks on this node, and each would start a run of its own: start "
            "one, srun --ntasks=1 --cpus-per-task=CORES megatron-dpp train ..., or set NUM_NODES=1 "
            "where that many runs are meant"
        )


def _one_task_per_node(env: Mapping[str, str], count: int) -> None:
    """An allocation alone (``salloc``) starts this once; ``srun`` must start it once per node."""
    tasks = whole_variable("SLURM_NTASKS", env) if "SLURM_NTASKS" in env else count
    if tasks != count or "SLURM_NODEID" not in env:
        raise ConfigError(
            f"SLURM has {count} nodes and {tasks} tasks: start one per node, "
            "srun --ntasks-per-node=1 --cpus-per-task=CORES megatron-dpp train ..."
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
