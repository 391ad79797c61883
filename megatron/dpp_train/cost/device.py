"""Rates and memory of the devices that a run has or is planned for. Needs no PyTorch.

GPUs are listed through ``nvidia-smi``. A new GPU is one row of :data:`GPUS`. "H200 runs" are those
of ``tests/cost/test_measured.py``, which hold the model to them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import NamedTuple

from megatron.dpp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device and its links; of what is not given, a GPU's as in H200 runs.

    Args:
        name: the driver's name of it.
        flops: FLOP/s that training reaches in matrix products.
        memory_bytes: free for a run.
        bytes_per_second: bandwidth of its memory.
        link: bytes/s, one way, to another device of the node.
        source: origin of ``flops``, for the reader.
        network: bytes/s, one way, to another node; every device has an adapter of its own: 400
            Gbit/s at 80 %.
        collective: seconds of a collective beside its bytes.
        launch: seconds in which the host launches a layer's forward, whatever the layer's size,
            without graphs.
        between: seconds from the end of one task to the next.
        bf16: its matrix units take bf16; otherwise bf16 is emulated, slower than fp16.
        queues: the host launches ahead of the device (a GPU), and launches can be replayed.
    """

    name: str
    flops: float
    memory_bytes: float
    bytes_per_second: float
    link: float
    source: str
    network: float = 4e10
    collective: float = 4e-5
    launch: float = 1.2e-3
    between: float = 1.2e-4
    bf16: bool = True
    queues: bool = True

    def group_link(self, members: int, per_node: int) -> float:
        """Bytes/s of each of ``members`` devices in a ring, ``per_node`` of them on a node. Between
        nodes the ring uses the adapters of all devices that a node has of it.
        """
        return self.link if per_node >= members else min(self.link, per_node * self.network)


class Gpu(NamedTuple):
    """Figures of one kind of GPU: FLOP/s of matrix products, bytes/s of memory, bytes/s of a link
    to a GPU of the same node (one way), and memory in GiB.
    """

    flops: float
    memory_rate: float
    link: float
    memory_gib: float


GPUS = {
    "GB200": Gpu(1.8e15, 8e12, 6.8e11, 184),
    "B200": Gpu(1.6e15, 8e12, 6.8e11, 179),
    "H200": Gpu(7.1e14, 4.8e12, 3.4e11, 140),
    "H100": Gpu(7.1e14, 3.3e12, 3.4e11, 80),
    "H800": Gpu(7.1e14, 3.3e12, 1.5e11, 80),
    "H20": Gpu(1.1e14, 4.0e12, 3.4e11, 95),
    "A800": Gpu(2.2e14, 2.0e12, 1.5e11, 80),
    "A100": Gpu(2.2e14, 2.0e12, 2.3e11, 80),
    "MI300X": Gpu(9.4e14, 5.3e12, 3.3e11, 192),
    "L40S": Gpu(2.6e14, 8.6e11, 2e10, 45),
    "L40": Gpu(1.3e14, 8.6e11, 2e10, 45),
    "A6000": Gpu(1.1e14, 7.7e11, 2e10, 48),
    "A10": Gpu(9e13, 6.0e11, 2e10, 22),
    "RTX 5090": Gpu(1.5e14, 1.8e12, 2e10, 31),
    "RTX 4090": Gpu(1.2e14, 1.0e12, 2e10, 24),
    "RTX 3090": Gpu(5.1e13, 9.4e11, 2e10, 24),
    "V100": Gpu(9e13, 9e11, 1.1e11, 32),
    "T4": Gpu(4.7e13, 3.2e11, 1.1e10, 15),
}
"""FLOP/s: 72 % of the dense 16-bit peak that accumulates in fp32 (data sheets and whitepapers; of
the GB200 half a pair), as H200 runs reach. Links: data sheets at 76 %. H200 and H100 alone have
been measured here.
"""
_BEFORE_BF16 = ("P100", "V100", "T4", "TITAN", "GTX", "GeForce RTX 20", "Quadro RTX")
"""Parts of the names of GPUs without bf16 (older than Ampere)."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of a run, one for each process.

    Args:
        device: one of them; all are alike.
        number: processes of the run.
        per_node: processes of a node.
    """

    device: Device
    number: int
    per_node: int

    @property
    def on_gpu(self) -> bool:
        """They are GPUs, not shares of a CPU."""
        return self.device.queues


