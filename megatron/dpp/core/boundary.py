"""Stage boundaries: the one tensor, or the fixed number of them, that two stages exchange.

megatron-core lets a caller declare several tensor shapes per boundary
(``adjust_tensor_shapes_fn``), but its static schedules send one tensor and start a backward from
one output. ``steps.Stage`` uses the functions here instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron.dpp.core import compat
from megatron.dpp.errors import ConfigError, setting

_BACKWARD_STEP = "pipeline_parallel.schedules:backward_step"

Tensors = torch.Tensor | list[torch.Tensor]
"""The tensor of a boundary, or a list if it carries several."""


class Boundaries(NamedTuple):
    """Bytes of each tensor that one rank's chunks receive from and send to their neighbours.

    ``usual_bytes`` is the size of a boundary's one tensor without adjustment; it is the same
    on every rank.
    """

    usual_bytes: int
    receives: tuple[int, ...]
    sends: tuple[int, ...]

    @property
    def several(self) -> bool:
        """True if any boundary of this rank carries more than one tensor."""
        return max(len(self.receives), len(self.sends)) > 1

    def check_fits(self, opened: Boundaries) -> None:
        """Refuse shapes that do not fit into the links that are open.

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


@dataclass(frozen=True)
class TokenCounter:
    """Counts a microbatch's tokens by the tensor of a boundary, [s, b, h].

    Args:
        largest: tokens of the longest microbatch on this rank.
        hidden: the last dimension; 0 where boundaries have shapes of their own.
        parts: ranks among which a microbatch's tokens are divided.
        bound: the setting that says how many tokens the longest has, for an error; empty where a
            longer one is no error here.
    """

    largest: int
    hidden: int
    parts: int = 1
    bound: str = ""

    def of_rank(self, sizes: Sequence[int]) -> list[int] | None:
        """This rank's tokens of microbatches of these sizes; None where boundaries do not tell."""
        return [size // self.parts for size in sizes] if self.hidden else None

    def count(self, tensors: Tensors) -> int | None:
        """The tokens of ``tensors``; None if they are no hidden states.

        Raises:
            ConfigError: there are more than those of the longest.
        """
        if not isinstance(tensors, torch.Tensor) or not self.hidden:
            return None
        shape = tensors.shape  # read once: where torch's calls are looked at, each costs as much
        if len(shape) < 2 or shape[-1] != self.hidden:
            return None
        found = shape.numel() // self.hidden
        if self.bound and found > self.largest:
            max_tokens = setting("max_tokens", found * self.parts)
            raise ConfigError(
                f"a microbatch has {found * self.parts} tokens, and links and the memory cap have "
                f"room for {self.largest * self.parts} ({self.bound}): give the most tokens of a "
                f"microbatch ({max_tokens}, or more)",
                self.bound,
                max_tokens,
            )
        return found


def boundaries(
    shape: tuple[int, ...], itemsize: int, adjust: Callable[..., Any] | None
) -> Boundaries:
    """The boundaries of one rank.

    Args:
        shape: of the one tensor that a stage usually sends.
        itemsize: bytes of an element. Wider elements need a larger shape.
        adjust: megatron-core's ``adjust_tensor_shapes_fn(receives, sends)``, which takes and
            returns a list of shapes per direction of a rank's forwards; or None.

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
    except (TypeError, ValueError):
        receives = sends = ()
    if not receives or not sends:
        raise ConfigError(
            f"adjust_tensor_shapes_fn returned {given!r}: expected two lists of one shape or more, "
            "what a rank's stages receive and what they send, also at the ends of the pipeline"
        )
    return Boundaries(usual, receives, sends)


def as_list(tensors: Tensors | None) -> list[torch.Tensor]:
    """No tensor, one or several, as a list."""
    if tensors is None:
        return []
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def want_gradients(received: Tensors) -> None:
    """Make a stage's floating-point inputs require gradients."""
    for tensor in received if isinstance(received, list) else (received,):
        if tensor.is_floating_point():
            tensor.requires_grad_()


def backward(
    given: Tensors | None, output: Tensors, received: Tensors | None, config: Any
) -> Tensors | None:
    """megatron-core's ``backward_step``, also for a stage with several inputs or outputs.

    Args:
        given: the stage's inputs; None on the first stage.
        output: what it returned; a list may hold an unchanged input.
        received: gradient of the output, or of each; an empty tensor stands for none. None after
            the last stage.

    Returns:
        Gradient of each input, an empty tensor if it has none; None on the first stage.
    """
    if isinstance(output, torch.Tensor) and not isinstance(given, list):
        return _backward_step(given, output, received, config)  # type: ignore[no-any-return]
    inputs = as_list(given)
    if isinstance(output, torch.Tensor):
        leaves = [tensor for tensor in inputs if tensor.requires_grad]
        _backward_step(leaves or None, output, received, config)
    else:
        _backward_from_several(output, as_list(received), config)
    gradients = [tensor.new_empty(0) if tensor.grad is None else tensor.grad for tensor in inputs]
    if isinstance(given, torch.Tensor):
        return gradients[0]
    return gradients or None


def _backward_step(given: Any, output: Any, received: Any, config: Any) -> Any:
    rest = (None, config) if _takes_type() else (config,)
    return compat.lookup(_BACKWARD_STEP)(given, output, received, *rest)


@functools.cache
def _takes_type() -> bool:
    """True if megatron-core's own takes a model type, which it does not read, before 0.17."""
    return "model_type" in (compat.form_of(_BACKWARD_STEP).parameters or "")


def _backward_from_several(
    outputs: Sequence[torch.Tensor], received: Sequence[torch.Tensor], config: Any
) -> None:
    """Run the backward from all outputs that have a gradient."""
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
