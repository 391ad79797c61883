"""This rank's GPU, by the numbers and names of NVIDIA's driver."""

from __future__ import annotations

from typing import Any

import torch

from megatron.dpp.errors import TransportUnavailable


def device_index(device: torch.device) -> int:
    """The driver's number of a torch device; both count what CUDA_VISIBLE_DEVICES leaves."""
    return device.index if device.index is not None else torch.cuda.current_device()


def gpu_facts(library: Any, device: torch.device) -> tuple[str, dict[str, bool]]:
    """The UUID of our GPU, and for each visible GPU whether ours can write into its memory.

    Empty without a GPU, or without NVIDIA's driver.
    """
    if device.type != "cuda":
        return "", {}
    try:
        own = library.CudaDevice(device_index(device))
    except TransportUnavailable:
        return "", {}
    return own.uuid, {uuid: own.access_to(uuid) in ("same", "yes") for uuid in own.visible()}
