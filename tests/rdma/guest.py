"""The two hosts of the guest, as ``network.sh`` has made them, and the wires between them."""

from __future__ import annotations

import functools
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.netns import Hosts

PATIENCE = 1200.0
"""Seconds after which a test gives up: all is slow in an emulated machine."""
_NOBODY = "02:00:00:00:00:01"  # an Ethernet address that no device has


class GuestHosts(Hosts):
    """Rank r is on host r, whose RDMA devices are rdma<r> and rdma<r + 2>."""

    def cut(self) -> None:
        """Lose every packet between the hosts. The RDMA devices do not notice, as their ports stay
        up: the cut is behind a switch.
        """
        self.lose_rdma()
        super().cut()

    def lose_rdma(self) -> None:
        """Lose the packets of RDMA alone."""
        _answer_at([_NOBODY] * 4)

    def restore(self) -> None:
        """End of a cut."""
        super().restore()
        devices = [Path(f"/sys/class/net/wire{wire ^ 1}/address") for wire in range(4)]
        _answer_at([device.read_text().strip() for device in devices])


HOSTS = GuestHosts(("host0", "host1"), ("host-wire0", "host-wire1"), ("10.99.0.1", "10.99.0.2"))


def _answer_at(addresses: list[str]) -> None:
    """Packets into each wire go to this Ethernet address."""
    lines = [
        f"neigh replace 10.99.0.{(wire ^ 1) + 1} dev wire{wire} lladdr {address} nud permanent\n"
        for wire, address in enumerate(addresses)
    ]
    batch = ["ip", "-batch", "-"]
    subprocess.run(batch, input="".join(lines), text=True, check=True, timeout=PATIENCE)


def run(*command: str) -> None:
    """Run a command of the system."""
    subprocess.run(command, check=True, timeout=PATIENCE)


def sent_bytes(wire: int) -> int:
    """Bytes that have gone into one end of a wire."""
    return int(Path(f"/sys/class/net/wire{wire}/statistics/tx_bytes").read_text())


@functools.cache
def control() -> None:
    """The devices reach each other without a line of our code."""
    run("bash", str(Path(__file__).with_name("control.sh")))


def wait_until(is_so: Callable[[], bool]) -> None:
    """Until something is so; fails after ``PATIENCE``."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)
