"""Sources of Megatron-LM for benchmarks and tests, and the processes that run their scripts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import harness

ROOT = Path(__file__).resolve().parent.parent
_FOR_OLD_PYTHON = """
import typing, typing_extensions
if not hasattr(typing, "override"):  # newer versions of Megatron-LM want Python 3.12
    typing.override = typing_extensions.override
"""


def find(sources: Path, version: str) -> Path | None:
    """The folder ``version`` of ``sources``, else the archive ``version.tar.xz``; None without."""
    for path in (sources / version, sources / f"{version}.tar.xz"):
        if path.exists():
            return path
    return None


def unpacked(found: Path, folder: Path) -> Path:
    """The folder of sources that :func:`find` found; an archive is unpacked below ``folder``."""
    if found.is_dir():
        return found.resolve()
    root = folder / found.name.removesuffix(".tar.xz")
    if not root.is_dir():
        with tarfile.open(found) as tar:
            known = hasattr(tarfile, "data_filter")  # since Python 3.11.4
            tar.extractall(folder, **({"filter": "data"} if known else {}))
    return root


def for_old_python(folder: Path) -> Path:
    """``folder``, in which Python finds at its start what newer versions of Megatron-LM want."""
    (folder / "sitecustomize.py").write_text(_FOR_OLD_PYTHON, encoding="utf-8")
    return folder


def place(rank: int, ranks: int) -> dict[str, str]:
    """Variables of a local rank, which shares its GPU with others where there are too few.

    NCCL refuses two ranks on one GPU of a host. To it they are on hosts of their own, which it
    connects by sockets: correct, but slow.
    """
    import torch

    gpus = torch.cuda.device_count()
    if not 0 < gpus < ranks:
        return {"LOCAL_RANK": str(rank)}
    turn, gpu = divmod(rank, gpus)
    host = f"{os.uname().nodename}.{turn}"
    return {"LOCAL_RANK": str(gpu), "NCCL_HOSTID": host, "NCCL_SOCKET_IFNAME": "lo"}


def start(
    root: Path,
    entry: Path,
    words: Sequence[str],
    *,
    port: int,
    ranks: int,
    log: Path,
    paths: Sequence[Path] = (),
    more: Sequence[Mapping[str, str]] = (),
) -> list[subprocess.Popen[str]]:
    """A process for each rank of a script that trains with these sources.

    Args:
        root: the sources, which come first on the module path.
        entry: the script, which ``-m megatron.dpp.run`` runs.
        log: a rank's output goes to this name with ``.RANK.log`` added, as a pipe might fill.
        paths: further folders of the module path.
        more: variables of each rank, beside those of a launcher.
    """
    given = os.environ.get("PYTHONPATH")  # packages of the environment
    path = [*map(str, (root, ROOT, *paths)), *([given] if given else [])]
    common = {
        **os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore", "PYTHONPATH": os.pathsep.join(path),
    }  # fmt: skip
    processes = []
    for rank in range(ranks):
        own = {"RANK": str(rank), **place(rank, ranks), **(more[rank] if more else {})}
        with Path(f"{log}.{rank}.log").open("w", encoding="utf-8") as file:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-X", "faulthandler", "-m", "megatron.dpp.run", str(entry),
                     *words],
                    env=common | own, stdout=file, stderr=subprocess.STDOUT, text=True,
                    start_new_session=True, preexec_fn=harness.bound_to_this(signal.SIGKILL),
                )
            )  # fmt: skip
    return processes


AFTER_A_FAILURE = 20.0
"""Seconds that ranks have to end after one has failed."""


def why_failed(
    processes: Sequence[subprocess.Popen[str]], seconds: float, look: Callable[[], str] = str
) -> str:
    """Wait for the processes of :func:`start`, and end what is left; empty if all succeeded.

    Args:
        seconds: the most that they may take.
        look: called many times a second; a reason that it returns ends them.
    """
    end, reason = time.monotonic() + seconds, f"no end within {seconds:g} s"
    try:
        while any(one.poll() is None for one in processes) and time.monotonic() < end:
            if why := look():
                reason = why
                break
            failed = [rank for rank, one in enumerate(processes) if one.poll()]
            if failed and not reason.startswith("rank"):
                code = processes[failed[0]].returncode
                reason = f"rank {failed[0]} ended with exit code {code}"
                end = min(end, time.monotonic() + AFTER_A_FAILURE)
            time.sleep(0.05)
    finally:
        for one in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)  # with what it has started
    codes = [one.wait() for one in processes]
    if not any(codes):
        return ""
    if not reason.startswith("rank") and all(code != -signal.SIGKILL for code in codes):
        rank = next(rank for rank, code in enumerate(codes) if code)
        return f"rank {rank} ended with exit code {codes[rank]}"
    return reason
