"""Kind ``cuda_ipc``: GPUs of one host with peer access, slots in the receiver's GPU memory.

The C++ side is ``csrc/transport/cuda_ipc.h``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.dpp.errors import ProtocolError, SetupError, TransportUnavailable, setting
from megatron.dpp.transport.joining import Facts, PeerLink, Setup, link_faults, undelivered
from megatron.dpp.transport.kinds import TransportKind, staged


def obstacle(one: Facts, other: Facts) -> str | None:
    """Reason why two ranks' GPUs cannot write into each other's memory.

    A GPU that is hidden from the other process (CUDA_VISIBLE_DEVICES) is tried when it is opened.
    """
    for own, peer in ((one, other), (other, one)):
        if not own.gpu_access.get(peer.gpu, True):
            return f"the GPU of rank {own.rank} has no peer access to the one of rank {peer.rank}"
    return staged.obstacle(one, other)


def join(setup: Setup, links: Sequence[PeerLink]) -> Mapping[int, str]:
    """Make our slots, open the peers', and test every link.

    Slots that a peer cannot open as a legacy IPC handle are offered again as a descriptor.

    Raises:
        SetupError: memory ran out, or the driver opens neither offer.
        TransportUnavailable: a link does not deliver the data that was written.
    """
    cuda = setup.extension.CudaLinks(setup.native, setup.gpu, setup.options.max_pending)
    for link in links:
        _offer(cuda, link, legacy=True)
    refused = {}
    for link in links:
        refused[link.peer] = _open(cuda, link)
        link.send({"refused": refused[link.peer]})
    for link in links:
        if link.receive()[0].get("refused"):
            _offer(cuda, link, legacy=False)
    for link in links:
        if refused[link.peer] and (again := _open(cuda, link)):
            transport = setting("transport", "staged")
            raise SetupError(
                f"rank {link.rank} cannot open the GPU memory of rank {link.peer}: "
                f"{refused[link.peer]}; {again}. Containers must share the IPC and PID namespaces "
                f"(docker's options ipc=host, pid=host); {transport} does without",
                transport,
            )
    faults = link_faults(
        links,
        lambda link, seed: link.outgoing and cuda.write_pattern(link.peer, seed),
        lambda link, seed: cuda.pattern_fault(link.peer, seed) if link.incoming else "",
    )
    for link in links:
        if link.peer in faults:
            transport = setting("transport", "staged")
            raise TransportUnavailable(
                f"rank {link.rank}: {undelivered(link, 'GPU', faults[link.peer])}: turn it off in "
                f"the firmware, or use {transport}",
                transport,
            )
    ahead = {link.peer: cuda.ahead_fault(link.peer) for link in links}
    return {peer: f"; nothing is launched ahead: {why}" for peer, why in ahead.items() if why}


def _offer(cuda: Any, link: PeerLink, *, legacy: bool) -> None:
    if not link.incoming:
        link.send({})
        return
    control, handle, memory = cuda.make_ipc_slots(link.peer, link.incoming, legacy)
    link.send({"handle": handle.hex()}, [fd for fd in (control, memory) if fd >= 0])


def _open(cuda: Any, link: PeerLink) -> str:
    """Opens the slots that the peer offers; returns why they could not be opened."""
    message, fds = link.receive(2, 1) if link.outgoing else link.receive()
    if not link.outgoing:
        return ""
    try:
        handle = bytes.fromhex(str(message.get("handle", "")))
    except ValueError as error:
        for fd in fds:
            os.close(fd)
        raise ProtocolError(
            f"rank {link.rank}: rank {link.peer} sent a broken handle: {error}"
        ) from error
    control, memory = [*fds, -1][:2]
    try:
        cuda.use_ipc_slots(link.peer, link.outgoing, control, handle, memory)
    except SetupError as error:
        return str(error)[:1000]
    return ""


KIND = TransportKind(
    name="cuda_ipc",
    preference=10,
    reason="GPUs of one host with peer access: CUDA IPC",
    obstacle=obstacle,
    join=join,
    announces=True,
    device_memory=True,
)