def find_devices(processes: int | None = None, nodes: int = 1) -> Devices:
    """This machine's GPUs that ``CUDA_VISIBLE_DEVICES`` shows, or shares of its CPU without any.

    Args:
        processes: of each node; by default one for each GPU, or 1 without GPUs.
        nodes: machines like this one.
    """
    gpus = _gpus()
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        gpus = gpus[: len([word for word in shown.split(",") if word.strip() not in ("", "-1")])]
    per_node = processes or len(gpus) or 1
    device = gpu_device(*gpus[0]) if gpus else cpu_device(per_node)
    return Devices(device=device, number=per_node * nodes, per_node=per_node)


def named_devices(name: str, number: int, *, per_node: int | None = None) -> Devices:
    """``number`` GPUs of another machine, by name in any spelling: H100, rtx4090, "NVIDIA
    A100-SXM4-80GB".

    Args:
        per_node: GPUs of a node, by default all up to 8.

    Raises:
        ConfigError: a name that is not in the table.
    """
    known = _known(name)
    if known is None:
        raise ConfigError(f"--gpu {name}: expected one of {', '.join(GPUS)}")
    device = gpu_device(known, GPUS[known].memory_gib * 2**30)
    return Devices(device=device, number=number, per_node=per_node or min(8, number))


def gpu_device(name: str, memory_bytes: float) -> Device:
    """The figures of a GPU by its driver's name; a guess for one that the table lacks."""
    known = _known(name)
    gpu = GPUS[known] if known else Gpu(3e13, 5e11, 1e10, 0)
    return Device(
        name=name,
        flops=gpu.flops,
        memory_bytes=memory_bytes,
        bytes_per_second=gpu.memory_rate,
        link=gpu.link,
        source=f"72 % of the {known}'s peak" if known else "a guess: not in the table of GPUs",
        bf16=not any(part in name for part in _BEFORE_BF16),
    )


def _known(name: str) -> str | None:
    """The GPU of the table whose name is in another, in any spelling."""
    plain = re.sub("[ _-]+", " ", name).upper()
    words = ((gpu, gpu.removeprefix("RTX ")) for gpu in GPUS)
    return next((gpu for gpu, word in words if re.search(rf"{word}(?![\dG])", plain)), None)


def cpu_device(processes: int = 1) -> Device:
    """The share of this CPU that one of ``processes`` gets: at most a core. Coarse: no page
    measures these figures."""
    share = min(1.0, len(os.sched_getaffinity(0)) / processes)
    return Device(
        name="CPU",
        flops=3e10 * share,  # in fp32
        memory_bytes=_host_memory() / processes,
        bytes_per_second=1e10 * share,
        link=2e9 * share,
        source="a guess for a core",
        network=1e9,
        collective=2e-3 / share,
        launch=1.5e-3 / share,
        between=2e-4 / share,
        queues=False,
    )


def _gpus() -> list[tuple[str, float]]:
    """Name and bytes of every GPU that ``nvidia-smi`` lists. A size of ``[N/A]`` is a whole GPU's
    of that kind (with MIG), else the host's (an integrated GPU)."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    result = subprocess.run(query, capture_output=True, text=True, timeout=60)
    found = []
    for name, text in re.findall(r"^(.+?), *(\d+|\[.+\]) *$", result.stdout, re.MULTILINE):
        known = _known(name)
        whole = GPUS[known].memory_gib * 2.0**30 if known else _host_memory()
        found.append((name, int(text) * 2.0**20 if text.isdecimal() else whole))
    return found


def _host_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
