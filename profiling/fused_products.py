"""Adds weight gradients into ``main_grad`` by PyTorch, where megatron-core asks for Apex."""

from __future__ import annotations

import sys

import torch

from megatron.dpp.core import compat


def provide() -> None:
    """Let ``gradient_accumulation_fusion`` work without Apex. May be called twice."""
    available = "tensor_parallel.layers:_grad_accum_fusion_available"
    if not compat.lookup(available):
        kernels = sys.modules[__name__]
        compat.assign("tensor_parallel.layers:fused_weight_gradient_mlp_cuda", kernels)
        compat.assign(available, True)


@torch.no_grad()
def wgrad_gemm_accum_fp32(tokens: torch.Tensor, grads: torch.Tensor, into: torch.Tensor) -> None:
    """``into += grads.T @ tokens``, summed in the dtype of ``into``."""
    if tokens.dtype == into.dtype:
        into.addmm_(grads.t(), tokens)
    else:
        torch.addmm(into, grads.t(), tokens, out_dtype=into.dtype, out=into)


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
