"""Limits of this node that would end a run in the words of a library, or let it wait."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Mapping

from megatron.dpp.errors import ConfigError

_GLOO = "GLOO_SOCKET_IFNAME"
_FILES_AT_MOST = 1 << 16
_FILES, _FILES_PER_RANK, _COUNTED_RANKS = 128, 20, 8
"""Files of a rank, with those for each of all ranks: of four it opened 176 at most."""
_THREADS, _ON_CPU, _ON_GPU = 6, 66, 40
"""Threads of torchrun, and of a rank: on a CPU it had 71 at least, nearly all of them gloo's."""


def allow_files(ranks: int) -> None:
    """Let this process, and torchrun and its ranks after it, open as many files as its user may.

    Args:
        ranks: processes of the job, to which each has connections.

    Raises:
        ConfigError: they are too few: torchrun's store would not answer, and all would wait.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES_AT_MOST if hard == resource.RLIM_INFINITY else min(hard, _FILES_AT_MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    need = _FILES + _FILES_PER_RANK * min(ranks, _COUNTED_RANKS)
    if most < need:
        raise ConfigError(
            f"a process may open {most} files here (ulimit -n), and one of {ranks} ranks needs "
            f"{need}: allow more (ulimit -n 4096; docker run --ulimit nofile=4096)"
        )


def allow_threads(ranks: int, device: str | None) -> None:
    """Let this process, and torchrun and its ranks after it, start as many threads as its user may.

    Args:
        ranks: processes of this node.
        device: as ``--device``.

    Raises:
        ConfigError: they are too few: libraries would end the ranks, some by SIGABRT.
    """
    user = os.getuid()
    soft, most = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != most:
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    need = _THREADS + ranks * (_ON_CPU if device == "cpu" else _ON_GPU)
    if user == 0 or most == resource.RLIM_INFINITY:  # the kernel does not bound root
        return
    used = _threads_of(user)
    if used + need > most:
        raise ConfigError(
            f"this user may have {most} threads (ulimit -u) and has {used}, and {ranks} ranks need "
            f"{need} at least: allow more (ulimit -u 4096; its administrator may have to, in "
            "/etc/security/limits.conf), or start fewer ranks"
        )


def _threads_of(user: int) -> int:
    """Threads of this user's processes, as far as they can be seen."""
    import psutil  # type: ignore[import-untyped]

    seen = (each.info for each in psutil.process_iter(["uids", "num_threads"]))
    return sum(each["num_threads"] for each in seen if each["uids"] and each["uids"][1] == user)


def check_interface(environ: Mapping[str, str]) -> None:
    """Refuse a ``GLOO_SOCKET_IFNAME`` that names no network interface of this node.

    Raises:
        ConfigError: with those that it has.
    """
    own = [name for _, name in socket.if_nameindex()]
    for name in filter(None, environ.get(_GLOO, "").split(",")):
        if name.partition(":")[0] not in own:  # eth0:1 is a second address of eth0
            raise ConfigError(
                f"{_GLOO}={environ[_GLOO]}: this node has no network interface {name!r}: name one "
                f"of {', '.join(own)}, or unset it"
            )
