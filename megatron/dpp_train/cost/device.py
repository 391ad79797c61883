"""Rates and memory of the devices that a run has or is planned for. Needs no PyTorch.

GPUs are listed through ``nvidia-smi``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
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
        collective: seconds of a collective beside its bytes.
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

    def group_link(self, members: int, per_node: int) -> float:
        """Bytes/s of each of ``members`` devices in a ring, ``per_node`` of them on a node. Between
        nodes the ring uses the adapters of all devices that a node has of it.
        """
        return self.link if per_node >= members else min(self.link, per_node * self.network)


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
    plain = re.sub(r"^(NVIDIA|AMD)?(GEFORCE)?", "", re.sub(r"[ _-]", "", name.upper()))
    names = {gpu.replace(" ", ""): gpu for gpu in constants.GPUS}
    spellings = (plain, f"RTX{plain}", plain.removeprefix("RTX"))
    known = next((names[word] for word in spellings if word in names), None) or _known(name)
    if known is None:
        raise ConfigError(f"--gpu {name}: expected one of {', '.join(constants.GPUS)}")
    device = gpu_device(known, constants.GPUS[known].memory_gib * 2**30)
    return Devices(device=device, number=number, per_node=per_node or min(8, number))


def gpu_device(name: str, memory_bytes: float) -> Device:
    """The figures of a GPU by its driver's name."""
    known = _known(name)
    gpu = constants.GPUS[known] if known else constants.UNKNOWN_GPU
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
        bf16=not any(part in name for part in constants.BEFORE_BF16),
        fp8=not any(part in name for part in constants.BEFORE_BF16 + constants.BEFORE_FP8),
        queues=True,
        source=f"72 % of the {known}'s peak" if known else "a guess: not in the table of GPUs",
    )


def _known(name: str) -> str | None:
    return next((gpu for gpu in constants.GPUS if re.search(rf"{gpu}(?![\dG])", name)), None)


def cpu_device(processes: int = 1) -> Device:
    """The share of this CPU that one of ``processes`` gets: at most a core."""
    share = min(1.0, len(os.sched_getaffinity(0)) / processes)
    return Device(
        name="CPU",
        flops=constants.CPU_FLOPS * share,
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
        source="a guess for a core",
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
        whole = constants.GPUS[known].memory_gib * 2.0**30 if known else _host_memory()
        found.append((name, int(text) * 2.0**20 if text.isdecimal() else whole))
    return found


def _host_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
