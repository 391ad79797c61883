"""The optimizer's step in a few kernels, where neither Transformer Engine nor Apex is installed.

megatron-core then updates, clips and copies parameter by parameter, and waits for the device once
for each parameter's norm. PyTorch has a kernel over all parameters for each of these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as core
from megatron.core.utils import local_multi_tensor_l2_norm, to_local_if_dtensor

from megatron.dpp.mcore.patching import replaced


@contextlib.contextmanager
def fused_step(optimizer: Any) -> Iterator[None]:
    """Around ``optimizer.step()`` of one of megatron-core's optimizers.

    On a CPU nothing changes, and nothing that Transformer Engine or Apex brings is replaced. The
    results differ in their last digits from those of the many kernels; every schedule gets the
    same.
    """
    on_gpus = [inner for inner in _optimizers(optimizer) if _is_on_gpus(inner)]
    with contextlib.ExitStack() as around:
        for inner in on_gpus:
            if isinstance(inner, torch.optim.Adam):  # AdamW is one
                around.enter_context(_one_kernel(inner))
        if on_gpus and clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
            for owner, name, ours in _KERNELS:
                around.enter_context(replaced(owner, name, ours))
        yield


def _optimizers(optimizer: Any) -> list[Any]:
    """PyTorch's (or their kin) inside of megatron-core's; none on a rank without parameters."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = [getattr(each, "optimizer", None) for each in chained]
    return [each for each in inner if each is not None]


def _is_on_gpus(inner: Any) -> bool:
    parameters = [p for group in inner.param_groups for p in group["params"]]
    return bool(parameters) and all(parameter.is_cuda for parameter in parameters)


@contextlib.contextmanager
def _one_kernel(adam: torch.optim.Adam) -> Iterator[None]:
    """PyTorch's fused Adam, for one step: the setting would be saved with the parameter groups and
    bind whoever loads them.
    """
    settings = [{name: group[name] for name in ("fused", "foreach")} for group in adam.param_groups]
    for group in adam.param_groups:
        group["fused"], group["foreach"] = True, False
        for parameter in group["params"]:
            state = adam.state.get(parameter, {})
            step = state.get("step")
            if step is not None and not step.is_cuda:  # as loaded
                state["step"] = step.to(parameter.device, torch.float32)
    try:
        yield
    finally:
        for group, setting in zip(adam.param_groups, settings, strict=True):
            group.update(setting)


def l2_norm(
    _original: Any, _chunk: int, _no_op: Any, lists: Sequence[list[torch.Tensor]], *_: Any
) -> tuple[torch.Tensor, None]:
    """The norm of all tensors of ``lists[0]`` as one vector: fp32 [1], on their device."""
    norms = torch._foreach_norm(lists[0], 2.0, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def scale(
    _original: Any, _chunk: int, _no_op: Any, lists: Sequence[list[torch.Tensor]], factor: float
) -> None:
    """``lists[1] = lists[0] * factor``, tensor by tensor; both may be the same list."""
    source, target = lists
    if source is target:
        torch._foreach_mul_(target, factor)
    else:
        source = _shards(source)
        copy(None, source if factor == 1.0 else list(torch._foreach_mul(source, factor)), target)


def copy(
    _original: Any,
    this: list[torch.Tensor],
    that: list[torch.Tensor],
    overflow_buf: Any = None,
) -> None:
    """Copy the values of ``this`` into ``that``, tensor by tensor; dtypes may differ.

    FSDP2's DTensors are sharded alike on both sides, so each rank copies its own shards.
    """
    if that:
        torch._foreach_copy_(_shards(that), _shards(this))


def _shards(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [to_local_if_dtensor(tensor) for tensor in tensors]


_KERNELS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (clip_grads, "l2_norm_impl", l2_norm),
    (clip_grads, "multi_tensor_scale_impl", scale),
    (core, "multi_tensor_scale_impl", scale),
    (core, "_multi_tensor_copy_this_to_that", copy),
)
"""Owner, name, what takes its place."""
