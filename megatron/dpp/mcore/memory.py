"""How much memory one chunk's activation takes, measured where autograd saves it, and is left.

``Stage`` wraps the first forwards of a run with :func:`saved_bytes`; a cap in bytes and the share
that a deferred weight gradient keeps (beta) are made from the result. Whether graphs, which need
more, fit is judged by :func:`room`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class SavedBytes:
    """Counts the storages that a forward keeps for its backward, each once, weights not counted."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._seen = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.total = 0

    def see(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor was saved; hook of ``torch.autograd.graph.saved_tensors_hooks``."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.total += storage.nbytes()
        return tensor


@contextlib.contextmanager
def saved_bytes(model: torch.nn.Module) -> Iterator[SavedBytes]:
    """Count what the forwards inside the block save for their backwards."""
    count = SavedBytes(model)
    with torch.autograd.graph.saved_tensors_hooks(count.see, lambda tensor: tensor):
        yield count


def room() -> int | None:
    """Bytes that tensors may still take on the current GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info()
    return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
