"""Weight gradients apart from input gradients, for megatron-core's parallel linear layers.

The previous stage waits for the gradient of a linear layer's input; the gradient of its weight is
needed only by the optimizer step. ``WeightGradients`` rebinds the linear layers of a chunk for a
step, so that a backward pass computes the former and *defers* the latter; ``run`` computes it
later, one layer at a time. Autograd adds each weight's contributions in microbatch order, with all
hooks, so the numbers are bitwise those of a fused backward.

Transformer Engine's layers are ``te_layer``'s. Embeddings, the LM head, biases and norms are not
deferred: they would hold much memory for little gain. A layer that a host has changed goes its own
way (``own_way``), and computes its weight gradient within B.

Source of the idea: Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron.dpp.core import compat
from megatron.dpp.core.cpu import without_rewriting
from megatron.dpp.core.grad_sync import replicated
from megatron.dpp.core.model import decoder_block
from megatron.dpp.core.wgrad import accumulate
from megatron.dpp.core.wgrad.accumulate import OwnHook
from megatron.dpp.core.wgrad.deferrable import Deferrable, DeferredWork, refuse, refuse_unlike
from megatron.dpp.core.wgrad.own_way import modules_of
from megatron.dpp.core.wgrad.product import Layer
from megatron.dpp.core.wgrad.te_layer import TELayer

_RUN_BACKWARD, _INPUTS = "_engine_run_backward", 3
"""The function behind torch.autograd's ``grad`` and ``backward``, and the place of ``inputs``."""
_OWN_PASS = (
    "dynamic pipeline: a forward step runs a backward pass of its own: its gradients are added in "
    "the order of tasks, which megatron-core's schedule may have another of"
)
LAYER_KINDS: tuple[type[Deferrable], ...] = (Layer, TELayer)
"""The kinds of layers whose weight gradients may wait."""
_NAMED = 2
"""Layers that a line names; the others are counted."""


