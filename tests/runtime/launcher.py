"""Start a script once per rank, wait with a deadline, and show every rank's stacks when it passes.

What is started is always killed: each rank has a session of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.runtime.fork_server import MAX_REQUEST

REPOSITORY = Path(__file__).resolve().parents[2]
SERVER = Path(__file__).with_name("fork_server.py")
START_SECONDS = 60.0
"""Longest time until a rank has started; the first one waits for the imports."""
_READ_AT_START = ("PYTHON", "TORCH", "LD_", "OMP_", "CUDA")
"""Beginnings of variables that Python and PyTorch read when they start."""
_WRITTEN_AT_IMPORT = "TORCHINDUCTOR_CACHE_DIR"
"""A variable that PyTorch itself sets in a process that has imported some of it."""


@dataclass(frozen=True)
class Finished:
    """Exit status and output of one rank."""

    returncode: int
    output: str


class Rank:
    """A started rank, with the methods of ``Popen``. Its output is kept in a file."""

    def __init__(self, status: socket.socket, output: IO[bytes]) -> None:
        self._status, self._output = status, output
        self._said = ""
        self.returncode: int | None = None
        self.pid = int(self._told(START_SECONDS))

    def _told(self, timeout: float) -> bytes:
        self._status.settimeout(timeout)
        told = self._status.recv(64)
        assert told, "the server of forked ranks has ended"
        return told

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Its exit status, once it has ended."""
        if self.returncode is None:
            try:
                self.returncode = int(self._told(timeout))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(str(self.pid), timeout) from None
            self._status.close()
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, None]:
        """All its output, once it has ended."""
        self.wait(timeout)
        if not self._output.closed:
            with self._output as output:
                output.seek(0)
                self._said = output.read().decode(errors="replace")
        return self._said, None

    def send_signal(self, number: int) -> None:
        """Sends it a signal if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)


def free_port() -> int:
    """A TCP port of this host that nobody listens on.

    It is below those that the system gives to connections, one of which could take it before the
    test does. The choice depends on no seed: tests of several processes choose differently.
    """
    while True:
        port = 12000 + secrets.randbelow(18000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


Place = Callable[[int], tuple[str, dict[str, str]]]
"""By rank: the network namespace that it lives in, and environment variables of its own."""


def shared_gpus(rank: int) -> tuple[str, dict[str, str]]:
    """A place on one of this host's GPUs, which ranks share where there are too few of them.

    To NCCL, which refuses two ranks on one GPU of a host, they are on hosts of their own.
    """
    import torch

    turn, gpu = divmod(rank, torch.cuda.device_count())
    host = f"{os.uname().nodename}.{turn}"
    return "", {"LOCAL_RANK": str(gpu), "NCCL_HOSTID": host, "NCCL_SOCKET_IFNAME": "lo"}


def has_gpu() -> bool:
    """True with a GPU of NVIDIA's that is not hidden, without an import of PyTorch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return not hidden and _has_device()


@functools.cache
def _has_device() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


@functools.cache
def _server(preload: str) -> tuple[socket.socket, dict[str, str] | None]:
    """The connection to a server of forked ranks, which ends with it, and what Python and PyTorch
    read when it started.

    ``preload`` is what it imports, ``"job"``, ``"training"`` or ``"libraries"``; the first two are
    forks of that of libraries. A process that has met CUDA cannot be forked: with ``"nothing"``,
    nothing was read either, and each rank begins anew.
    """
    if preload in ("job", "training"):
        return _forked_server(preload), _server("libraries")[1]
    control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST)
    environment = _environment()
    with other:
        server = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(SERVER), str(other.fileno()), preload],
            env=environment, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip

    def end() -> None:
        control.close()
        server.wait(10)

    atexit.register(end)
    return control, None if preload == "nothing" else _at_start(environment)


def _forked_server(preload: str) -> socket.socket:
    """The connection to a server that is a fork of that of libraries."""
    name = f"dpp-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        listener.settimeout(START_SECONDS)
        (server,) = start(SERVER, 1, [name, preload], preload="libraries")
        control, _ = listener.accept()
    control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST)

    def end() -> None:
        control.close()
        server.wait(10)

    atexit.register(end)
    return control


def _environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
        "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **more,
    }  # fmt: skip


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_START) and name != _WRITTEN_AT_IMPORT
    }


def start(
    script: Path, num_ranks: int, arguments: Sequence[str], place: Place | None = None,
    *, fresh: bool = False, preload: str = "job",
) -> list[Rank]:  # fmt: skip
    """Start ``num_ranks`` processes of ``script`` with torchrun's environment variables.

    Args:
        place: the hosts of the ranks.
        fresh: start Python anew; otherwise PyTorch is imported already and, with ``preload`` a
            "job" and not only "libraries", megatron-core; with "training" Megatron's loop.

    Raises:
        AssertionError: variables that Python reads when it starts have changed, and ``fresh`` was
            not asked for: each rank would take seconds longer without a word.
    """
    port = str(free_port())
    control, read = _server("nothing" if has_gpu() else preload)
    fresh = fresh or read is None
    ranks: list[Rank] = []
    for rank in range(num_ranks):
        network, more = place(rank) if place is not None else ("", {})
        environment = _environment(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        ) | more  # fmt: skip
        changed = _at_start(environment).items() ^ (read or {}).items()
        assert fresh or not changed, f"fresh=True lets ranks read {dict(changed).keys()} anew"
        request = {
            "script": str(script), "arguments": list(arguments), "folder": os.getcwd(),
            "environment": environment, "network": network, "fresh": fresh,
        }  # fmt: skip
        output = tempfile.TemporaryFile()  # noqa: SIM115 - the rank's owner closes it
        status, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with told:
            message = json.dumps(request).encode()
            socket.send_fds(control, [message], [output.fileno(), told.fileno()])
        ranks.append(Rank(status, output))
    return ranks


def wait(processes: Sequence[Rank], timeout: float) -> list[Finished]:
    """Wait for all; after ``timeout`` seconds make the rest print their stacks and kill them."""
    deadline = time.monotonic() + timeout
    try:
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        stuck = [p for p in processes if p.poll() is None]
        for process in stuck:
            process.send_signal(signal.SIGABRT)  # faulthandler prints all threads
        return [_collect(p) for p in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _collect(process: Rank) -> Finished:
    try:
        output, _ = process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate(timeout=20)
    return Finished(int(process.returncode or 0), output)


def run_ranks(
    script: Path, num_ranks: int, arguments: Sequence[str], timeout: float = 120.0,
    place: Place | None = None, *, fresh: bool = False, preload: str = "job",
) -> str:  # fmt: skip
    """All ranks' output; an AssertionError with all of it when a rank fails or hangs."""
    finished = wait(
        start(script, num_ranks, arguments, place, fresh=fresh, preload=preload), timeout
    )
    everything = "\n".join(
        f"--- rank {rank}: exit status {one.returncode}\n{one.output}"
        for rank, one in enumerate(finished)
    )
    assert all(one.returncode == 0 for one in finished), everything
    return everything
