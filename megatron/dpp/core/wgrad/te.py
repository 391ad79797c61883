"""Transformer Engine's own delayed weight gradients, for a schedule that runs them as W tasks.

Built with ``delay_wgrad_compute``, each linear module of Transformer Engine keeps what its weight
gradient needs in a queue of its own (``wgrad_store``): a backward pass puts one entry, and
``backward_dw()`` takes the oldest, computes the gradient and runs the hooks that
DistributedDataParallel registered with the module. ``wgrad.WeightGradients`` is the caller.

A chunk's B's and W's each run in microbatch order, so a first-in-first-out queue per module is
enough: its k-th entry is microbatch k's. :class:`DelayedModules` asserts both orders. Thus the
entry that overwrites ``main_grad`` (``is_first_microbatch``) is the first one to be taken.

The ``grad`` that a backward pass leaves in these parameters waits with the queue's entry, as
``backward_dw`` expects that of its own microbatch. What a grouped layer leaves in its weights'
is memory that its ``backward_dw`` has yet to fill; the queue's entry holds it, so it is dropped.

Under CUDA graphs the captured backward's entries are taken off the queues and each captured W puts
its own back, so that replays leave the queues alone.

This holds for Transformer Engine 2.7 to 2.20 by its sources, and was run with 2.11 and
2.16. Modules before 2.7 have no hooks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.dpp.core.memory import tensors_in
from megatron.dpp.core.wgrad.own_way import Place, places
from megatron.dpp.core.wgrad.product import DeferredWork
from megatron.dpp.errors import ConfigError, setting

SINCE = "2.7.0"
"""The first version whose modules take over DistributedDataParallel's hooks."""


def delay_weight_gradients(config: Any) -> str | None:
    """Let the Transformer Engine layers that are built from ``config`` delay weight gradients.

    Call it before the model is built, for a model that only ``DppSchedule`` trains, and give
    ``DistributedDataParallelConfig`` ``delay_wgrad_compute=True`` as well. megatron-core's own
    check of that field wants its overlap of experts' communication too, hence not the constructor.

    Returns:
        None, or the reason why not: the config is then unchanged and the backward stays fused.
    """
    reason = why_fused(config)
    if reason is None:
        config.delay_wgrad_compute = True
    return reason


