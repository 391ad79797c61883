"""Kind ``staged``: GPUs of one host without peer access, in chunks through pinned shared memory.

The C++ side is ``csrc/transport/staged.h``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.dpp.transport.joining import Facts, PeerLink, Setup
from megatron.dpp.transport.kinds import TransportKind, shm


def obstacle(one: Facts, other: Facts) -> str | None:
    """Reason why two ranks' GPUs cannot be linked through the memory of one host."""
    for side in (one, other):
        if not side.gpu:
            return f"rank {side.rank} has no GPU of NVIDIA (device {side.device})"
    return shm.obstacle(one, other)


def join(setup: Setup, links: Sequence[PeerLink]) -> Mapping[int, str]:
    """Pass each sender the descriptors of headers and chunks.

    Raises:
        SetupError: memory ran out, or the driver does not pin it.
    """
    workload = setup.options.workload
    cuda = setup.extension.CudaLinks(setup.native, setup.gpu, setup.options.max_pending)
    for link in links:
        made = link.incoming and cuda.make_staged_slots(link.peer, link.incoming, workload)
        link.send({}, made or ())
    for link in links:
        _, fds = link.receive(2 if link.outgoing else 0)
        if fds:
            cuda.use_staged_slots(link.peer, link.outgoing, *fds, workload)
        link.send({})
    for link in links:
        link.receive()
    return {}


KIND = TransportKind(
    name="staged",
    preference=20,
    reason="GPUs of one host without peer access: pinned host memory",
    obstacle=obstacle,
    join=join,
    device_memory=True,
)
