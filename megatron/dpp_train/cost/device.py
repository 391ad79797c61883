"""Rates and memory of the devices that a run has or is planned for.

GPUs are listed through ``nvidia-smi``. A CPU core's rate is measured with a matrix product of a
tenth of a second. Nothing here imports PyTorch.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass

from megatron.dpp.errors import ConfigError
from megatron.dpp_train.cost import constants


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device and its links.

    Args:
        name: the driver's name of it.
        flops: FLOP/s that training reaches in matrix products.
        memory_bytes: free for a run.
        bytes_per_second: bandwidth of its memory.
        link: bytes/s, one way, to another device of the node.
        network: bytes/s, one way, to another node; every device has an adapter of its own.
        collective: seconds of a tensor-parallel collective beside its bytes.
        launch: seconds in which the host launches a layer's forward, whatever the layer's size.
        between: seconds from the end of one task to the next.
        bf16: its matrix units take bf16; otherwise bf16 is emulated, slower than fp16.
        fp8: its matrix units take 8 bit.
        queues: the host launches ahead of the device (a GPU), and launches can be replayed.
        source: origin of ``flops``, for the reader.
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
    fp8: bool
    queues: bool
    source: str

    def with_figures(
        self, tflops: float | None, memory: float | None, bandwidth: float | None = None
    ) -> Device:
        """The same with the figures that are given: TFLOP/s, GiB, and GB/s of memory."""
        found = self
        if tflops is not None:
            found = dataclasses.replace(found, flops=tflops * 1e12, source="given")
        if memory is not None:
            found = dataclasses.replace(found, memory_bytes=memory * 2**30)
        if bandwidth is not None:
            found = dataclasses.replace(found, bytes_per_second=bandwidth * 1e9)
        return found

    def group_link(self, members: int, per_node: int) -> float:
        """Bytes/s of each of ``members`` devices in a ring, ``per_node`` of them on a node. Between
        nodes the ring uses the adapters of all devices that a node has of it.
        """
        if per_node >= members:
            return self.link
        return min(self.link, per_node * self.network)


KNOWN_GPUS = tuple(constants.GPUS)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One node. ``num_gpus`` is 0 where processes run on its CPU."""

    num_gpus: int
    device: Device


def find_machine(processes: int = 1) -> Machine:
    """This node's GPUs that ``CUDA_VISIBLE_DEVICES`` shows; without any, the share of its CPU that
    each of ``processes`` gets.
    """
    return find_gpus() or Machine(num_gpus=0, device=cpu_device(processes))


def find_gpus() -> Machine | None:
    """This node's GPUs that ``CUDA_VISIBLE_DEVICES`` shows; None without any."""
    gpus = _gpus()
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        gpus = gpus[: len([word for word in shown.split(",") if word.strip() not in ("", "-1")])]
    if not gpus:
        return None
    name, memory = gpus[0]
    return Machine(num_gpus=len(gpus), device=gpu_device(name, memory))


def _known_name(name: str) -> str | None:
    return next((each for each in KNOWN_GPUS if re.search(rf"{each}(?![\dG])", name)), None)


def gpu_device(name: str, memory_bytes: float) -> Device:
    """The figures of a GPU by its name."""
    known = _known_name(name)
    gpu = constants.GPUS[known] if known else constants.UNKNOWN_GPU
    source = f"72 % of the {known}'s peak" if known else "a guess: not in the table of GPUs"
    return Device(
        name=name,
        flops=gpu.flops,
        memory_bytes=memory_bytes,
        bytes_per_second=gpu.memory_rate,
        link=gpu.link,
        network=constants.NETWORK,
        collective=constants.GPU_COLLECTIVE,
        launch=constants.GPU_LAUNCH,
        between=constants.GPU_BETWEEN,
        bf16=not any(each in name for each in constants.BEFORE_BF16),
        fp8=not any(each in name for each in constants.BEFORE_BF16 + constants.BEFORE_FP8),
        queues=True,
        source=source,
    )


def known_gpu(name: str) -> Device:
    """The figures of a GPU of the table; this machine need not have one.

    Raises:
        ConfigError: it is not in the table.
    """
    plain = re.sub(r"^(NVIDIA|AMD)?(GEFORCE)?", "", re.sub(r"[ _-]", "", name.upper()))
    names = {each.replace(" ", ""): each for each in KNOWN_GPUS}
    known = names.get(plain) or names.get(f"RTX{plain}") or names.get(plain.removeprefix("RTX"))
    known = known or _known_name(name)  # as a driver writes it
    if known is None:
        raise ConfigError(
            f"--gpu {name}: expected one of {', '.join(KNOWN_GPUS)}; for another "
            "one give --tflops, --memory and --bandwidth in the place of --gpu"
        )
    return gpu_device(known, constants.GPUS[known].memory_gib * 2**30)


