"""Limits of this node that would end a run in the words of a library, or let it wait."""

from __future__ import annotations

import resource
import socket
from collections.abc import Mapping

from megatron.dpp.errors import ConfigError

_GLOO = "GLOO_SOCKET_IFNAME"
_FILES_AT_MOST = 1 << 16
_FILES, _FILES_PER_RANK, _COUNTED_RANKS = 128, 20, 8
"""Files of a rank, with those for each of all ranks: of four it opened 176 at most."""


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
