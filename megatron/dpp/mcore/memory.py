"""How much memory one chunk's activation takes, counted where autograd keeps it, and is left.

``Stage`` counts the outputs of a run's first forwards with :func:`saved_bytes`; a cap in bytes and
the share that a deferred weight gradient keeps (beta) are made from the result. Whether graphs,
which need more, fit is judged by :func:`room`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


def saved_bytes(outputs: Sequence[torch.Tensor], model: torch.nn.Module) -> int:
    """Bytes of the storages that a forward keeps for its backward, each once, weights not counted.

    The graph behind the outputs is read as it stands. Hooks on saved tensors could count, too, but
    a backward gets copies of what went through them, and a weight that is a copy has lost what
    DistributedDataParallel attached to it: the linear layers that add into ``main_grad`` would then
    return no gradient, which an overlapped reduction refuses.

    Args:
        outputs: of the forward, before its backward.
        model: whose parameters are not counted.
    """
    seen = {p.untyped_storage().data_ptr() for p in model.parameters()}
    total = 0
    for tensor in _saved_tensors(outputs):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def is_readable(config: Any) -> bool:
    """Whether saved tensors lie where autograd keeps them; reading offloaded ones fetches them."""
    return not (config.cpu_offloading or config.fine_grained_activation_offloading)


def _saved_tensors(outputs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """What each function of the graph behind the outputs has saved."""
    waiting: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    reached = set(waiting)
    while waiting:
        function = waiting.pop()
        yield from tensors_in(getattr(function, "saved_tensors", ()))  # a Function of Python
        for name in dir(function):
            if name.startswith("_saved_"):  # one of C++ has an attribute per tensor
                yield from tensors_in(getattr(function, name))
        for before, _ in function.next_functions:
            if before is not None and before not in reached:
                reached.add(before)
                waiting.append(before)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a nest of lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def room() -> int | None:
    """Bytes that tensors may still take on the current GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info()
    return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