def why_fused(config: Any) -> str | None:
    """The reason why Transformer Engine's layers cannot delay weight gradients here, or None."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    from megatron.core.utils import get_te_version, is_te_min_version

    if not is_te_min_version(SINCE):
        return f"Transformer Engine {get_te_version()} is too old: {SINCE} or newer is needed"
    reasons = {
        "8- and 4-bit layers add bias gradients before their turn": config.fp8 or config.fp4,
        "tp_comm_overlap computes weight gradients with its communication": (
            config.tp_comm_overlap
        ),
        "moe_shared_expert_overlap runs layers on a stream of their own": (
            config.moe_shared_expert_overlap
        ),
        "use_cpu_initialization replaces biases, which then do not wait for their gradients": (
            config.use_cpu_initialization
        ),
        "activations are offloaded": config.cpu_offloading
        or config.fine_grained_activation_offloading,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def is_delayed(module: Any) -> bool:
    """True if a module delays its weight gradients."""
    store = getattr(module, "wgrad_store", None)
    return store is not None and hasattr(module, "backward_dw") and store.delay_wgrad_compute()


def _has_trained_weight(module: torch.nn.Module) -> bool:
    """True if the weight is trained; else the module puts nothing into its queue.

    Raises:
        ConfigError: its bias is not frozen, whose gradient comes with the weight's.
    """
    trained = [
        parameter
        for parameter in module.parameters(recurse=False)
        if getattr(parameter, "skip_backward_post_hook", False) and parameter.requires_grad
    ]
    if trained and all(parameter.dim() == 1 for parameter in trained):
        split, off = setting("split_backward"), setting("split_backward", "off")
        raise ConfigError(
            f"{split}: a {type(module).__name__} of Transformer Engine with a frozen "
            "weight and a trained bias would lose the bias's gradient; freeze both or neither, "
            f"or use {off}",
            split,
            off,
        )
    return bool(trained)


def _refuse_changed(place: Place) -> None:
    """Refuse a module whose ``backward_dw`` would not be what a host has made of it: the wrapper's
    hooks are in it, so it cannot go its own way.

    Raises:
        ConfigError: names the module and the reason.
    """
    kind: Any = type(place.module)
    written: Any = functools.reduce(
        lambda owner, name: getattr(owner, name, None),
        kind.__qualname__.split("."),
        sys.modules.get(kind.__module__),
    )
    parameters = [p for p in place.module.parameters(recurse=False) if p.requires_grad]
    reasons = {
        f"its class {kind.__name__} was made at run time": written is not kind,
        "its forward was replaced": "forward" in vars(place.module),
        "a parameter has hooks": any(
            p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters
        ),
    }
    reason = place.around or next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        split, off = setting("split_backward"), setting("split_backward", "off")
        raise ConfigError(
            f"{split}: {place.name} of Transformer Engine was built with "
            f"delay_wgrad_compute, and a deferred weight gradient would leave out that {reason}; "
            f"use {off}",
            split,
            off,
        )


def refuse_delayed(chunks: list[torch.nn.Module], why: str) -> None:
    """Refuse modules that delay weight gradients, where no W tasks run.

    Raises:
        ConfigError: a chunk has one.
    """
    for number, chunk in enumerate(chunks):
        if any(is_delayed(module) for module in chunk.modules()):
            raise ConfigError(
                f"chunk {number}: its Transformer Engine layers were built with "
                f"delay_wgrad_compute, so their weight gradients would be lost: {why}",
                why,
            )


class DelayedModules:
    """The modules of one chunk that delay, by transformer layer.

    Args:
        chunk: the chunk, DDP-wrapped or bare.
        layers: its transformer layers.
        ddp: its DistributedDataParallel wrapper, or None.

    Raises:
        ConfigError: the wrapper is missing, or expects gradients in the backward pass; a host has
            changed a module.
    """

    def __init__(self, chunk: torch.nn.Module, layers: list[torch.nn.Module], ddp: Any) -> None:
        self._layers = [
            [_Delayed(m) for m in layer.modules() if is_delayed(m) and _has_trained_weight(m)]
            for layer in layers
        ]
        self._inside = [delayed for row in self._layers for delayed in row]
        inside = {id(delayed.module) for delayed in self._inside}
        self._others: list[Any] = [
            m for m in chunk.modules() if is_delayed(m) and id(m) not in inside
        ]
        if self._inside:
            for place in places(chunk):
                if id(place.module) in inside:
                    _refuse_changed(place)
        self.restart()
        if self and (ddp is None or not ddp.ddp_config.delay_wgrad_compute):
            raise ConfigError(
                "Transformer Engine's layers were built with delay_wgrad_compute: wrap the chunk "
                "in DistributedDataParallel, whose DistributedDataParallelConfig has it as well"
            )

    def __bool__(self) -> bool:
        return bool(self._inside)

    @property
    def exist(self) -> bool:
        """True if the chunk has modules that delay, in its layers or elsewhere."""
        return bool(self._inside or self._others)

    def is_like(self, other: DelayedModules) -> bool:
        """True if both have the same modules, with the same trained parameters."""
        return self._signature() == other._signature()

    def _signature(self) -> list[Any]:
        rows = [[delayed.signature() for delayed in row] for row in self._layers]
        return [rows, [id(module) for module in self._others]]

    def restart(self, order: Sequence[int] = ()) -> None:
        """Begin an iteration.

        Args:
            order: microbatches in the order of their backwards; empty for their own order.
        """
        self._order: dict[int, int] = {each: place for place, each in enumerate(order)}
        self._next_backward, self._next_weight = 0, [0] * len(self._layers)
        self._replayed: set[int] = set()

    def after_backward(self, microbatch: int) -> None:
        """End a backward pass; modules outside of the layers, which have no W, compute theirs."""
        if self._order.get(microbatch, microbatch) != self._next_backward:
            raise AssertionError(
                f"backward of microbatch {microbatch} where {self._next_backward} was due"
            )
        self._next_backward += 1
        if self._inside and not self._inside[0].has_new_entry():
            self._replayed.add(microbatch)  # all of the block
        else:
            for delayed in self._inside:
                delayed.keep_gradients()
        for module in self._others:
            if not module.wgrad_store.context.empty():
                module.backward_dw()

    def run(self, layer: int, microbatch: int) -> None:
        """Compute one layer's weight gradients of this microbatch, the oldest in its queues."""
        if self._order.get(microbatch, microbatch) != self._next_weight[layer]:
            raise AssertionError(
                f"weight gradients of microbatch {microbatch}, layer {layer}, where the queue "
                f"has {self._next_weight[layer]}"
            )
        self._next_weight[layer] += 1
        if microbatch not in self._replayed:
            for delayed in self._layers[layer]:
                delayed.compute()

    def knows(self, parameter: torch.nn.Parameter) -> bool:
        """True if a W adds this parameter's gradient."""
        return any(delayed.knows(parameter) for delayed in self._inside)

    def take(
        self, gradients: Mapping[torch.nn.Parameter, torch.Tensor | None]
    ) -> Iterator[tuple[int, TakenEntry]]:
        """Take the entries of the last backward pass off the queues; yields each with its layer.

        Args:
            gradients: the pass's ``grad`` of parameters that :meth:`knows`.
        """
        for number, row in enumerate(self._layers):
            for delayed in row:
                yield number, delayed.take(gradients)

    def num_bytes(self) -> int:
        """Memory that the layers' queues hold."""
        return sum(
            tensor.numel() * tensor.element_size()
            for delayed in self._inside
            for tensors, _ in list(delayed.queue.queue)
            for tensor in tensors_in(tensors)
        )

    def check_empty(self) -> None:
        """Assert after the last task that the queues are empty."""
        left = sum(delayed.queue.qsize() for delayed in self._inside)
        if left:
            raise AssertionError(f"{left} delayed weight gradients were not computed")


