"""Limits of a node are refused by name before processes start, or lifted."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys

import pytest

from megatron.dpp.errors import ConfigError
from megatron.dpp_train.launch.limits import check_interface
from tests.conftest import REPOSITORY

_ALLOW = """
import resource, sys
from megatron.dpp.errors import ConfigError
from megatron.dpp_train.launch.limits import allow_files
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
try:
    allow_files(4)
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except ConfigError as error:
    print(error)
"""


def allowed(soft: int, hard: int) -> str:
    """The files that a process with these limits may open afterwards, or the error."""
    words = [sys.executable, "-c", _ALLOW, str(soft), str(hard)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    return done.stdout.strip() or done.stderr


def test_ranks_may_open_as_many_files_as_their_user() -> None:
    most = min(1000, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    assert allowed(64, most) == str(most)


def test_too_few_files_are_refused() -> None:
    """With 32 torchrun's store answered nobody, and each rank tried again for minutes."""
    said = "a process may open 32 files here (ulimit -n), and one of 4 ranks needs 208: allow more"
    assert allowed(32, 32).startswith(said)


def test_an_interface_that_is_not_there_is_refused() -> None:
    """Each rank had ended by an error of gloo about a time."""
    with pytest.raises(
        ConfigError, match=r"GLOO_SOCKET_IFNAME=lo,wlan99: .* 'wlan99': name one of"
    ):
        check_interface({"GLOO_SOCKET_IFNAME": "lo,wlan99"})
    own = [name for _, name in socket.if_nameindex()]
    check_interface({"GLOO_SOCKET_IFNAME": f"{own[0]},{own[0]}:1"})
    check_interface({"GLOO_SOCKET_IFNAME": ""})
    check_interface({})
