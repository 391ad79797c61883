"""A small stand-in for Transformer Engine, which cannot be installed without a GPU.

It has the interface that megatron-core's wrappers expect of ``Linear`` and ``LayerNormLinear``, and
asks a ``wgrad_store`` as Transformer Engine 2.8 does. Where a weight's gradient is added to
``main_grad`` directly its own is meaningless (NaN here, so that nobody reads it), and the bias's
has that dtype. One tensor-parallel rank only. Its optimizers and kernels want a GPU, as theirs.
``install()`` goes before the first import of megatron-core.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

VERSION = "2.8.0"
_JIT: dict[str, Any] = {"__name__": "transformer_engine.pytorch.jit", "wraps": functools.wraps}
exec(
    "def no_torch_dynamo(forward):\n"
    "    return wraps(forward)(lambda *args, **options: forward(*args, **options))",
    _JIT,
)
no_torch_dynamo = _JIT["no_torch_dynamo"]
"""Wraps forwards, in a module of its own."""


class WeightGradStore:
    """That of a module whose host does not delay weight gradients."""

    def delay_wgrad_compute(self) -> bool:
        return False

    def put(self, tensors: list[torch.Tensor], function: Callable[..., Any]) -> None:
        raise NotImplementedError


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Any, inp: Any, bias: Any, module: Any, first: Any) -> Any:
        ctx.save_for_backward(inp, weight)
        ctx.module, ctx.first, ctx.weight, ctx.has_bias = module, first, weight, bias is not None
        ctx.store = module.wgrad_store
        return F.linear(inp, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        inp, weight = ctx.saved_tensors
        module, param, first, has_bias = ctx.module, ctx.weight, ctx.first, ctx.has_bias

        def wgrad_gemm(x: torch.Tensor, dy: torch.Tensor) -> tuple[Any, Any]:
            dy, x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
            dtype = param.main_grad.dtype if module.fuse_wgrad_accumulation else None
            adds = has_bias and not module.bias_in_b
            dw, db = dy.t().matmul(x), dy.sum(dim=0, dtype=dtype) if adds else None
            if module.fuse_wgrad_accumulation:
                (param.main_grad.copy_ if first else param.main_grad.add_)(dw)
            return dw, db

        wgrad = grad_bias = None
        if has_bias and (module.bias_in_b or not ctx.needs_input_grad[0]):
            grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(dim=0)
        if not ctx.needs_input_grad[0]:
            return None, grad_output.matmul(weight), grad_bias, None, None
        if ctx.store.delay_wgrad_compute():
            ctx.store.put([inp.detach(), grad_output], wgrad_gemm)
        else:
            wgrad, added = wgrad_gemm(inp, grad_output)
            grad_bias = grad_bias if added is None else added
        if module.fuse_wgrad_accumulation:
            param.grad_added_to_main_grad = True
            wgrad = torch.full_like(weight, torch.nan)
        return wgrad, grad_output.matmul(weight), grad_bias, None, None


class _Base(torch.nn.Module):
    """The part of TransformerEngineBaseModule that linear layers share."""

    bias_in_b = False
    """The bias's gradient is computed with the input's, as where the output's is quantised."""

    def _build(self, inp: int, out: int, *, bias: bool, **options: Any) -> None:
        assert options["tp_size"] == 1
        device, dtype = torch.device("cpu"), options["params_dtype"]
        self.use_bias, self.return_bias = bias, options["return_bias"]
        self.parallel_mode = options["parallel_mode"]
        self.in_features, self.out_features, self.tp_size = inp, out, 1
        self.fuse_wgrad_accumulation = options["fuse_wgrad_accumulation"]
        self.weight = torch.nn.Parameter(torch.empty(out, inp, device=device, dtype=dtype))
        options["init_method"](self.weight)
        self.bias = torch.empty(0)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(out, device=device, dtype=dtype))
        self.wgrad_store = WeightGradStore()

    def _linear(self, inp: torch.Tensor, first: bool | None) -> Any:
        bias = self.bias if self.use_bias and not self.return_bias else None
        if self.return_bias:  # the caller adds it: its gradient takes the usual way
            return _LinearFunction.apply(self.weight, inp, None, self, first), self.bias
        return _LinearFunction.apply(self.weight, inp, bias, self, first)


class Linear(_Base):
    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__()
        self._build(in_features, out_features, **options)

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        return self._linear(inp, is_first_microbatch)


class LayerNormLinear(_Base):
    def __init__(self, in_features: int, out_features: int, eps: float, **options: Any) -> None:
        super().__init__()
        self.eps = eps
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features))
        self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features))
        self._build(in_features, out_features, **options)

    @no_torch_dynamo
    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        normed = F.layer_norm(
            inp, inp.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, self.eps
        )
        return self._linear(normed, is_first_microbatch)


