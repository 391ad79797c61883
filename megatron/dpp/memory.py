"""Measures the activation memory of a chunk, and the free device memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def saved_bytes(
    outputs: Sequence[torch.Tensor], model: torch.nn.Module, apart: Collection[int] = ()
) -> int:
    """Bytes of the storages that a forward keeps for its backward, each once, weights not counted.

    The autograd graph is read. Hooks on saved tensors would hand copies of the weights to the
    backward, which lack what DistributedDataParallel attaches (``main_grad``).

    Args:
        outputs: of the forward, before its backward.
        model: whose parameters are not counted.
        apart: addresses of further storages that are not counted.
    """
    own = _with_storage(model.parameters())
    seen = {parameter.untyped_storage().data_ptr() for parameter in own} | set(apart)
    total = 0
    for tensor in _with_storage(_saved_tensors(outputs)):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def allocator_retries() -> int:
    """Times that PyTorch's allocator of the current device gave cached memory back as an allocation
    failed; 0 without a GPU.
    """
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def _saved_tensors(outputs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The saved tensors of each function of the graph behind the outputs."""
    waiting: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    reached = set(waiting)
    while waiting:
        function = waiting.pop()
        yield from tensors_in(getattr(function, "saved_tensors", ()))  # a Function of Python
        nested = getattr(getattr(function, "nested", None), "grad_fn", None)
        if nested is not None and nested not in reached:  # a graph within it
            reached.add(nested)
            waiting.append(nested)
        for name in dir(function):
            if name.startswith("_saved_"):  # one of C++ has an attribute per tensor
                yield from tensors_in(getattr(function, name))
        for before, _ in function.next_functions:
            if before is not None and before not in reached:
                reached.add(before)
                waiting.append(before)


def _with_storage(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors that hold values: those within a nested tensor, say, in its place."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from _with_storage(tensors_in([getattr(tensor, name) for name in names]))
        elif tensor.layout == torch.strided:
            yield tensor


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in lists and tuples, at any depth."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def room() -> int | None:
    """Free bytes for tensors on the current GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info()
    return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
