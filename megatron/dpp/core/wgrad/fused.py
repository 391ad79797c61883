"""The weight gradient's matrix product that adds into ``main_grad``, from PyTorch.

megatron-core's ``gradient_accumulation_fusion`` calls an extension of Apex. Without it ``provide``
puts the two functions of this module in its place: cuBLAS adds the fp32 product into the gradient
buffer, and no half-precision gradient is written and read again.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from megatron.dpp.core import compat

_AVAILABLE = "tensor_parallel.layers:_grad_accum_fusion_available"
_KERNELS = "tensor_parallel.layers:fused_weight_gradient_mlp_cuda"


def available() -> bool:
    """True if Apex or this PyTorch (2.8 or later) has such a product for GPUs."""
    return compat.lookup(_AVAILABLE) or hasattr(torch.ops.aten.addmm, "dtype_out")


def provide() -> None:
    """Let ``gradient_accumulation_fusion`` work without Apex, on GPUs. May be called twice."""
    if not compat.lookup(_AVAILABLE):
        compat.assign(_KERNELS, sys.modules[__name__])
        compat.assign(_AVAILABLE, True)


def add_product(weight: Any, total_input: torch.Tensor, grad_output: torch.Tensor) -> None:
    """Add one microbatch's weight gradient to ``weight.main_grad``.

    Args:
        weight: [out, in], with a ``main_grad`` of its shape in fp32 or in its own dtype.
        total_input: [tokens, in].
        grad_output: [tokens, out].
    """
    kernels, main_grad = compat.lookup(_KERNELS), weight.main_grad
    half = main_grad.dtype in (torch.float16, torch.bfloat16)
    kernel = kernels.wgrad_gemm_accum_fp16 if half else kernels.wgrad_gemm_accum_fp32
    kernel(total_input, grad_output, main_grad)


@torch.no_grad()
def wgrad_gemm_accum_fp32(
    total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """``main_grad += grad_output.T @ total_input``, summed in fp32.

    Args:
        total_input: [tokens, in], fp32, fp16 or bf16.
        grad_output: [tokens, out], of the same dtype.
        main_grad: [out, in], fp32.
    """
    if total_input.dtype == main_grad.dtype:
        main_grad.addmm_(grad_output.t(), total_input)
    else:
        torch.addmm(
            main_grad, grad_output.t(), total_input, out_dtype=main_grad.dtype, out=main_grad
        )


@torch.no_grad()
def wgrad_gemm_accum_fp16(
    total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """The same into a half-precision ``main_grad``, rounded after each addition."""
    main_grad.addmm_(grad_output.t(), total_input)
