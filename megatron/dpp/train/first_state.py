"""The state of PyTorch's Adam before its first step, which a checkpoint may have to hold.

PyTorch makes its tensors in the first step, and a run in fp16 may skip many. megatron-core then
cannot save (distrib_optimizer.py:642), or cannot resume (PyTorch asks every state for its step).
``checkpointing`` saves inside of :func:`begun` and passes what it loads through :func:`add_steps`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


@contextlib.contextmanager
def begun(optimizer: Any) -> Iterator[None]:
    """Meanwhile an Adam without state has what it would begin its first step with: no steps, and
    moments of zero. Afterwards it has none again, so that parameters that never get a gradient
    stay without."""
    empty = [adam for _, adam in _adams(optimizer) if not adam.state]
    for adam in empty:
        for group in adam.param_groups:
            for parameter in group["params"]:
                adam.state[parameter] = {
                    "step": _no_steps(group, parameter),
                    "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
                }
    try:
        yield
    finally:
        for adam in empty:
            adam.state.clear()


def _no_steps(group: dict[str, Any], parameter: torch.Tensor) -> torch.Tensor:
    on_device = group["capturable"] or group["fused"]
    return torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")


def add_steps(optimizer: Any, loaded: Any) -> None:
    """Count 0 steps, in place, where ``loaded`` (from ``torch_dist``) counts none: megatron-core
    leaves a count of 0 out (optimizer.py:845)."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    parts = [loaded]
    if len(chained) > 1:
        parts = [loaded[index] for index in range(len(chained))]
    kept = {id(each): part for each, part in zip(chained, parts, strict=True)}
    for each, _ in _adams(optimizer):
        if not isinstance(each, DistributedOptimizer):
            part = kept[id(each)]
            states = part.get("optimizer", part)["state"]
            if states and not any(key == "common_step" or "step" in states[key] for key in states):
                states["common_step"] = torch.tensor(0.0)


def _adams(optimizer: Any) -> list[tuple[Any, torch.optim.Adam]]:
    """PyTorch's, each after megatron-core's around it; AdamW is one too."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    pairs = [(each, getattr(each, "optimizer", None)) for each in chained]
    return [(each, inner) for each, inner in pairs if isinstance(inner, torch.optim.Adam)]
