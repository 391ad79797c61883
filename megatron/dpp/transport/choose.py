"""Which kind a link gets: a pure function of what both sides say about themselves, with its reason.

Both ranks of a link call it with the same two facts and must come to the same answer, so it may
look at nothing else. ``opening.py`` calls it; ``doctor`` prints what it looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from megatron.dpp.errors import TransportUnavailable


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one rank tells the others about itself.

    ``host`` differs between machines, and between network namespaces of one machine: they cannot
    reach each other's abstract sockets. ``tcp_address`` is where it listens for other hosts, if it
    does. ``settings`` are the options that both sides of a link must share. ``gpu`` is the UUID of
    its GPU, and ``gpu_access`` says for each GPU that it sees whether its own can write there.
    ``rdma`` is the kind of RDMA network that its address belongs to, ``no_rdma`` why there is none.
    """

    rank: int
    abi: int
    host: str
    hostname: str
    uid: int
    pid: int
    device: str
    unix_address: str
    tcp_address: tuple[str, int] | None
    settings: dict[str, int | float | bool]
    gpu: str = ""
    gpu_access: dict[str, bool] = field(default_factory=dict)
    rdma: str = ""
    no_rdma: str = ""


@dataclass(frozen=True)
class Choice:
    """A kind and why it was taken."""

    kind: str
    reason: str


GPU_KINDS = ("cuda_ipc", "staged")
"""Kinds that read and write CUDA tensors where they are."""

Obstacle = Callable[[Facts, Facts], str | None]


def _shm_obstacle(one: Facts, other: Facts) -> str | None:
    if one.host != other.host:
        return f"{one.hostname} and {other.hostname} do not share memory"
    if one.uid != other.uid:
        return f"the processes belong to users {one.uid} and {other.uid}"
    return None


def _staged_obstacle(one: Facts, other: Facts) -> str | None:
    for side in (one, other):
        if not side.gpu:
            return f"rank {side.rank} has no GPU of NVIDIA (device {side.device})"
    return _shm_obstacle(one, other)


def _cuda_ipc_obstacle(one: Facts, other: Facts) -> str | None:
    # A GPU that is hidden from the other process (CUDA_VISIBLE_DEVICES) is tried when it is opened.
    for own, peer in ((one, other), (other, one)):
        if not own.gpu_access.get(peer.gpu, True):
            return f"the GPU of rank {own.rank} has no peer access to the one of rank {peer.rank}"
    return _staged_obstacle(one, other)


def _tcp_obstacle(one: Facts, other: Facts) -> str | None:
    for side in (one, other):
        if side.tcp_address is None:
            return (
                f"rank {side.rank} on {side.hostname} listens on no address; name this host's "
                "address with --node-ips"
            )
    return None


def _rdma_obstacle(one: Facts, other: Facts) -> str | None:
    for side in (one, other):
        if not side.rdma:
            return f"rank {side.rank} on {side.hostname}: {side.no_rdma}"
    if one.rdma != other.rdma:
        return f"rank {one.rank} is on {one.rdma}, rank {other.rank} on {other.rdma}"
    return _tcp_obstacle(one, other)  # the control connection's


_RULES: tuple[tuple[str, Obstacle, str], ...] = (
    ("cuda_ipc", _cuda_ipc_obstacle, "GPUs of one host with peer access: CUDA IPC"),
    ("staged", _staged_obstacle, "GPUs of one host without peer access: pinned host memory"),
    ("shm", _shm_obstacle, "same host, same user: shared memory"),
    ("rdma", _rdma_obstacle, "different hosts with RDMA devices: RDMA writes"),
    ("tcp", _tcp_obstacle, "different hosts, and no RDMA link: TCP"),
)
"""Kinds in order of preference: what stands against it, and why it is taken when nothing does."""


def _stages(kind: str, side: Facts) -> bool:
    """Whether CUDA tensors of a side need copies through the host that the kind does not make."""
    return side.device != "cpu" and kind not in GPU_KINDS and not (kind == "rdma" and side.gpu)


def choose(own: Facts, peer: Facts, wanted: str = "auto") -> Choice:
    """The kind of the link between two ranks.

    Raises:
        TransportUnavailable: ``wanted`` (or, for ``auto``, every kind) is not possible; says why.
    """
    one, other = sorted((own, peer), key=lambda facts: facts.rank)
    between = f"between rank {one.rank} ({one.hostname}) and rank {other.rank} ({other.hostname})"
    obstacles: list[str] = []
    for kind, obstacle, reason in _RULES:
        if wanted not in ("auto", kind):
            continue
        against = obstacle(one, other)
        if against is None:
            staged = _stages(kind, one) or _stages(kind, other)
            note = "; CUDA tensors pass through the host's memory" if staged else ""
            if kind == "tcp" and obstacles:
                note += f" [{obstacles[-1]}]"
            return Choice(kind, (reason if wanted == "auto" else f"asked for: {kind}") + note)
        obstacles.append(f"{kind}: {against}")
    if not obstacles:
        known = ", ".join(kind for kind, _, _ in _RULES)
        raise TransportUnavailable(f"--dpp-transport {wanted} {between}: known kinds are {known}")
    raise TransportUnavailable(f"--dpp-transport {wanted} {between}: {'; '.join(obstacles)}")
