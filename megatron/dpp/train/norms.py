"""The norm of the parameters, for ``--log-params-norm``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared


def parameters_norm(chunks: list[Any], from_main: bool) -> float:
    """L2 norm over all ranks of the model, each parameter counted once; a collective.

    Args:
        from_main: read the fp32 copy where the optimizer keeps one (bf16).
    """
    total = torch.zeros(1, dtype=torch.float32, device=torch.cuda.current_device())
    experts = torch.zeros_like(total)  # that expert-parallel ranks hold apart
    shares = torch.zeros_like(total)  # of main parameters that the distributed optimizer splits
    for parameter in (p for chunk in chunks for p in chunk.parameters()):
        if not (
            param_is_not_tensor_parallel_duplicate(parameter) and param_is_not_shared(parameter)
        ):
            continue
        main = getattr(parameter, "main_param", None) if from_main else None
        if from_main and getattr(parameter, "main_param_sharded", False):
            if main is not None:
                shares += main.float().norm() ** 2
            continue
        squares = (parameter.detach() if main is None else main).float().norm() ** 2
        if getattr(parameter, "allreduce", True):
            total += squares
        else:
            experts += squares
    dist.all_reduce(shares, group=mpu.get_data_parallel_group(with_context_parallel=True))
    total += shares
    dist.all_reduce(total, group=mpu.get_model_parallel_group())
    dist.all_reduce(experts, group=mpu.get_expert_tensor_model_pipeline_parallel_group())
    return float((total + experts).sqrt().item())
