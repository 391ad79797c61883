"""What travels between two stages: one tensor, or a fixed number of them.

megatron-core 0.16.1 lets a caller declare several tensor shapes per boundary
(``adjust_tensor_shapes_fn``) and hands a stage's inputs to ``set_input_tensor`` as a list, but its
own static schedules send one tensor and start a backward from one output. ``steps.Stage`` calls the
functions here for what lies beyond that; the shapes declared become the channels' slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from megatron.dpp.errors import ConfigError
from megatron.dpp.mcore import compat

_BACKWARD_STEP = "pipeline_parallel.schedules:backward_step"

Tensors = torch.Tensor | list[torch.Tensor]
"""One tensor where a boundary carries one, else a list of them."""


class Boundaries(NamedTuple):
    """Bytes of each tensor that one rank's chunks receive from and send to their neighbours.

    ``usual_bytes`` is the size of the one tensor of a boundary that nobody adjusts; it is the same
    on every rank.
    """

    usual_bytes: int
    receives: tuple[int, ...]
    sends: tuple[int, ...]

    @property
    def several(self) -> bool:
        """Whether any boundary of this rank carries more than one tensor."""
        return max(len(self.receives), len(self.sends)) > 1

    def check_fits(self, opened: Boundaries) -> None:
        """Refuse shapes for which links that are open already have no room.

        Raises:
            ConfigError: another number of tensors, or a larger one.
        """
        for way, wanted, had in (
            ("receive", self.receives, opened.receives),
            ("send", self.sends, opened.sends),
        ):
            if len(wanted) != len(had) or max(wanted) > max(had):
                raise ConfigError(
                    f"adjust_tensor_shapes_fn: this call would {way} {len(wanted)} tensors of up "
                    f"to {max(wanted)} bytes per boundary, the links were opened for {len(had)} of "
                    f"up to {max(had)}; close() the schedule on all ranks to open them anew"
                )


def boundaries(
    shape: tuple[int, ...], itemsize: int, adjust: Callable[..., Any] | None
) -> Boundaries:
    """The boundaries of one rank.

    Args:
        shape: of the one tensor that a stage usually hands on.
        itemsize: bytes of an element. Wider elements need a larger shape.
        adjust: megatron-core's ``adjust_tensor_shapes_fn(receives, sends)``, which is given and
            returns a list of shapes per direction of a rank's forwards; None leaves them as they
            are.

    Raises:
        ConfigError: it returns something else.
    """
    usual = torch.Size(shape).numel() * itemsize
    if adjust is None:
        return Boundaries(usual, (usual,), (usual,))
    given = adjust([tuple(shape)], [tuple(shape)])
    try:
        receives, sends = (
            tuple(torch.Size(one).numel() * itemsize for one in shapes) for shapes in given
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"adjust_tensor_shapes_fn returned {given!r}: two lists of shapes are needed, what a "
            f"rank's stages receive and what they send ({error})"
        ) from error
    if not receives or not sends:
        raise ConfigError(
            f"adjust_tensor_shapes_fn returned {given!r}: each list needs one shape or more, also "
            "where the pipeline begins or ends"
        )
    return Boundaries(usual, receives, sends)


def as_list(tensors: Tensors | None) -> list[torch.Tensor]:
    """None or one tensor or several, as a list."""
    if tensors is None:
        return []
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def want_gradients(received: Tensors) -> None:
    """Let the backward find the gradients of a stage's inputs; integers and masks have none."""
    for tensor in as_list(received):
        if tensor.is_floating_point():
            tensor.requires_grad_()


def backward(
    given: Tensors | None, output: Tensors, received: Tensors | None, model_type: Any, config: Any
) -> Tensors | None:
    """megatron-core's ``backward_step``, also for a stage with several inputs or outputs.

    Args:
        given: the stage's inputs; None on the first stage.
        output: what it returned; a list may hold an input that was handed on as it is.
        received: gradient of the output, or of each of them, where one without elements stands for
            none; None after the last stage.

    Returns:
        Gradient of each input, without elements where there is none; None on the first stage.
    """
    if isinstance(output, torch.Tensor) and not isinstance(given, list):
        return _backward_step(given, output, received, model_type, config)  # type: ignore[no-any-return]
    inputs = as_list(given)
    if isinstance(output, torch.Tensor):
        leaves = [tensor for tensor in inputs if tensor.requires_grad]
        _backward_step(leaves or None, output, received, model_type, config)
    else:
        _backward_from_several(output, as_list(received), config)
    gradients = [tensor.new_empty(0) if tensor.grad is None else tensor.grad for tensor in inputs]
    if isinstance(given, torch.Tensor):
        return gradients[0]
    return gradients or None


def _backward_step(given: Any, output: Any, received: Any, model_type: Any, config: Any) -> Any:
    """megatron-core's own, which takes no model type from 0.17 on."""
    takes_type = "model_type" in (compat.form_of(_BACKWARD_STEP).parameters or "")
    rest = (model_type, config) if takes_type else (config,)
    return compat.lookup(_BACKWARD_STEP)(given, output, received, *rest)


def _backward_from_several(
    outputs: Sequence[torch.Tensor], received: Sequence[torch.Tensor], config: Any
) -> None:
    """Where megatron-core starts from the first output only: from all that have a gradient."""
    if config.timers is not None:
        config.timers("backward-compute", log_level=2).start()
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, received, strict=True)
        if output.requires_grad and gradient.numel()
    ]
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
    if config.timers is not None:
        config.timers("backward-compute").stop()