class WeightGradients:
    """The deferred weight gradients of one rank's model chunks.

    Args:
        chunks: the rank's model chunks, DDP-wrapped or bare, in chunk order.
        say: called with a line per reason why layers compute their weight gradients within B, in
            each step.

    Raises:
        ConfigError: a chunk's layers accumulate gradients in a way that cannot be deferred.
    """

    def __init__(
        self, chunks: list[torch.nn.Module], say: Callable[[str], None] = lambda line: None
    ) -> None:
        self._chunks, self._say = chunks, say
        self._current: dict[int, list[DeferredWork]] | None = None
        self._waiting: dict[tuple[int, int], dict[int, list[DeferredWork]]] = {}
        self._layers: list[Deferrable] = []
        self._weights: dict[torch.nn.Parameter, str] = {}
        self._accumulated: dict[torch.nn.Parameter, int] = {}
        self._held_bytes = 0
        self._adding = False
        self.num_pieces: tuple[int, ...] = ()
        """Transformer layers of each chunk; 0 if none of them can defer."""
        self.inspect()

    @property
    def held_bytes(self) -> int:
        """Memory that deferred work holds, beyond activations."""
        return self._held_bytes

    def inspect(self) -> None:
        """Find the layers that can defer in the next step: a host may have changed them.

        Raises:
            ConfigError: as of the class.
        """
        self._waiting.clear()
        self._layers, self._weights, self._held_bytes = [], {}, 0
        modules = {m for chunk in self._chunks for m in chunk.modules()}
        parameters = (p for module in modules for p in module._parameters.values())
        uses = Counter(id(parameter) for parameter in parameters)
        self.num_pieces = tuple(self._prepare(chunk, uses) for chunk in self._chunks)

    def _prepare(self, chunk: torch.nn.Module, uses: Counter[int]) -> int:
        """Find a chunk's linear layers; returns its number of pieces (transformer layers), 0 if
        nothing can be deferred.
        """
        _refuse_wrapper(chunk)
        if getattr(get_model_config(chunk), "enable_autocast", False):
            return 0
        block = decoder_block(chunk)
        layers = list(block.layers) if block is not None else []
        num_known, own_ways = len(self._weights), defaultdict[str, list[str]](list)
        piece_of = {id(m): number for number, layer in enumerate(layers) for m in layer.modules()}
        for name, module, around in modules_of(chunk):
            kind = next((kind for kind in LAYER_KINDS if kind.takes(module)), None)
            if kind is None or id(module) not in piece_of:
                continue
            reason = kind.why_not(module, lambda weight: uses[id(weight)])
            if reason is None and around is None:
                say = partial(self._tell, [name])
                layer = kind(piece_of[id(module)], name, module, self, say)
                self._layers.append(layer)
                self._weights.update(dict.fromkeys(layer.weights, f"{name}.weight"))
            elif reason != "":
                own_ways[around or str(reason)].append(name)
        for reason, names in own_ways.items():
            self._tell(names, reason)
        return len(layers) if len(self._weights) > num_known else 0

    def _tell(self, names: list[str], reason: str) -> None:
        """Say why layers go their own way."""
        text = ", ".join(names[:_NAMED])
        if len(names) > _NAMED:
            text += f" and {len(names) - _NAMED} more"
        self._say(f"dynamic pipeline: the weight gradient of {text} is computed within B: {reason}")

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Make the layers' backwards defer for one step; the model is restored after it."""
        self._accumulated.clear()
        with ExitStack() as around:
            around.enter_context(compat.replaced(torch.autograd, _RUN_BACKWARD, self._checked))
            for weight in self._weights:
                hook = weight.register_hook(OwnHook(self._before_autograd_adds, weight))  # type: ignore[no-untyped-call]
                around.callback(hook.remove)
            for layer in self._layers:
                around.enter_context(layer.bound())
            yield

    def _checked(self, run: Callable[..., Any], outputs: Any, *given: Any, **options: Any) -> Any:
        """Run a pass of autograd that a host asks for.

        Raises:
            ConfigError: it asks for the gradient of a weight, which is no input of the graph.
        """
        for wanted in given[_INPUTS] if len(given) > _INPUTS else ():
            if isinstance(wanted, torch.Tensor) and wanted in self._weights:
                name = self._weights[wanted]  # type: ignore[index]
                refuse(
                    "torch.autograd.grad, or backward(inputs=...), asks for the gradient of "
                    f"{name}, which is deferred"
                )
        return run(outputs, *given, **options)

    def _before_autograd_adds(self, weight: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Keep a weight's order where a pass adds a gradient by itself, as a layer went its own way
        in one call: what earlier passes have deferred comes first.

        Raises:
            ConfigError: the same pass has deferred one, and would have added up both.
        """
        if self._adding:
            return
        task = self._accumulated[weight] = torch._C._current_graph_task_id()
        self._compute_waiting(weight, task)

    def _compute_waiting(self, weight: torch.nn.Parameter, task: int) -> None:
        """Add what earlier passes than ``task`` have deferred of a weight's gradient."""
        for waiting in self._waiting.values():
            for row in waiting.values():
                for work in [work for work in row if work.touches(weight)]:
                    if work.task == task:
                        self._refuse_mixture(weight)
                    row.remove(work)
                    work.compute()
                    self._held_bytes -= work.num_bytes()

    def add(self, parameter: torch.nn.Parameter, given: list[torch.Tensor]) -> None:
        """:func:`accumulate.add` of a deferred gradient."""
        before, self._adding = self._adding, True
        try:
            accumulate.add(parameter, given)
        finally:
            self._adding = before

    def _refuse_mixture(self, weight: torch.nn.Parameter) -> None:
        refuse_unlike(self._weights[weight], "is also used outside of its layer's own product")

    @contextmanager
    def collect(self, chunk: int, microbatch: int) -> Iterator[None]:
        """Assign the work that one backward pass defers to (chunk, microbatch)."""
        with self.divert() as self._waiting[chunk, microbatch]:
            yield

    @contextmanager
    def divert(self) -> Iterator[dict[int, list[DeferredWork]]]:
        """Give the work that a backward pass defers to the caller, by layer of the chunk."""
        before, self._current = self._current, defaultdict(list)
        try:
            yield self._current
        finally:
            self._current = before

    def defer(self, layer: int, work: DeferredWork) -> None:
        """Defer work of a layer (counted from the chunk's first); outside of :meth:`collect` it
        runs at once, after what earlier passes have deferred.
        """
        if self._current is None:
            self._say(_OWN_PASS)
            for weight in filter(work.touches, self._weights):
                self._compute_waiting(weight, work.task)
            work.compute()
            return
        for weight, task in self._accumulated.items():
            if task == work.task and work.touches(weight):
                self._refuse_mixture(weight)
        self._held_bytes += work.num_bytes()
        row = self._current[layer]
        if not any(known.join(work) for known in row):
            row.append(work)

    def run(self, chunk: int, microbatch: int, piece: int) -> None:
        """Compute the weight gradients of one transformer layer; ``piece`` counts from the last."""
        waiting, layer = self._waiting[chunk, microbatch], self.num_pieces[chunk] - 1 - piece
        with without_rewriting():
            for item in waiting.pop(layer, ()):
                item.compute()
                self._held_bytes -= item.num_bytes()
        if piece == self.num_pieces[chunk] - 1:
            if waiting:
                raise AssertionError(f"weight gradients left over: {sorted(waiting)}")
            del self._waiting[chunk, microbatch]


def _refuse_wrapper(chunk: torch.nn.Module) -> None:
    """Refuse a wrapper that expects all gradients within a backward pass.

    Raises:
        ConfigError: names it.
    """
    if replicated(chunk):
        return
    module: Any = chunk
    while isinstance(module, torch.nn.Module):
        torchs = isinstance(module, torch.nn.parallel.DistributedDataParallel)
        if torchs or hasattr(module, "start_grad_sync"):
            refuse(
                f"weight gradients cannot be deferred under {type(module).__name__}, but under "
                "megatron-core's DistributedDataParallel"
            )
        module = getattr(module, "module", None)
