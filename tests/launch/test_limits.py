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


_THREADS = """
import os, resource, sys
from megatron.dpp.errors import ConfigError
from megatron.dpp_train.launch.limits import allow_threads
resource.setrlimit(resource.RLIMIT_NPROC, (int(sys.argv[1]), int(sys.argv[2])))
os.getuid = lambda: int(sys.argv[3])
try:
    allow_threads(4, "cpu")
    print(resource.getrlimit(resource.RLIMIT_NPROC)[0])
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("soft", "hard", "user", "said"),
    [(99, 99, 123456, "this user may have 99 threads (ulimit -u) and has 0, and 4 ranks need 270 "),
     (99, 9000, 123456, "9000"), (99, 99, 0, "99")],
)  # fmt: skip
def test_too_few_threads_are_refused(soft: int, hard: int, user: int, said: str) -> None:
    """Ranks had ended by SIGABRT, which named the limit, but no way out. It does not bind root."""
    words = [sys.executable, "-c", _THREADS, str(soft), str(hard), str(user)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert done.stdout.startswith(said), done.stderr


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