class _GroupedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inp: Any, splits: list[int], module: Any, *weights: Any) -> Any:
        ctx.save_for_backward(inp, *weights)
        ctx.splits, ctx.store = splits, module.wgrad_store
        return _GroupedFunction.products(inp, weights, splits)

    @staticmethod
    def products(rows: Any, weights: Any, splits: list[int]) -> torch.Tensor:
        parts = zip(rows.split(splits), weights, strict=True)
        return torch.cat([part.matmul(weight.t()) for part, weight in parts])

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        (inp, *weights), splits = ctx.saved_tensors, ctx.splits

        def wgrad_gemm(x: Any, dy: Any, into: list[torch.Tensor]) -> tuple[Any, Any, None]:
            for given, out, each in zip(x, dy, into, strict=True):
                torch.matmul(out.t(), given, out=each)
            return None, [torch.empty(0)] * len(into), None

        packed = weights[0].new_empty((len(weights), *weights[0].shape))
        grads = [packed[number] for number in range(len(weights))]
        operands = [list(inp.detach().split(splits)), list(grad_output.split(splits)), grads]
        if ctx.store.delay_wgrad_compute():
            ctx.store.put(operands, wgrad_gemm)
        else:
            wgrad_gemm(*operands)
        turned = [weight.t() for weight in weights]
        return _GroupedFunction.products(grad_output, turned, splits), None, None, *grads


class GroupedLinear(torch.nn.Module):
    """The linear layers of all experts, without biases and ``main_grad``."""

    def __init__(self, number: int, inp: int, out: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_gemms, self.use_bias, self.return_bias = number, False, False
        self.fuse_wgrad_accumulation, self.wgrad_store = False, WeightGradStore()
        for expert in range(number):
            weight = torch.nn.Parameter(torch.randn(out, inp).to(dtype))
            self.register_parameter(f"weight{expert}", weight)

    def forward(self, inp: torch.Tensor, splits: list[int]) -> torch.Tensor:
        return _GroupedFunction.apply(inp, splits, self, *self._parameters.values())  # type: ignore[no-any-return]


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    for key, value in members.items():
        setattr(module, key, value)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def _nothing(name: str) -> type:
    return type(name, (), {})


def _kernel(*_: Any, **__: Any) -> None:
    raise RuntimeError("CUDA error: no CUDA-capable device is detected")


class _Fused(torch.optim.Optimizer):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    step = _kernel  # type: ignore[assignment]


def _apply(op: Callable[..., Any], buffer: Any, lists: Any, *arguments: Any) -> Any:
    return op(2048 * 32, buffer, lists, *arguments)


def _install_kernels() -> None:
    scales = dict.fromkeys(("multi_tensor_l2norm", "multi_tensor_scale",
                            "multi_tensor_scale_tensor"), _kernel)  # fmt: skip
    optimizers = {"FusedAdam": _Fused, "FusedSGD": type("FusedSGD", (_Fused,), {})}
    name = "transformer_engine.pytorch.optimizers"
    _module(name, multi_tensor_applier=_apply, **scales, **optimizers)
    _module("transformer_engine.pytorch.cpp_extensions", general_gemm=_kernel)
    _module("transformer_engine.pytorch.module")
    _module("transformer_engine.pytorch.module.base", get_workspace=_kernel)


def install(version: str = VERSION) -> None:
    """Let ``import transformer_engine`` find the stand-in. Call once per process."""
    _module("transformer_engine", __version__=version)
    _module("transformer_engine.common")
    _module("transformer_engine.common.recipe", DelayedScaling=_nothing("DelayedScaling"))
    _module(
        "transformer_engine.pytorch",
        Linear=Linear,
        LayerNormLinear=LayerNormLinear,
        GroupedLinear=GroupedLinear,
        DotProductAttention=type("DotProductAttention", (torch.nn.Module,), {}),
        LayerNorm=torch.nn.LayerNorm,
        RMSNorm=torch.nn.RMSNorm,
    )
    operations = {name: _nothing(name) for name in ("Sequential", "FusibleOperation")}
    _module("transformer_engine.pytorch.ops", **operations)
    routers = ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss",
               "fused_topk_with_score_function")  # fmt: skip
    _module("transformer_engine.pytorch.router", **{name: _nothing(name) for name in routers})
    _module("transformer_engine.pytorch.tensor", QuantizedTensor=_nothing("QuantizedTensor"))
    tracker = _nothing("CudaRNGStatesTracker")
    _module(
        "transformer_engine.pytorch.distributed",
        CudaRNGStatesTracker=tracker,
        activation_recompute_forward=_nothing("activation_recompute_forward"),
        checkpoint=None,
    )
    _module(
        "transformer_engine.pytorch.fp8",
        FP8GlobalStateManager=_nothing("FP8GlobalStateManager"),
        fp8_autocast=_nothing("fp8_autocast"),
        fp8_model_init=_nothing("fp8_model_init"),
    )
    _install_kernels()
