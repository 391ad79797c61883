"""How fast and how large a device is: what estimates of time and of what fits need to know.

Nothing here imports PyTorch. GPUs are asked for through ``nvidia-smi``; a CPU's rate is measured by
a matrix product of a tenth of a second.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass

from megatron.dpp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device and its links.

    Args:
        name: as the driver calls it.
        flops: floating point operations per second that training reaches in matrix products.
        memory_bytes: of one device, what is free for a run.
        bytes_per_second: of its memory.
        link: bytes per second, one way, to another device of the node.
        network: bytes per second, one way, to another node; every device has an adapter of its own.
        collective: seconds that a tensor-parallel collective takes beside its bytes.
        launch: seconds that the host takes to start the forward of a layer (its backward takes as
            long, its weight gradients half of that); a smaller layer takes no less.
        between: seconds that the host takes from the end of one task to the next.
        bf16: its matrix units take bf16; else it is emulated, several times as slow as fp16.
        queues: the host launches ahead of the device (a GPU), and its launches can be replayed.
        source: where ``flops`` comes from.
    """

    name: str
    flops: float
    memory_bytes: float
    bytes_per_second: float
    link: float
    network: float
    collective: float
    launch: float
    between: float
    bf16: bool
    queues: bool
    source: str

    def group_link(self, members: int, per_node: int) -> float:
        """Bytes per second of each of ``members`` devices in a ring, ``per_node`` of them a node.

        Between nodes they share the adapters of all of these.
        """
        if per_node >= members:
            return self.link
        return min(self.link, per_node * self.network)


