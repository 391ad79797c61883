"""The processes of a run, and the one torchrun that starts those of this node."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.dpp.errors import ConfigError, DataError, core_setting, require
from megatron.dpp.hosts import LOOPBACK, is_loopback, loopback_fault, own_interface, with_port
from megatron.dpp.locks import Lock, check_free, lock_directory
from megatron.dpp_train.launch import stopped
from megatron.dpp_train.launch.flags import ROOT, Flags
from megatron.dpp_train.launch.home import check_home, make_home, with_home
from megatron.dpp_train.launch.layout import MOST
from megatron.dpp_train.launch.limits import allow_files, allow_threads, check_interface
from megatron.dpp_train.launch.log_copy import copy_output
from megatron.dpp_train.launch.start import import_path
from megatron.dpp_train.options import environment, run_file
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.options.run_config import RunConfig, Settings
from megatron.dpp_train.preflight.check import check_not_taken, check_parsed
from megatron.dpp_train.preflight.files import written_directories

_ANNOUNCE_SECONDS = 5
"""Between two lines of a worker that waits for its master."""
_IP = re.compile(r"\d+(\.\d+){3}|[\da-fA-F:]+:[\da-fA-F:.%a-z]*")
_QUIET = ",".join(
    f"ignore:{text}"
    for text in (
        "Transformer Engine and Apex are not installed:UserWarning",
        "Apex is not installed:UserWarning",
        "full scope is deprecated:UserWarning",
        "`load_state_dict` is deprecated:FutureWarning",
        "Please use DTensor instead:FutureWarning",
    )
)
"""Warnings of megatron-core in every process about packages that nothing here needs, and of PyTorch
about functions that megatron-core calls."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Placement and rendezvous of a job's processes.

    Args:
        per_node: processes of a node.
        port: of the master. None on a single node: torchrun finds a free one.
        wait: seconds that the nodes wait for each other.
        ips: addresses between nodes, one per node or one per rank; empty without ``NODE_IPS``.
    """

    per_node: int
    num_nodes: int = 1
    node_rank: int = 0
    master: str = "localhost"
    port: int | None = None
    wait: int = 300
    ips: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Processes of the job."""
        return self.per_node * self.num_nodes

    def log_name(self) -> str:
        """File name of this node's log."""
        return f"train-node{self.node_rank}.log" if self.num_nodes > 1 else "train.log"

    def config_name(self) -> str:
        """File name of the settings that this node's ranks read."""
        return f"run_config-node{self.node_rank}.json" if self.num_nodes > 1 else "run_config.json"

    def flags(self) -> Flags:
        """Flags of the training script that follow from the nodes."""
        flags: Flags = {"--multi-node": True} if self.num_nodes > 1 else {}
        return flags | ({"--node-ips": ",".join(self.ips)} if self.ips else {})

    def torchrun(self, python: str) -> list[str]:
        """The command that the training script and its flags follow."""
        words = [python, "-m", "megatron.dpp_train.launch.torchrun"]
        words += ["--nproc_per_node", str(self.per_node), "--nnodes", str(self.num_nodes)]
        if self.port is None:
            return [*words, "--standalone"]  # a free port: two runs on one machine do not meet
        words += ["--node_rank", str(self.node_rank), "--master_addr", self.master]
        return [*words, "--master_port", str(self.port), "--rdzv_conf", f"timeout={self.wait}"]


def find_job(env: Mapping[str, str]) -> Job:
    """The job that the environment describes.

    Raises:
        ConfigError: a variable's value is impossible, or they do not fit together.
    """
    values = {name: environment.value(name, env) for name in _VARIABLES}
    per_node, num_nodes, wait = (
        whole_variable(name, values) for name in ("GPUS_PER_NODE", "NUM_NODES", "WAIT_SECONDS")
    )
    port = values["MASTER_PORT"]
    require(
        re.fullmatch(r"[1-9]\d{0,4}", port) and int(port) <= 65535,
        f"MASTER_PORT={port}: must be a port number, 1 to 65535",
    )
    ips = tuple(values["NODE_IPS"].split(",")) if values["NODE_IPS"] else ()
    world_size = per_node * num_nodes
    require(
        not ips or len(ips) in (num_nodes, world_size),
        f"NODE_IPS={values['NODE_IPS']} has {len(ips)} addresses: expected one per node "
        f"({num_nodes}) or one per rank ({world_size})",
    )
    for address in ips:
        require(
            _IP.fullmatch(address),
            f"NODE_IPS={values['NODE_IPS']}: {address!r} is not an IP address",
        )
    return Job(
        per_node=per_node,
        num_nodes=num_nodes,
        node_rank=node_rank(values["NODE_RANK"], num_nodes),
        # On one node another program may have left the variable.
        master=values["MASTER_ADDR"] if num_nodes > 1 else environment.DEFAULTS["MASTER_ADDR"],
        port=int(port) if num_nodes > 1 or env.get("MASTER_PORT") else None,
        wait=wait,
        ips=ips,
    )


