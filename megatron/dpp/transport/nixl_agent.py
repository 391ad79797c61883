"""NIXL's agent: registered memory, and writes into the memory of other agents over UCX.

It uses the module beneath NIXL's Python interface, because that interface polls without a pause: a
core per rank. Here NIXL's thread sleeps on UCX's descriptors.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib
import logging
import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch

from megatron.dpp.errors import SetupError, TransportUnavailable, one_line, setting
from megatron.dpp.transport.base import ChannelSpec
from megatron.dpp.transport.native import load_native

_LOOK_MICROSECONDS = 1000
"""NIXL's thread looks at its connections this often where UCX's descriptors do not wake it."""


class Slots:
    """Memory with the slots of several channels, each slot on pages of its own.

    Forked processes share the pages, so that they are never copied away from a network card. The
    addresses stay reserved after ``close``: a peer that has not heard of it may still write there.
    """

    def __init__(self, rank: int, specs: Sequence[ChannelSpec]) -> None:
        page = mmap.PAGESIZE
        self._depths = [spec.depth for spec in specs]
        self.strides = [max(1, -(-spec.slot_bytes // page)) * page for spec in specs]
        self._starts, total = [], 0
        for stride, depth in zip(self.strides, self._depths, strict=True):
            self._starts.append(total)
            total += stride * depth
        room = load_native().memory_room("/proc/self/cgroup", "/sys/fs/cgroup", 0)  # without swap
        try:
            if room and room[0] < total:
                raise OSError(room[1])
            self._mapping = mmap.mmap(-1, max(total, page))
        except OSError as error:
            slots = setting("slots")
            raise SetupError(
                f"rank {rank}: no memory for {total} bytes of slots ({error}): lower {slots}", slots
            ) from error
        self.memory = torch.frombuffer(self._mapping, dtype=torch.uint8).zero_()  # makes the pages
        keep_for_ever(self._mapping)

    def slot(self, channel: int, sequence: int, num_bytes: int) -> torch.Tensor:
        """The first bytes of the slot of message ``sequence``, which counts from 0; uint8."""
        index = sequence % self._depths[channel]
        start = self._starts[channel] + index * self.strides[channel]
        return self.memory[start : start + num_bytes]

    def close(self) -> None:
        """Give the memory back."""
        self._mapping.madvise(mmap.MADV_REMOVE)


class NixlAgent:
    """One rank's agent. Errors of NIXL are ``Exception``s of its own.

    Args:
        name: different from that of every agent that it writes to.
        slots: memory that it reads, or that others write.
    """

    def __init__(self, name: str, slots: Sequence[Slots]) -> None:
        self._nixl = _load()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _LOOK_MICROSECONDS
        self._agent = self._nixl.nixlAgent(name, config)
        self._backends = [self._agent.createBackend("UCX", {})]
        places = [(of.memory.data_ptr(), of.memory.nbytes, 0, "") for of in slots]
        self._registered = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, places)
        self._agent.registerMem(self._registered, self._backends)

    def description(self) -> str:
        """The data that others need for ``connect``, as ASCII."""
        return base64.b64encode(self._agent.getLocalMD()).decode()

    def connect(self, description: str) -> str:
        """Begin to connect to another agent; returns its name."""
        name: str = self._agent.loadRemoteMD(base64.b64decode(description))
        self._agent.makeConnection(name, self._backends)
        return name

    def write(self, source: torch.Tensor, agent: str, address: int) -> int:
        """Begin to write registered bytes to an address of another agent; returns a handle."""
        ours, theirs = (
            self._nixl.nixlXferDList(self._nixl.DRAM_SEG, [(start, source.nbytes, 0)])
            for start in (source.data_ptr(), address)
        )
        handle: int = self._agent.createXferReq(
            self._nixl.NIXL_WRITE, ours, theirs, agent, b"", self._backends
        )
        self._agent.postXferReq(handle, b"")
        return handle

    def is_written(self, handle: int) -> bool:
        """True once the other agent's memory has the bytes; the handle then ends."""
        if self._agent.getXferStatus(handle) == self._nixl.NIXL_IN_PROG:
            return False
        self._agent.releaseXferReq(handle)
        return True

    def close(self, begun: Sequence[int]) -> None:
        """Give up the writes that were begun, and end NIXL's threads."""
        for handle in begun:
            with contextlib.suppress(Exception):
                self._agent.releaseXferReq(handle)
        with contextlib.suppress(Exception):
            self._agent.deregisterMem(self._registered, self._backends)
        del self._agent


def keep_for_ever(kept: object) -> None:
    """Keep an object until the process has ended, also from the interpreter's own clean-up."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _load() -> Any:
    """NIXL's module.

    Raises:
        TransportUnavailable: it does not load.
    """
    # UCX's module for EFA loads the system's RDMA libraries beside those of NIXL's wheel (1.5.1).
    # The process then crashes when it ends.
    os.environ.setdefault("UCX_MODULES", "^efa")
    raises = logging.raiseExceptions
    try:
        return importlib.import_module("nixl._bindings")
    except (ImportError, OSError) as error:
        raise TransportUnavailable(f"NIXL does not load: {one_line(error)}") from error
    finally:
        logging.raiseExceptions = raises  # NIXL clears it
