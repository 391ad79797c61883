"""The optimizer's step in a few kernels, without Transformer Engine and Apex.

megatron-core updates, clips and copies parameter by parameter, and waits for the device at each
parameter's norm. PyTorch has kernels over all parameters, and the norm stays on the device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import local_multi_tensor_l2_norm, to_local_if_dtensor
from torch.distributed.tensor import DTensor

from megatron.dpp.core import compat


@contextlib.contextmanager
def fused_step(optimizer: Any) -> Iterator[None]:
    """Fuse ``optimizer.step()`` of one of megatron-core's optimizers.

    Nothing changes on a CPU, or with Transformer Engine or Apex. Results differ in their last
    digits from those of the many kernels, equally for all schedules.
    """
    on_gpus = [inner for inner in _optimizers(optimizer) if _is_on_gpus(inner)]
    with contextlib.ExitStack() as around:
        for inner in on_gpus:
            if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
                around.enter_context(_one_kernel(inner))
        if (
            on_gpus
            and compat.lookup("optimizer.clip_grads:l2_norm_impl") is local_multi_tensor_l2_norm
        ):
            for name, ours in _KERNELS.items():
                around.enter_context(compat.patched(name, ours))
            around.enter_context(clipping(on_gpus))
        yield


def _optimizers(optimizer: Any) -> list[Any]:
    """The optimizers inside of megatron-core's; none on a rank without parameters."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = [getattr(each, "optimizer", None) for each in chained]
    return [each for each in inner if each is not None]


def _is_on_gpus(inner: Any) -> bool:
    parameters = [p for group in inner.param_groups for p in group["params"]]
    return bool(parameters) and all(parameter.is_cuda for parameter in parameters)


@contextlib.contextmanager
def _one_kernel(adam: torch.optim.Adam) -> Iterator[None]:
    """Use PyTorch's fused Adam for one step; a lasting setting would be saved in checkpoints."""
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


@contextlib.contextmanager
def clipping(inner: Sequence[Any]) -> Iterator[None]:
    """Clip gradients by a norm that stays on the device; Adam divides by it within its step, as by
    a gradient scale.
    """
    owners = {p: each for each in inner for group in each.param_groups for p in group["params"]}

    def clip(
        original: Any, parameters: Any, max_norm: float, total_norm: Any, *more: Any, **options: Any
    ) -> None:
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if _sharded(grads):
            original(parameters, max_norm, total_norm, *more, **options)
            return
        # A number, where some ranks have read their norms, is divided by as on the others.
        norm = torch.as_tensor(total_norm, dtype=torch.float64, device=parameters[0].device)
        owner = owners.get(parameters[0])
        if isinstance(owner, torch.optim.Adam | torch.optim.AdamW):
            owner.grad_scale = divisor(max_norm, norm)  # type: ignore[attr-defined]
        elif grads:
            torch._foreach_div_(grads, divisor(max_norm, norm))

    try:
        with (
            compat.patched("optimizer.optimizer:get_grad_norm_fp32", grad_norm),
            compat.patched("optimizer.optimizer:clip_grad_by_total_norm_fp32", clip),
        ):
            yield
    finally:
        for each in inner:
            each.__dict__.pop("grad_scale", None)


def grad_norm(
    original: Any,
    grads: Any,
    norm_type: float = 2,
    grad_stats_parallel_group: dist.ProcessGroup | None = None,
) -> Any:
    """The norm of all gradients over ``grad_stats_parallel_group``: fp64 [] on their device; a
    number for other norms than 2 and for DTensors, as megatron-core's own.
    """
    if norm_type != 2 or _sharded(grads):
        return original(grads, norm_type, grad_stats_parallel_group)
    if grads:
        squares = l2_norm(None, 0, None, [grads])[0] ** 2
    else:
        squares = torch.zeros(1, device=torch.cuda.current_device())
    dist.all_reduce(squares, group=grad_stats_parallel_group)
    return squares[0].double().sqrt()


def _sharded(grads: Sequence[torch.Tensor]) -> bool:
    return any(isinstance(grad, DTensor) for grad in grads)


def divisor(max_norm: float, total_norm: torch.Tensor) -> torch.Tensor:
    """The divisor that clips gradients of this norm to ``max_norm``: fp32 [], at least 1; 1 for
    NaN, as megatron-core does not clip then.
    """
    excess = (total_norm + 1e-6) / max_norm
    return excess.nan_to_num(nan=1.0, posinf=math.inf).clamp(min=1.0).float()


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


_L2_NORM = "optimizer.clip_grads:l2_norm_impl"
_KERNELS: dict[str, Callable[..., Any]] = {
    _L2_NORM: l2_norm,
    "optimizer.clip_grads:multi_tensor_scale_impl": scale,
    "optimizer.optimizer:multi_tensor_scale_impl": scale,
    "optimizer.optimizer:_multi_tensor_copy_this_to_that": copy,
}
"""megatron-core's functions, and what takes their place."""