_VARIABLES = (
    "GPUS_PER_NODE", "NUM_NODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "WAIT_SECONDS",
    "NODE_IPS",
)  # fmt: skip


def whole_variable(name: str, values: Mapping[str, str]) -> int:
    """The variable's value.

    Raises:
        ConfigError: it is no whole number, or below 1.
    """
    text = values[name]
    require(re.fullmatch(r"[1-9]\d*", text), f"{name}={text}: must be a whole number, at least 1")
    require(len(text) <= len(str(MOST)) and int(text) <= MOST, f"{name}={text}: at most {MOST}")
    return int(text)


def node_rank(text: str, num_nodes: int) -> int:
    """The value of ``NODE_RANK``.

    Raises:
        ConfigError: it is no whole number, or not below ``num_nodes``.
    """
    require(re.fullmatch(r"\d+", text), f"NODE_RANK={text}: must be a whole number, at least 0")
    require(
        int(text) < num_nodes,
        f"NODE_RANK={text}: with NUM_NODES={num_nodes} it must be less than {num_nodes}",
    )
    return int(text)


def hardware_queues(args: Settings) -> str:
    """``CUDA_DEVICE_MAX_CONNECTIONS`` of a run with these flags, where the environment has none.

    megatron-core's tensor and context parallelism rely on one hardware queue. Everything else needs
    several: in one queue FSDP2's gathers wait behind the products that need them, a pipeline's
    sends behind its receives, and a reduction behind the replayed backward beside which it could
    run.
    """
    relies = args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1
    return "1" if relies and not args.use_torch_fsdp2 else "8"


def launch(
    job: Job,
    python: str,
    script: str,
    argv: Sequence[str],
    parsed: Settings | None = None,
    *,
    dry_run: bool = False,
) -> None:
    """Check the run, let the nodes meet, and become torchrun, whose ranks read the checked
    settings. Returns from a dry run only, which prints the command with all flags. ``DRY_RUN=1``
    makes every run one.

    Args:
        script: file name of the training script, in the repository.
        parsed: ``argv`` where it is parsed already.

    Raises:
        ConfigError: flags that cannot work, or the nodes cannot meet.
        DataError: a file is missing or broken, or another run writes a directory of this one.
    """
    command = [*job.torchrun(python), str(ROOT / script)]
    if dry_run or is_dry_run():
        show_command([*command, *argv])
        return
    arch = Path(script).stem.removeprefix("pretrain_")
    run = begin(job, arch, parse_args(argv) if parsed is None else parsed, os.environ)
    if run.lock is not None:
        run.lock.keep_over_exec()
    env = dict(run.env)
    folders = [str((ROOT / script).parent), *env["PYTHONPATH"].split(os.pathsep)]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(folders))  # as without PYTHONSAFEPATH
    if run.home is not None:
        env |= copy_output(run.home / job.log_name(), run.lock)
        print(f"run: {run.home}", flush=True)
    sys.stdout.flush()
    os.execvpe(python, [*command, *run.words], env)


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A checked run that torchrun can start.

    Args:
        words: what the training script gets.
        env: the environment of its processes.
        home: directory of the run; None on several nodes without ``RUN_DIR``.
        lock: on ``home``, at the first node.
    """

    words: list[str]
    env: dict[str, str]
    home: Path | None
    lock: Lock | None


def begin(job: Job, arch: str, parsed: Settings, environ: Mapping[str, str]) -> Begun:
    """Check a run, make its directory, write its settings and let the nodes meet.

    Raises:
        ConfigError, DataError: as :func:`launch`.
    """
    refuse_taken(job, parsed, environ)
    if job.num_nodes == 1 and (fault := loopback_fault()):
        raise ConfigError(
            f"the ranks of a node meet at {LOOPBACK}, which cannot be reached here ({fault}): set "
            "the loopback interface up (ip link set lo up)"
        )
    allow_files(job.world_size)
    check_interface(environ)
    args, _ = check_parsed(arch, parsed, job.world_size, job.per_node)
    allow_threads(job.per_node, args.device)
    check_not_taken(args, by_launcher=True)
    home = lock = None
    if environ.get("RUN_DIR") or job.num_nodes == 1:  # several nodes cannot agree on a date
        home = make_home(arch, args, job.world_size, environ)
        if job.node_rank == 0:
            lock = lock_directory(home, core_setting("run_dir"))
        args = with_home(args, home)
    defaults = {
        "CUDA_DEVICE_MAX_CONNECTIONS": hardware_queues(args),
        "OMP_NUM_THREADS": environment.value("OMP_NUM_THREADS", environ),
        "PYTHONWARNINGS": _QUIET,
    }
    defaults |= stopped.setting(args.distributed_timeout_minutes)
    env = {**environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": import_path()}
    env["PYTHONSAFEPATH"] = "1"  # else a random.py where the run starts would be Python's
    env |= {name: value for name, value in defaults.items() if not env.get(name)}
    if home is not None:
        env["RUN_DIR"] = str(home)
    env["DPP_SAVE"] = str(Path(args.save).absolute()) if args.save else ""
    words = [run_file.FLAG, _hand_over(args, arch, job, home)]
    if job.num_nodes > 1:
        env = {**meet(job), **env}
    return Begun(words=words, env=env, home=home, lock=lock)


def _hand_over(args: RunConfig, arch: str, job: Job, home: Path | None) -> str:
    """Path of the file in which the ranks of this node find their settings."""
    if home is None:
        return run_file.in_memory(args, arch)
    path = home / job.config_name()
    try:
        return str(run_file.write(args, arch, path))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def refuse_taken(job: Job, parsed: Settings, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse directories of other runs; cheap enough to come before set-up.

    Args:
        parsed: all flags of the run; its layout names the directory of its trace.

    Raises:
        DataError: naming the other run.
    """
    args = parsed.draft()
    check_home(args, environ, first_node=job.node_rank == 0)
    if not args.trace or "trace_dir" not in args.given or job.node_rank != 0:
        return
    ranks = args.pipeline_model_parallel_size * args.tensor_model_parallel_size
    args.data_parallel_size = job.world_size // (ranks * args.context_parallel_size)
    args.virtual_pipeline_model_parallel_size = None
    for flag, directory in written_directories(args):
        check_free(directory, flag)


