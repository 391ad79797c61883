"""Two network namespaces joined by a veth pair stand for two hosts. Needs root and ``ip``."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.runtime.fork_server import enter_network

ADDRESSES = ("10.213.71.1", "10.213.71.2")
_SECONDS = 30.0


@dataclass(frozen=True)
class Hosts:
    """Two network namespaces; rank r lives in ``names[r]``, behind ``devices[r]``."""

    names: tuple[str, str]
    devices: tuple[str, str]
    addresses: tuple[str, str] = ADDRESSES

    def enter(self, rank: int) -> None:
        """Move this process to a host."""
        enter_network(self.names[rank])

    def command(self, host: int, *words: str) -> list[str]:
        """``words``, to be run on a host."""
        return ["ip", "netns", "exec", self.names[host], *words]

    def cut(self) -> None:
        """Pull the cable out of host 1."""
        _ip("-n", self.names[1], "link", "set", self.devices[1], "down")

    def restore(self) -> None:
        """Plug it in again."""
        _ip("-n", self.names[1], "link", "set", self.devices[1], "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=_SECONDS)


@contextlib.contextmanager
def two_hosts(addresses: tuple[str, str] = ADDRESSES) -> Iterator[Hosts]:
    """Skips where no namespaces can be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command")
    tag = os.getpid()
    made = Hosts((f"dpp-{tag}-0", f"dpp-{tag}-1"), (f"dpp{tag}a", f"dpp{tag}b"), addresses)
    try:
        try:
            for name in made.names:
                _ip("netns", "add", name)
            _ip("link", "add", made.devices[0], "type", "veth", "peer", "name", made.devices[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        for name, device, address in zip(made.names, made.devices, addresses, strict=True):
            _ip("link", "set", device, "netns", name)
            width = ("/64", "nodad") if ":" in address else ("/24",)
            _ip("-n", name, "addr", "add", address + width[0], "dev", device, *width[1:])
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", device, "up")
        yield made
    finally:
        for name in made.names:  # the devices go with them
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
