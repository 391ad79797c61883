"""Setting up links whose slots lie in GPU memory: offers, a second way when the first is refused,
and a pattern written through each link before anything relies on it.

``native.py``'s set-up is the caller, over connections that are already authenticated. Per message
nothing of this runs. The C++ side is ``csrc/transport/cuda_links.h``.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.dpp.errors import SetupError, TransportUnavailable
from megatron.dpp.transport import handshake
from megatron.dpp.transport.options import TransportOptions


@dataclass
class GpuLink:
    """One peer: the connection to it, and our channels with it in the order of both sides."""

    peer: int
    kind: str
    sock: socket.socket
    incoming: Sequence[int]
    outgoing: Sequence[int]
    refused: str = field(default="", init=False)  # why we could not open the peer's first offer


def device_index(device: torch.device) -> int:
    """The driver's number of a torch device; both count what CUDA_VISIBLE_DEVICES leaves."""
    return device.index if device.index is not None else torch.cuda.current_device()


def gpu_facts(library: Any, device: torch.device) -> tuple[str, dict[str, bool]]:
    """The UUID of our GPU, and for each GPU that we see whether ours can write into its memory.

    Empty without a GPU, or without NVIDIA's driver.
    """
    if device.type != "cuda":
        return "", {}
    try:
        own = library.CudaDevice(device_index(device))
    except TransportUnavailable:
        return "", {}
    return own.uuid, {uuid: own.access_to(uuid) in ("same", "yes") for uuid in own.visible()}


class GpuLinks:
    """Joins the GPU links of one rank. All ranks go through the same rounds: first every send, then
    every receive, so nobody waits in a circle.
    """

    def __init__(
        self, library: Any, native: Any, rank: int, device: torch.device, options: TransportOptions
    ) -> None:
        self._rank = rank
        self._workload = options.workload
        self._links = library.CudaLinks(native, device_index(device), options.max_pending)

    def join(self, links: Sequence[GpuLink]) -> dict[int, str]:
        """Make our slots, open the peers', and try every link.

        Returns:
            By peer, why its messages cannot be taken before they have arrived, or ours by it.

        Raises:
            SetupError: memory ran out, or the driver lets no peer open it.
            TransportUnavailable: a link does not deliver what was written.
        """
        for link in links:
            self._offer(link, legacy=True)
        for link in links:
            link.refused = self._open(link)
            self._send(link, {"refused": link.refused})
        for link in links:
            answer, _ = self._receive(link)
            if answer.get("refused"):
                self._offer(link, legacy=False)
        for link in links:
            if link.refused and (again := self._open(link)):
                raise SetupError(
                    f"rank {self._rank} cannot open the GPU memory of rank {link.peer}: "
                    f"{link.refused}; {again}. Containers must share the IPC and PID namespaces "
                    "(--ipc=host --pid=host); --dpp-transport staged does without"
                )
        direct = [link for link in links if link.kind == "cuda_ipc"]
        self._try(direct)
        faults = {link.peer: self._links.ahead_fault(link.peer) for link in direct}
        return {peer: fault for peer, fault in faults.items() if fault}

    def _send(self, link: GpuLink, message: dict[str, Any], fds: list[int] | None = None) -> None:
        with handshake.joining(self._rank, link.peer, link.sock):
            handshake.send_message(link.sock, message, fds)

    def _receive(self, link: GpuLink, max_fds: int = 0) -> tuple[dict[str, Any], list[int]]:
        with handshake.joining(self._rank, link.peer, link.sock):
            return handshake.receive_message(link.sock, max_fds)

    def _offer(self, link: GpuLink, legacy: bool) -> None:
        message, fds = {"handle": ""}, []
        if link.incoming and link.kind == "staged":
            fds = list(self._links.make_staged_slots(link.peer, link.incoming, self._workload))
        elif link.incoming:
            control, handle, memory = self._links.make_ipc_slots(link.peer, link.incoming, legacy)
            message["handle"] = handle.hex()
            fds = [fd for fd in (control, memory) if fd >= 0]
        self._send(link, message, fds)

    def _open(self, link: GpuLink) -> str:
        """Opens what the peer offers; returns why it could not be opened."""
        message, fds = self._receive(link, 2)
        if not link.outgoing:
            for fd in fds:
                os.close(fd)
            return ""
        handle = bytes.fromhex(str(message.get("handle", "")))
        control, memory = [*fds, -1, -1][:2]
        to = (link.peer, link.outgoing)
        try:
            if link.kind == "staged":
                self._links.use_staged_slots(*to, control, memory, self._workload)
            else:
                self._links.use_ipc_slots(*to, control, handle, memory)
        except SetupError as error:
            return str(error)[:1000]
        return ""

    def _try(self, links: Sequence[GpuLink]) -> None:
        for link in links:
            seed = secrets.randbits(63)
            if link.outgoing:
                self._links.write_pattern(link.peer, seed)
            self._send(link, {"seed": seed})
        # Every verdict is sent and received before the first is raised: both sides then say why.
        faults = []
        for link in links:
            message, _ = self._receive(link)
            fault = ""
            if link.incoming:
                fault = self._links.pattern_fault(link.peer, int(message.get("seed", 0)))
            self._send(link, {"fault": fault})
            faults.append((link, fault))
        for link in links:
            message, _ = self._receive(link)
            faults.append((link, str(message.get("fault", ""))))
        for link, fault in faults:
            if fault:
                self._raise(link, fault)

    def _raise(self, link: GpuLink, fault: str) -> None:
        raise TransportUnavailable(
            f"rank {self._rank}: the GPU link with rank {link.peer} does not deliver what is "
            f"written: {fault}. An IOMMU or ACS redirects traffic between GPUs: turn it off in the "
            "firmware, or use --dpp-transport staged"
        )