def is_dry_run() -> bool:
    """True where ``DRY_RUN`` asks to print commands only."""
    return environment.value("DRY_RUN", os.environ) != "0"


def meet(job: Job) -> dict[str, str]:
    """Wait for the master, or announce it; variables that name this node's network interface.

    Given addresses are checked before anything waits. Without them the route to the master decides,
    whose name may resolve only once it is there.

    Raises:
        ConfigError: the master does not come, or an address is not one of this node.
    """
    found = use_interface(job) if job.ips else {}
    if job.node_rank:
        wait_for_master(job)
    else:
        print(
            f"master at {with_port(job.master, job.port or 0)}: waiting {job.wait} s for "
            f"{job.num_nodes - 1} other nodes (run_worker_*.sh with MASTER_ADDR={job.master})"
        )
    return found or use_interface(job)


def use_interface(job: Job) -> dict[str, str]:
    """Let gloo, and NCCL where ``NODE_IPS`` names a network, use the interface of this node's own
    address. Without it gloo takes the address of the host's name, often a loopback."""
    own = job.ips[job.node_rank : job.node_rank + 1]
    if len(job.ips) != job.num_nodes:
        own = job.ips[job.node_rank * job.per_node :][: job.per_node]
    address, interface = own_interface(job.master, own)
    print(
        f"this node (NODE_RANK={job.node_rank}) talks to the others from {address}, interface "
        f"{interface or 'unknown'}",
        flush=True,
    )
    if is_loopback(address):
        print(
            f"warning: MASTER_ADDR={job.master} is a loopback address here: other hosts cannot "
            "reach it",
            file=sys.stderr,
        )
    names = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    return names | ({"NCCL_SOCKET_IFNAME": f"={interface}"} if interface and job.ips else {})


def wait_for_master(job: Job) -> None:
    """Return once the master accepts connections.

    Raises:
        ConfigError: it does not within ``job.wait`` seconds.
    """
    deadline, said = time.monotonic() + job.wait, float("inf")
    while True:
        try:
            socket.create_connection((job.master, job.port or 0), timeout=5).close()
            return
        except OSError:
            left = round(deadline - time.monotonic())
        if left <= 0:
            raise ConfigError(
                f"no master at {with_port(job.master, job.port or 0)} within "
                f"WAIT_SECONDS={job.wait}: start "
                "run_master_*.sh there (or train with NODE_RANK=0), check MASTER_ADDR and "
                "MASTER_PORT and the firewall in between"
            )
        if said - left >= _ANNOUNCE_SECONDS:
            where = with_port(job.master, job.port or 0)
            print(f"waiting for the master at {where}, {left} s left", flush=True)
            said = left
        time.sleep(1)


def show_command(words: Sequence[str]) -> None:
    """Print a command for a shell."""
    print(shlex.join(words), flush=True)