# 72 % of the dense 16-bit peak, which the matrix products of a training step reach on H200s; memory
# and link bandwidth from the data sheets, links at 80 %.
_KNOWN = {
    "B200": (1.6e15, 8e12, 7.2e11),
    "H200": (7.1e14, 4.8e12, 3.6e11),
    "H100": (7.1e14, 3.3e12, 3.6e11),
    "A100": (2.2e14, 2.0e12, 2.4e11),
    "L40": (1.3e14, 8.6e11, 2e10),
    "V100": (9e13, 9e11, 1.2e11),
    "T4": (4.7e13, 3.2e11, 1.2e10),
}
KNOWN_GPUS = tuple(_KNOWN)
_MEMORY_GIB = {"B200": 179, "H200": 140, "H100": 80, "A100": 80, "L40": 45, "V100": 32, "T4": 15}
_BEFORE_BF16 = ("P100", "V100", "T4", "TITAN", "GTX", "GeForce RTX 20", "Quadro RTX")
"""In the names of GPUs older than Ampere."""
_UNKNOWN_GPU = (3e13, 5e11, 1e10)
_NETWORK = 4e10
_GPU_LAUNCH, _GPU_BETWEEN, _GPU_COLLECTIVE = 1.2e-3, 1.2e-4, 4e-5
_CPU_LAUNCH, _CPU_BETWEEN, _CPU_COLLECTIVE = 1.5e-3, 2e-4, 2e-3


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What one node offers. ``num_gpus`` 0 means that processes run on its CPU."""

    num_gpus: int
    device: Device


def find_machine(processes: int = 1, env: dict[str, str] | None = None) -> Machine:
    """Look at this node: its GPUs if it has any that ``CUDA_VISIBLE_DEVICES`` shows, else the share
    of its CPU that each of ``processes`` gets.
    """
    environment = dict(os.environ) if env is None else env
    gpus = _gpus()
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        gpus = gpus[: len([word for word in shown.split(",") if word.strip() not in ("", "-1")])]
    if gpus:
        name, memory = gpus[0]
        return Machine(num_gpus=len(gpus), device=gpu_device(name, memory))
    return Machine(num_gpus=0, device=cpu_device(processes))


def _known_name(name: str) -> str | None:
    return next((each for each in _KNOWN if re.search(rf"{each}(?!\d)", name)), None)


def gpu_device(name: str, memory_bytes: float) -> Device:
    """The figures of a GPU by its name."""
    known = _known_name(name)
    (flops, bandwidth, link) = _KNOWN[known] if known else _UNKNOWN_GPU
    source = f"72 % of the {known}'s peak" if known else "a guess: not in the table of GPUs"
    return Device(
        name=name,
        flops=flops,
        memory_bytes=memory_bytes,
        bytes_per_second=bandwidth,
        link=link,
        network=_NETWORK,
        collective=_GPU_COLLECTIVE,
        launch=_GPU_LAUNCH,
        between=_GPU_BETWEEN,
        bf16=not any(each in name for each in _BEFORE_BF16),
        queues=True,
        source=source,
    )


def known_gpu(name: str) -> Device:
    """The figures and the memory of a GPU that this machine need not have.

    Raises:
        ConfigError: it is not in the table.
    """
    known = name.upper()
    if known not in _KNOWN:
        raise ConfigError(f"--gpu {name}: known are {', '.join(_KNOWN)}")
    return gpu_device(known, _MEMORY_GIB[known] * 2**30)


def cpu_device(processes: int = 1) -> Device:
    """What one of ``processes`` has of this CPU: a core's rate in fp32, measured now, or a share of
    it."""
    cores = len(os.sched_getaffinity(0))
    share = min(1.0, cores / processes)
    flops, library = _measured_flops()
    return Device(
        name="CPU",
        flops=flops * share,
        memory_bytes=_host_memory() / processes,
        bytes_per_second=1e10 * share,
        link=2e9 * share,
        network=1e9,
        collective=_CPU_COLLECTIVE / share,
        launch=_CPU_LAUNCH / share,
        between=_CPU_BETWEEN / share,
        bf16=True,
        queues=False,
        source=f"a matrix product of {library}'s, measured now",
    )


def _gpus() -> list[tuple[str, float]]:
    """Name and bytes of every GPU that ``nvidia-smi`` lists; it may say something else besides."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    result = subprocess.run(query, capture_output=True, text=True, timeout=60)
    rows = re.findall(r"^(.+?), *(\d+|\[.+\]) *$", result.stdout, re.MULTILINE)
    return [
        (name, int(size) * 2.0**20) if size.isdecimal() else _without_a_size(name)
        for name, size in rows
    ]


def _without_a_size(name: str) -> tuple[str, float]:
    """Name, with what is assumed, and bytes of a GPU whose size is ``[N/A]``: that of its kind (the
    GPU behind MIG), else the host's, which integrated GPUs share."""
    known = _known_name(name)
    if known:
        return f"{name}, its memory taken for a whole {known}'s", _MEMORY_GIB[known] * 2.0**30
    return f"{name}, its memory taken for the host's", _host_memory()


def _host_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _measured_flops() -> tuple[float, str]:
    """Of one core, and whose: PyTorch's where it is loaded, as in a run, else numpy's, whose BLAS
    may be twice as fast. By the processor time of this thread, so that others' work does not count.

    numpy's products are too small for a BLAS to share them out over threads, whose waiting would
    count too; PyTorch's take the threads that training takes, one in each process of a launcher's.
    A part of the rate: the rest of a layer, and products of awkward sizes, do not reach more.
    """
    size, batch, count = 64, 64, 0
    if torch := sys.modules.get("torch"):
        library, share = "PyTorch", 0.9
        left = torch.ones((batch, size, size), dtype=torch.float32)
    else:
        import numpy as np

        library, share = "numpy", 0.5
        left = np.ones((batch, size, size), dtype=np.float32)
    left @ left  # pages are there after the first
    start = time.thread_time()
    while count < 3 or time.thread_time() - start < 0.05:
        left @ left
        count += 1
    seconds = (time.thread_time() - start) / count
    return share * batch * 2 * size**3 / seconds, library
