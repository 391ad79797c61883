"""Loss functions of hosts, for workers, and a stand-in for CUDA graphs."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch


def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach().clone()}


def token_loss(
    mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total, count = (output.float() * mask).sum(), mask.sum().int()
    return total, count, {"lm loss": total.detach() / count, "sum": total.detach().clone()}


class OwnLoss:
    """A host's loss of logits, which counts the microbatches of which something is kept for the
    backward.
    """

    def __init__(self) -> None:
        self._kept: weakref.WeakSet[Any] = weakref.WeakSet()
        self._number = itertools.count()
        self.most_before = 0

    def __call__(self, labels: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, Any]:
        number = next(self._number)
        self.most_before = max(self.most_before, len({box.number for box in self._kept}))

        def pack(tensor: torch.Tensor) -> Any:
            self._kept.add(box := Box(number, tensor))
            return box

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss, {"lm loss": loss.detach().clone()}


@dataclasses.dataclass(frozen=True, eq=False)
class Box:
    """A tensor that a microbatch keeps."""

    number: int
    tensor: torch.Tensor


class Rerun:
    """Stand-in for a CUDA graph: each replay runs the function again, over the graph's buffers.

    ``replays`` records each replay.
    """

    def __init__(
        self, function: Callable[[], None], pool: Any, replays: list[Rerun] | None = None
    ) -> None:
        self._function, self._replays = function, replays

    def replay(self) -> None:
        if self._replays is not None:
            self._replays.append(self)
        with torch.enable_grad():
            self._function()
