"""``megatron-dpp doctor --rdma``: tests RDMA devices without the code of this transport.

With pyverbs (Debian and Ubuntu: ``apt-get install python3-pyverbs``, for the system's Python) every
device is listed, and each port writes from one of its queue pairs to another one. Without pyverbs
only the kernel's list is printed. Torch and the C++ extension are optional; with them the ports'
dma-buf support and access to GPU memory are probed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

from megatron.dpp.errors import TransportError

_LINK_LAYERS = {1: "InfiniBand", 2: "Ethernet"}
_ACTIVE = 4
_BYTES = 1 << 16
_SECONDS = 5.0
_INSTALL = "apt-get install python3-pyverbs, and run this with /usr/bin/python3"


class Finding(NamedTuple):
    """The result of a probe; ``state`` is ok, note or missing, ``advice`` a remedy or empty."""

    name: str
    state: str
    text: str
    advice: str = ""


def findings() -> Iterator[Finding]:
    """Probe all RDMA devices, port by port."""
    if importlib.util.find_spec("pyverbs") is None:
        text = "not installed for this Python: no loop-back test"
        yield Finding("pyverbs", "note", text, _INSTALL)
        return
    from pyverbs.device import get_device_list
    from pyverbs.pyverbs_error import PyverbsError

    try:
        names = [device.name.decode() for device in get_device_list()]
    except PyverbsError as error:
        yield Finding("RDMA", "missing", f"listing the devices: {error}", "check /dev/infiniband")
        return
    if not names:
        advice = "ibv_devinfo and dmesg say whether a driver is loaded"
        yield Finding("RDMA", "note", "no device", advice)
    dmabuf = _dmabuf_ports()
    for name in names:
        try:
            yield from _device(name, dmabuf)
        except PyverbsError as error:
            advice = "containers: --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1"
            yield Finding(name, "missing", str(error), advice)
    yield gpu_direct()


def _device(name: str, dmabuf: dict[tuple[str, int], bool]) -> Iterator[Finding]:
    from pyverbs.device import Context

    with Context(name=name) as context:
        for port in range(1, context.query_device().phys_port_cnt + 1):
            attributes = context.query_port(port)
            label = f"{name} port {port}"
            link = _LINK_LAYERS.get(attributes.link_layer, "unknown link layer")
            text = f"{link}, MTU {128 << attributes.active_mtu}"
            if link == "InfiniBand":
                text += f", LID {attributes.lid}"
            if (name, port) in dmabuf:
                text += f", dma-buf {'yes' if dmabuf[name, port] else 'no'}"
            if attributes.state != _ACTIVE:
                advice = "cable, switch; InfiniBand: subnet manager"
                yield Finding(label, "note", f"{text}, not active", advice)
                continue
            yield Finding(label, "ok", text)
            index = yield from _addresses(context, label, port)
            yield _loop_back(context, label, port, index)


def _addresses(context: Any, label: str, port: int) -> Generator[Finding, None, int]:
    """List a port's addresses.

    Returns:
        Index of the address to use: RoCE v2 with an IPv4 address, else the first.
    """
    chosen = 0
    entries = [e for e in context.query_gid_table(256) if e.port_num == port]
    for entry in entries:
        kind = {0: "InfiniBand", 1: "RoCE v1", 2: "RoCE v2"}.get(entry.gid_type, "unknown")
        gid = str(context.query_gid(port, entry.gid_index))
        if kind == "RoCE v2" and gid.startswith(("0000:0000:0000:0000:0000:ffff:", "::ffff:")):
            chosen = entry.gid_index
        yield Finding(f"  GID {entry.gid_index}", "ok", f"{gid} ({kind})")
    if not entries:
        yield Finding(label, "note", "no address", "give the interface an IPv4 address")
    return chosen


def _loop_back(context: Any, label: str, port: int, gid_index: int) -> Finding:
    """Write from one queue pair of a port to another one; the card sends it to itself."""
    from pyverbs.pyverbs_error import PyverbsError

    try:
        seconds = _write_to_self(context, port, gid_index)
    except PyverbsError as error:
        advice = "this is below our transport: driver, firmware, memlock or the fabric"
        return Finding(f"{label} loop-back", "missing", str(error), advice)
    return Finding(f"{label} loop-back", "ok", f"{_BYTES} bytes in {seconds * 1e6:.0f} us")


def _write_to_self(context: Any, port: int, gid_index: int) -> float:
    """Seconds that the write took, as its completion shows."""
    from pyverbs import enums
    from pyverbs.cq import CQ
    from pyverbs.mr import MR
    from pyverbs.pd import PD
    from pyverbs.pyverbs_error import PyverbsError
    from pyverbs.wr import SGE, SendWR

    access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
    with PD(context) as domain, CQ(context, 16) as queue, contextlib.ExitStack() as stack:
        source, target = (stack.enter_context(MR(domain, _BYTES, access)) for _ in range(2))
        pairs = [stack.enter_context(_queue_pair(domain, queue, port)) for _ in range(2)]
        for own, other in (pairs, pairs[::-1]):
            own.to_rts(_path(context, port, gid_index, other.qp_num))
        source.write("x" * _BYTES, _BYTES)
        request = SendWR(
            opcode=enums.IBV_WR_RDMA_WRITE,
            num_sge=1,
            sg=[SGE(source.buf, _BYTES, source.lkey)],
            send_flags=enums.IBV_SEND_SIGNALED,
        )
        request.set_wr_rdma(target.rkey, target.buf)
        start = time.monotonic()
        pairs[0].post_send(request)
        while time.monotonic() < start + _SECONDS:
            count, completions = queue.poll()
            if count == 0:
                continue
            if completions[0].status != enums.IBV_WC_SUCCESS:
                raise PyverbsError(f"the write completed with status {completions[0].status}")
            if target.read(_BYTES, 0) != b"x" * _BYTES:
                raise PyverbsError("the write completed and its bytes are wrong")
            return time.monotonic() - start
    raise PyverbsError(f"the write has not completed after {_SECONDS:g} s")


def _queue_pair(domain: Any, queue: Any, port: int) -> Any:
    from pyverbs import enums
    from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

    attributes = QPAttr(port_num=port)
    attributes.qp_access_flags = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
    wanted = QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=queue, rcq=queue, cap=QPCap(4, 4, 1, 1, 0))
    return QP(domain, wanted, attributes)


def _path(context: Any, port: int, gid_index: int, peer: int) -> Any:
    """Attributes that connect a queue pair with one of the same port."""
    from pyverbs.addr import AHAttr, GlobalRoute
    from pyverbs.qp import QPAttr

    facts = context.query_port(port)
    route = GlobalRoute(dgid=context.query_gid(port, gid_index), sgid_index=gid_index, hop_limit=1)
    attributes = QPAttr(port_num=port)
    attributes.ah_attr = AHAttr(dlid=facts.lid, port_num=port, is_global=1, gr=route)
    attributes.dest_qp_num = peer
    attributes.path_mtu = facts.active_mtu
    attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
    attributes.min_rnr_timer, attributes.timeout = 12, 14
    attributes.retry_cnt, attributes.rnr_retry = 7, 6
    return attributes


def _dmabuf_ports() -> dict[tuple[str, int], bool]:
    """Support for dma-buf by (device, port); empty where the C++ side is not built."""
    with contextlib.suppress(ImportError, TransportError):
        from megatron.dpp.transport.native import load_native

        ports, _ = load_native().rdma_ports()
        return {(port["device"], port["port"]): port["dmabuf"] for port in ports}
    return {}


def gpu_direct() -> Finding:
    """Probe the access of RDMA devices to GPU memory: each registers some of the first GPU."""
    name = "GPUDirect"
    try:
        from megatron.dpp.transport.native import load_native

        library = load_native()
        library.CudaDevice(0)
        ports, refused = library.rdma_ports()
    except ImportError as error:
        return Finding(name, "note", f"not tried: {error}", "with torch: megatron-dpp doctor")
    except TransportError as error:
        return Finding(name, "note", str(error))
    devices = sorted({port["device"] for port in ports})
    if not devices:
        return Finding(name, "note", "; ".join(refused) or "no RDMA device")
    found = {device: library.probe_gpu_direct(device, 0) for device in devices}
    text = "; ".join([*(f"{device}: {how}" for device, (_, how) in found.items()), *refused])
    if all(possible for possible, _ in found.values()) and not refused:
        return Finding(name, "ok", text)
    advice = "without it GPU tensors between hosts pass through the host's memory"
    return Finding(name, "note", text, advice)