def named_gpu(
    name: str | None, tflops: float | None, memory: float | None, bandwidth: float | None
) -> Device | None:
    """The GPU of another machine, with the figures that are given; None where this machine's
    device is meant: without a name, and without one of the figures.

    Raises:
        ConfigError: a name that is not in the table.
    """
    figures = tflops, memory, bandwidth
    if name is None and None in figures:
        return None
    found = gpu_device("GPU of given figures", 0) if name is None else known_gpu(name)
    return found.with_figures(*figures)


def cpu_device(processes: int = 1) -> Device:
    """The share of this CPU that one of ``processes`` gets: at most a core, whose fp32 rate this
    process measures once.
    """
    cores = len(os.sched_getaffinity(0))
    share = min(1.0, cores / processes)
    library = "PyTorch" if "torch" in sys.modules else "numpy"
    flops = _measured_flops(library)
    return Device(
        name="CPU",
        flops=flops * share,
        memory_bytes=_host_memory() / processes,
        bytes_per_second=constants.CPU_MEMORY_RATE * share,
        link=constants.CPU_LINK * share,
        network=constants.CPU_NETWORK,
        collective=constants.CPU_COLLECTIVE / share,
        launch=constants.CPU_LAUNCH / share,
        between=constants.CPU_BETWEEN / share,
        bf16=True,
        fp8=False,
        queues=False,
        source=f"a matrix product of {library}'s, measured now",
    )


def _gpus() -> list[tuple[str, float]]:
    """Name and bytes of every GPU that ``nvidia-smi`` lists. Other lines of its output are
    skipped."""
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
    """Name and bytes of a GPU whose size is ``[N/A]``: a whole GPU's of that kind (with MIG), else
    the host's (an integrated GPU). The name says which.
    """
    known = _known_name(name)
    if known:
        memory = constants.GPUS[known].memory_gib * 2.0**30
        return f"{name}, its memory taken for a whole {known}'s", memory
    return f"{name}, its memory taken for the host's", _host_memory()


def _host_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


@functools.cache
def _measured_flops(library: str) -> float:
    """FLOP/s that training reaches on one core.

    That is measured with PyTorch where it is loaded (as in a run), else with numpy, whose BLAS may
    be twice as fast. The clock is this thread's processor time, so other processes do not count.
    The products are too small for numpy's BLAS to use threads. A share of the rate is returned,
    since the rest of a layer is slower.
    """
    size, batch, count = 64, 64, 0
    if library == "PyTorch":
        torch, share = sys.modules["torch"], 0.9
        left = torch.ones((batch, size, size), dtype=torch.float32)
    else:
        import numpy as np

        share = 0.5
        left = np.ones((batch, size, size), dtype=np.float32)
    left @ left  # the first one maps the pages
    start = time.thread_time()
    while count < 3 or time.thread_time() - start < 0.05:
        left @ left
        count += 1
    seconds = (time.thread_time() - start) / count
    return share * batch * 2 * size**3 / seconds


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
    """This machine's GPUs, or shares of its CPU where it has none.

    Args:
        processes: of each node; by default one for each GPU, or 1 without GPUs.
    """
    machine = find_machine(processes or 1)
    per_node = processes or machine.num_gpus or 1
    return Devices(device=machine.device, number=per_node * nodes, per_node=per_node)


def named_devices(
    name: str | None,
    number: int,
    *,
    per_node: int | None = None,
    tflops: float | None = None,
    memory: float | None = None,
    bandwidth: float | None = None,
) -> Devices:
    """``number`` GPUs of another machine, by name ("H100") or by figures.

    Args:
        per_node: GPUs of a node, by default all up to 8.
        tflops: TFLOP/s of one in matrix products.
        memory: GiB of one.
        bandwidth: GB/s of its memory.

    Raises:
        ConfigError: a name that is not in the table, or neither a name nor all three figures.
    """
    found = named_gpu(name, tflops, memory, bandwidth)
    if found is None:
        raise ConfigError("give --gpu NAME, or --tflops, --memory and --bandwidth together")
    return Devices(device=found, number=number, per_node=per_node or min(8, number))
