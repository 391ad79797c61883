"""Runs the tasks of one step on one rank's stages, through the stages' own methods."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron.dpp.errors import ConfigError
from megatron.dpp.memory import saved_bytes
from megatron.dpp.runtime.mail import Tensors
from megatron.dpp.torch.linear import WeightGradients
from megatron.dpp.torch.microbatches import Microbatches
from megatron.dpp.torch.shapes import Boundary, Shapes, outputs_of


@dataclass(kw_only=True)
class StageRunner:
    """Runs the tasks of one step on one rank, and keeps tensors between F and B.

    Args:
        stages: of this rank, in the order of its chunks.
        shapes: of the pipeline's boundaries.
        microbatches: inputs of this rank.
        number: of microbatches.
        loss_fn: ``loss_fn(output, target, **loss_kwargs)``, on the last stage; None without.
        loss_kwargs: its further arguments.
        trains: backwards follow.
        grad_scale: gradients are divided by it.
        return_outputs: keep the last stage's outputs.
        weights: takes deferred weight gradients; None for fused backwards.
        iteration: its number.
        seed: of each forward's random numbers; None leaves them in the order of tasks.
        measures: measure the memory of microbatch 0.

    ``losses`` and ``outputs`` are the last stage's, by microbatch. ``activation_bytes`` is what a
    forward saves and ``deferred_bytes`` what a backward defers, of the stage that keeps most.
    """

    stages: Sequence[PipelineStage]
    shapes: Shapes
    microbatches: Microbatches
    number: int
    loss_fn: Callable[..., torch.Tensor] | None
    loss_kwargs: Mapping[str, Any]
    trains: bool
    grad_scale: int
    return_outputs: bool
    weights: WeightGradients | None
    iteration: int
    seed: int | None
    measures: bool
    losses: list[torch.Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    activation_bytes: int = 0
    deferred_bytes: int = 0
    _kept: dict[tuple[int, int], tuple[Any, list[torch.Tensor]]] = field(default_factory=dict)

    def forward(self, chunk: int, microbatch: int, received: Tensors | None) -> Tensors:
        """Run F. ``received`` is the output of the stage before; None on the first one.

        Returns:
            The tensors for the next stage; empty ones on the last one.

        Raises:
            ConfigError: the stage returned what the next one cannot take, or the loss no scalar.
        """
        stage, inputs = self.stages[chunk], self._inputs(chunk, received)
        args = self.microbatches.arguments(microbatch) if received is None else inputs
        with self._random(stage, microbatch):
            keywords = self.microbatches.keywords(microbatch)
            output = stage.forward_maybe_with_nosync(*args, **keywords)  # type: ignore[no-untyped-call]
            result = self._result(stage, output, microbatch)
        if self.trains:
            self._kept[chunk, microbatch] = (result, inputs)
            if self.measures and microbatch == 0:
                outputs = [leaf for leaf in tree_leaves(result) if torch.is_tensor(leaf)]
                saved = saved_bytes(outputs, stage.submod)
                self.activation_bytes = max(self.activation_bytes, saved)
        return self._padded([] if stage.is_last else result)

    @contextlib.contextmanager
    def _random(self, stage: PipelineStage, microbatch: int) -> Iterator[None]:
        """Random numbers that do not depend on the order of tasks."""
        if self.seed is None:
            yield
            return
        devices = [stage.device] if stage.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            task = self.seed, self.iteration, stage.stage_index, microbatch
            torch.manual_seed(abs(hash(task)))
            yield

    def _inputs(self, chunk: int, received: Tensors | None) -> list[torch.Tensor]:
        if received is None:
            return []
        boundary = self.shapes.boundaries[self.stages[chunk].stage_index - 1]
        inputs = _listed(received)[: len(boundary.shapes)]
        if self.trains:
            for tensor, wants in zip(inputs, boundary.grads, strict=True):
                tensor.requires_grad_(wants)
        return inputs

    def _result(self, stage: PipelineStage, output: Any, microbatch: int) -> Any:
        """The tensors for the next stage; of the last one the loss, or its output without one."""
        if not stage.is_last:
            outputs = outputs_of(stage, output)
            self._check(stage, outputs)
            return outputs
        if self.return_outputs:
            kept = output
            if self.trains:  # the graph behind it is freed by B
                kept = tree_map_only(torch.Tensor, torch.Tensor.detach, output)
            self.outputs.append(kept)
        if self.loss_fn is None or self.microbatches.targets is None:
            return output
        loss = self.loss_fn(output, self.microbatches.targets[microbatch], **self.loss_kwargs)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(f"loss_fn returned {found}: a tensor with one element is needed")
        trained = any(parameter.requires_grad for parameter in stage.submod.parameters())
        if self.trains and trained and not loss.requires_grad:
            raise ConfigError("loss_fn returned a tensor without gradient, which trains nothing")
        self.losses.append(loss)
        return loss

    def _check(self, stage: PipelineStage, outputs: list[torch.Tensor]) -> None:
        """Refuse what the next stage does not expect."""
        behind, found = self.shapes.boundaries[stage.stage_index], Boundary.of(outputs)
        if found.dtypes != behind.dtypes or (self.trains and found.grads != behind.grads):
            raise ConfigError(
                f"stage {stage.stage_index} returned {found}, and {behind} in the first step: make "
                "a new schedule after a change of the model"
            )

    def _padded(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        """As many tensors as each boundary carries; empty ones stand for none."""
        most = self.shapes.num_tensors
        empty = [torch.empty(0)] * (most - len(tensors))
        return tensors[0] if most == len(tensors) == 1 else [*tensors, *empty]

    def free_output(self, chunk: int, microbatch: int) -> None:
        """Nothing: a stage's output stays until its B."""

    def backward(self, chunk: int, microbatch: int, received: Tensors | None) -> Tensors | None:
        """Run B; W's work is deferred unless the backward is fused.

        Args:
            received: gradients of the stage's outputs, empty for none; None on the last stage.

        Returns:
            Gradients of its inputs; None on the first stage.
        """
        weights = self.weights
        stage, gradients = self.stages[chunk], None
        output, inputs = self._kept.pop((chunk, microbatch))
        if received is not None:
            wanted = self.shapes.boundaries[stage.stage_index].grads
            pairs = zip(_listed(received), wanted, strict=False)
            output = tuple(output)
            gradients = tuple(gradient if wants else None for gradient, wants in pairs)
        held = weights.held_bytes if weights else 0
        with weights.collect(chunk, microbatch) if weights else contextlib.nullcontext():
            found, _ = stage.backward_maybe_with_nosync(
                "full",
                {"stage_output": output, "output_grads": gradients, "input_values": inputs},
                last_backward=microbatch == self.number - 1,
            )
        if weights and microbatch == 0:
            self.deferred_bytes = max(self.deferred_bytes, weights.held_bytes - held)
        if stage.dw_builder is not None:
            stage.dw_builder()()
        if stage.is_first:
            return None
        return self._padded([_gradient(*pair) for pair in zip(inputs, found, strict=True)])

    def weight(self, chunk: int, microbatch: int, piece: int) -> None:
        """Run one piece of W: the deferred weight gradients of some layers."""
        assert self.weights is not None
        self.weights.run(chunk, microbatch, piece)

    def chunk_complete(self, chunk: int) -> None:
        """Reduce and scale the gradients of a stage, as PyTorch's schedules do."""
        self.stages[chunk].perform_reduce_grad(self.grad_scale)


def _listed(tensors: Tensors) -> list[torch.Tensor]:
    return tensors if isinstance(tensors, list) else [tensors]


def _gradient(tensor: torch.Tensor, found: torch.Tensor | None) -> torch.Tensor:
    """The gradient of an input that a stage sends; zeros where it did not use it."""
    if found is not None:
        return found
    return torch.zeros_like(tensor) if tensor.requires_grad else tensor.new_empty(0)
