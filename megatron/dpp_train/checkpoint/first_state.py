"""The state of PyTorch's Adam and SGD before their first step, which a checkpoint may have to hold.

PyTorch makes its tensors in the first step, which a run in fp16 may skip. megatron-core then cannot
save (distrib_optimizer.py:642) or resume (PyTorch needs every state's step), and it cannot make the
state of SGD (optimizer/__init__.py:408). ``saver`` saves inside of :func:`begun`, ``contents`` asks
for a state to load after :func:`teach_sgd`, and ``loader`` passes the loaded one through
:func:`add_steps`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_ADAMS = torch.optim.Adam | torch.optim.AdamW


@contextlib.contextmanager
def begun(optimizer: Any) -> Iterator[None]:
    """Give an optimizer that has not stepped yet its initial state in this block, so that it can be
    saved: no steps, and moments of zero.
    """
    empty = [inner for _, inner in _pytorchs(optimizer) if not inner.state]
    for inner in empty:
        _begin(inner)
    try:
        yield
    finally:
        for inner in empty:
            inner.state.clear()


def _begin(inner: torch.optim.Optimizer) -> None:
    for group in inner.param_groups:
        for parameter in group["params"]:
            zeros = torch.zeros_like(parameter, requires_grad=False)
            if isinstance(inner, _ADAMS):
                moments = {"exp_avg": zeros, "exp_avg_sq": torch.zeros_like(zeros)}
                inner.state[parameter] = {"step": _no_steps(group, parameter), **moments}
            elif group["momentum"]:
                inner.state[parameter] = {"momentum_buffer": zeros}


def _no_steps(group: dict[str, Any], parameter: torch.Tensor) -> torch.Tensor:
    on_device = group["capturable"] or group["fused"]
    return torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")


def teach_sgd(optimizer: Any) -> None:
    """Let megatron-core make the state of SGD to load into, as it does for Adam."""
    for each, inner in _pytorchs(optimizer):
        if each.init_state_fn is None:
            each.init_state_fn = lambda _, config=None, inner=inner: _begin(inner)


def add_steps(optimizer: Any, loaded: Any) -> None:
    """Add the step count 0, in place, to a ``loaded`` state (from ``torch_dist``) without one:
    megatron-core does not save a count of 0 (optimizer.py:845).
    """
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    parts = [loaded]
    if len(chained) > 1:
        parts = [loaded[index] for index in range(len(chained))]
    kept = {id(each): part for each, part in zip(chained, parts, strict=True)}
    for each, inner in _pytorchs(optimizer):
        if isinstance(inner, _ADAMS) and not isinstance(each, DistributedOptimizer):
            part = kept[id(each)]
            states = part.get("optimizer", part)["state"]
            if states and not any(key == "common_step" or "step" in states[key] for key in states):
                states["common_step"] = torch.tensor(0.0)


def _pytorchs(optimizer: Any) -> list[tuple[Any, torch.optim.Optimizer]]:
    """Pairs of megatron-core's optimizer and PyTorch's inside of it."""
    pairs: list[tuple[Any, torch.optim.Optimizer]] = []
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(each, "optimizer", None)
        if isinstance(inner, _ADAMS | torch.optim.SGD):
            pairs.append((each, inner))
    return pairs
