"""Places of GPUs and network cards in the tree of PCI devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

SYS = Path("/sys")
"""Root of the kernel's files about devices."""
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # class of GPUs, with and without a display


def pci_distance(one: Path, other: Path) -> tuple[int, int]:
    """Distance between two PCI devices: the kind of connection, then the number of bridges.

    0 is below one port of a host bridge (PCI switches only), 1 below one host bridge, 2 further.
    The order of these is that of NCCL's PIX and PXB, PHB, and SYS.

    Args:
        one: path of a device under ``/sys/devices``, links resolved.
        other: likewise.
    """
    ours, theirs = one.parts, other.parts
    shared = next(
        (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    bridges = len(ours) + len(theirs) - 2 * shared
    root = next((at for at, part in enumerate(ours) if part.startswith("pci")), len(ours))
    return (0 if shared > root + 1 else 1 if shared > root else 2), bridges


def pci_path(entry: str) -> Path:
    """Path of a device under ``/sys/devices``, by an entry of ``/sys`` that leads there."""
    return (SYS / entry).resolve()


def gpu_path(device: torch.device) -> Path | None:
    """Path of a GPU in the tree of PCI devices; None on a CPU, and where PyTorch does not say."""
    facts: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    if not hasattr(facts, "pci_bus_id"):
        return None
    address = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    return pci_path(f"bus/pci/devices/{address}")


def gpus_of_ranks(device: torch.device, local_rank: int) -> Sequence[Path | None]:
    """The GPUs of this node's ranks up to our own, which is last; None for a rank without one.

    A rank that sees several GPUs and has the one of its number takes the lower ranks to be alike.
    Another one sees its own GPU alone: then the node's GPUs with lower PCI addresses stand for the
    lower ranks.
    """
    own = gpu_path(device)
    if own is None:
        return [None] * (local_rank + 1)
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index == local_rank and torch.cuda.device_count() > 1:
        return [*(gpu_path(torch.device("cuda", lower)) for lower in range(index)), own]
    return [*(path for path in _gpus() if path.name < own.name), own]


def _gpus() -> list[Path]:
    """All GPUs of NVIDIA on this node, by their PCI addresses."""
    found = sorted((SYS / "bus/pci/devices").glob("*"))
    return [entry.resolve() for entry in found if _is_gpu(entry)]


def _is_gpu(entry: Path) -> bool:
    try:
        vendor, kind = ((entry / name).read_text(encoding="utf-8") for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor.startswith(_NVIDIA) and kind.startswith(_DISPLAY)