class _Delayed:
    """One module, and the ``grad`` of its delayed parameters per backward pass."""

    def __init__(self, module: Any) -> None:
        self.module, self.queue = module, module.wgrad_store.context
        self._parameters = [
            parameter
            for parameter in module.parameters(recurse=False)
            if getattr(parameter, "skip_backward_post_hook", False)
        ]
        self._kept: deque[list[torch.Tensor | None]] = deque()

    def signature(self) -> tuple[int, ...]:
        """Numbers that tell it from others."""
        parameters = [number for p in self._parameters for number in (id(p), p.requires_grad)]
        return id(self.module), id(self.queue), *parameters

    def has_new_entry(self) -> bool:
        return bool(self.queue.qsize() > len(self._kept))

    def knows(self, parameter: torch.nn.Parameter) -> bool:
        return any(parameter is own for own in self._parameters)

    def keep_gradients(self) -> None:
        """After a backward pass."""
        self._kept.append([_left(parameter) for parameter in self._parameters])
        for parameter in self._parameters:
            parameter.grad = None

    def take(self, gradients: Mapping[torch.nn.Parameter, torch.Tensor | None]) -> TakenEntry:
        with self.queue.mutex:
            entry = self.queue.queue.pop()  # the newest
        return TakenEntry(self, entry, [gradients.get(p) for p in self._parameters])

    def compute(self) -> None:
        """``backward_dw`` of the oldest entry, with the gradients that were left with it."""
        self.backward_dw(self._kept.popleft())

    def backward_dw(self, gradients: Iterable[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self.module.backward_dw()


@dataclass(frozen=True)
class TakenEntry(DeferredWork):
    """One module's queue entry and its parameters' ``grad`` of one backward pass."""

    owner: _Delayed
    entry: Any
    gradients: list[torch.Tensor | None]

    def num_bytes(self) -> int:
        """0: its memory is the slot's."""
        return 0

    def compute(self) -> None:
        """Let the module compute it before the other entries of its queue."""
        with self.owner.queue.mutex:
            self.owner.queue.queue.appendleft(self.entry)
        self.owner.backward_dw(self.gradients)


@contextlib.contextmanager
def adding(modules: Iterable[Any]) -> Iterator[None]:
    """Make modules add weight gradients to ``main_grad``, which they overwrite in an iteration's
    first microbatch and a graph would overwrite in all.
    """
    firsts = [module for module in modules if getattr(module, "is_first_microbatch", False)]
    for module in firsts:
        module.is_first_microbatch = False
    try:
        yield
    finally:
        for module in firsts:
            module.is_first_microbatch = True


def _left(parameter: Any) -> torch.Tensor | None:
    """The ``grad`` that ``backward_dw`` needs: a bias's, or a stand-in for a weight's."""
    if parameter.dim() > 1 and not getattr(parameter, "grad_added_to_main_grad", False):
        return None
    return real_gradient(parameter)


def real_gradient(parameter: Any) -> torch.Tensor | None:
    """``grad``, or a stand-in without memory where ``main_grad`` gets the real one."""
    gradient: torch.Tensor | None = parameter.grad
    if gradient is not None and getattr(parameter, "grad_added_to_main_grad", False):
        return gradient.new_zeros(()).expand(gradient.shape)
    return gradient
