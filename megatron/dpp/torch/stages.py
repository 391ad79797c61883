"""Runs the tasks of one step on one rank's stages, through the stages' own methods."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_map_only

from megatron.dpp.errors import ConfigError
from megatron.dpp.runtime.mail import Tensors
from megatron.dpp.torch.linear import WeightGradients
from megatron.dpp.torch.microbatches import Microbatches
from megatron.dpp.torch.shapes import Boundary, Shapes, forward, outputs_of


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step needs.

    Args:
        microbatches: inputs of this rank.
        loss_fn: ``loss_fn(output, target, **loss_kwargs)``, on the last stage; None without.
        loss_kwargs: its further arguments.
        trains: backwards follow.
        grad_scale: gradients are divided by it.
        return_outputs: keep the last stage's outputs.
    """

    microbatches: Microbatches
    loss_fn: Callable[..., torch.Tensor] | None
    loss_kwargs: Mapping[str, Any]
    trains: bool
    grad_scale: int
    return_outputs: bool


class StageRunner:
    """Runs the tasks of one step, and keeps tensors between F and B.

    Args:
        stages: of this rank, in the order of its chunks.
        shapes: of the pipeline's boundaries.
        step: inputs and what is wanted.
        number: of microbatches.
        weights: take deferred weight gradients; None for a fused backward.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        shapes: Shapes,
        step: Step,
        number: int,
        weights: WeightGradients | None,
    ) -> None:
        self._weights = weights
        self._stages, self._shapes, self._step, self._last = stages, shapes, step, number - 1
        self._kept: dict[tuple[int, int], tuple[Any, list[torch.Tensor]]] = {}
        self.losses: list[torch.Tensor] = []
        """Of the last stage, by microbatch."""
        self.outputs: list[Any] = []
        """Likewise."""

    def forward(self, chunk: int, microbatch: int, received: Tensors | None) -> Tensors:
        """Run F. ``received`` is the output of the stage before; None on the first one.

        Returns:
            The tensors for the next stage; nothing on the last one.

        Raises:
            ConfigError: the stage returned what the next one cannot take, or the loss no scalar.
        """
        stage, step = self._stages[chunk], self._step
        inputs = self._inputs(stage, received)
        given = step.microbatches.arguments(microbatch) if received is None else inputs
        output = forward(stage, given, step.microbatches.keywords(microbatch))
        if stage.is_last:
            result = self._finish(output, microbatch)
            sent = []
        else:
            result = sent = self._checked(stage, outputs_of(stage, output))
        if step.trains:
            self._kept[chunk, microbatch] = (result, inputs)
        return self._padded(sent)

    def _inputs(self, stage: PipelineStage, received: Tensors | None) -> list[torch.Tensor]:
        if received is None:
            return []
        boundary = self._before(stage)
        inputs = _listed(received)[: len(boundary.shapes)]
        if self._step.trains:
            for tensor, wants in zip(inputs, boundary.grads, strict=True):
                tensor.requires_grad_(wants)
        return inputs

    def _finish(self, output: Any, microbatch: int) -> Any:
        """The loss of the last stage's output, or the output itself where there is none."""
        step = self._step
        if step.return_outputs:
            kept = output
            if step.trains:  # the graph behind it is freed by B
                kept = tree_map_only(torch.Tensor, torch.Tensor.detach, output)
            self.outputs.append(kept)
        if step.loss_fn is None or step.microbatches.targets is None:
            return output
        loss = step.loss_fn(output, step.microbatches.targets[microbatch], **step.loss_kwargs)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(f"loss_fn returned {found}: a tensor with one element is needed")
        self.losses.append(loss)
        return loss

    def _checked(self, stage: PipelineStage, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Refuse what the next stage does not expect."""
        behind = self._behind(stage)
        found = Boundary.of(outputs)
        stale = self._step.trains and found.grads != behind.grads
        if len(outputs) != len(behind.shapes) or found.dtypes != behind.dtypes or stale:
            raise ConfigError(
                f"stage {stage.stage_index} returned {_described(found)}, and "
                f"{_described(behind)} in the first step: make a new schedule after a change of "
                "the model"
            )
        return outputs

    def _padded(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        """As many tensors as each boundary carries; empty ones stand for none."""
        most = self._shapes.num_tensors
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
        stage = self._stages[chunk]
        output, inputs = self._kept.pop((chunk, microbatch))
        gradients = None
        if received is not None:
            grads = self._behind(stage).grads
            gradients = tuple(
                gradient if wanted else None
                for gradient, wanted in zip(_listed(received), grads, strict=False)
            )
        weights = self._weights
        with weights.collect(chunk, microbatch) if weights else contextlib.nullcontext():
            found, _ = stage.backward_maybe_with_nosync(
                "full",
                {
                    "stage_output": output if received is None else tuple(output),
                    "output_grads": gradients,
                    "input_values": inputs,
                },
                last_backward=microbatch == self._last,
            )
        if stage.dw_builder is not None:
            stage.dw_builder()()
        if stage.is_first:
            return None
        return self._padded([_gradient(*pair) for pair in zip(inputs, found, strict=True)])

    def weight(self, chunk: int, microbatch: int, piece: int) -> None:
        """Run one piece of W: the deferred weight gradients of some layers."""
        assert self._weights is not None
        self._weights.run(chunk, microbatch, piece)

    def chunk_complete(self, chunk: int) -> None:
        """Reduce and scale the gradients of a stage, as PyTorch's schedules do."""
        self._stages[chunk].perform_reduce_grad(self._step.grad_scale)

    def _before(self, stage: PipelineStage) -> Boundary:
        return self._shapes.boundaries[stage.stage_index - 1]

    def _behind(self, stage: PipelineStage) -> Boundary:
        return self._shapes.boundaries[stage.stage_index]


def _listed(tensors: Tensors) -> list[torch.Tensor]:
    return tensors if isinstance(tensors, list) else [tensors]


def _gradient(tensor: torch.Tensor, found: torch.Tensor | None) -> torch.Tensor:
    """What a stage sends as the gradient of an input; zeros where it did not use it."""
    if found is not None:
        return found
    return torch.zeros_like(tensor) if tensor.requires_grad else tensor.new_empty(0)


def _described(boundary: Boundary) -> str:
    return ", ".join(
        f"{dtype}{'' if grad else ' without gradient'}"
        for _, dtype, grad in zip(*boundary, strict=True)
    )
