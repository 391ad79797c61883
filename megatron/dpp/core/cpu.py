"""megatron-core on a machine without a GPU, unmodified.

megatron-core names CUDA in a few dozen places. After :func:`install` a torch function mode rewrites
``device="cuda"``, and stand-ins replace some ``torch.cuda`` functions; comments name the files of
megatron-core 0.16.1 that need them. Call it once, before anything is built. Collectives are gloo's,
and the static schedules' sends are made safe for it (see :class:`_KeptSend`).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

MAX_KEPT_SENDS = 32
_CPU_TYPE = re.compile(r"^torch\.(?!cuda\.)")
_COMPILES_NOT = "TORCHDYNAMO_DISABLE"


def install(*, host: bool = False) -> contextlib.ExitStack:
    """Let megatron-core run on the CPU of this process until ``close()`` of the result, which may
    be called twice. Stand-ins that are there already stay until the result that made them is
    closed.

    Args:
        host: also answer what Megatron-LM's own training code asks of CUDA.
    """
    with contextlib.ExitStack() as undo:
        if not _is_installed():
            _turn_compilation_off(undo)
            for stand_in in (*_stand_ins(), *_core_stand_ins()):
                _set(undo, *stand_in)
            undo.enter_context(_CudaMeansCpu())
            random = logging.getLogger("megatron.core.tensor_parallel.random")
            random.addFilter(_keep_warning)
            undo.callback(random.removeFilter, _keep_warning)
        if host and torch.cuda.cudart is not _Profiler:
            for stand_in in _host_stand_ins():
                _set(undo, *stand_in)
        return undo.pop_all()


def _is_installed() -> bool:
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(isinstance(mode, _CudaMeansCpu) for mode in modes)


def _turn_compilation_off(undo: contextlib.ExitStack) -> None:
    """Compile nothing, which costs minutes on a CPU (jit.py)."""
    from torch._dynamo import config

    _set(undo, config, "disable", True)
    before = os.environ.get(_COMPILES_NOT)
    os.environ[_COMPILES_NOT] = "1"
    if before is None:
        undo.callback(os.environ.pop, _COMPILES_NOT, None)
    else:
        undo.callback(os.environ.__setitem__, _COMPILES_NOT, before)


def _keep_warning(record: logging.LogRecord) -> bool:
    """False for random.py's warning that the CPU's generator moved inside a region of the GPU's:
    here they are one."""
    return not record.getMessage().startswith("CPU RNG state changed")


def _set(undo: contextlib.ExitStack, holder: Any, name: str, value: Any) -> None:
    missing = not hasattr(holder, name)
    old = getattr(holder, name, None)
    setattr(holder, name, value)
    undo.callback(*(delattr, holder, name) if missing else (setattr, holder, name, old))


def without_rewriting() -> contextlib.AbstractContextManager[None]:
    """A block whose calls of torch name no GPU by text: none is looked at one by one, which costs
    more than a small product. Changes nothing where the stand-ins are not installed, or where a
    host has a function mode of its own.
    """
    if torch._C._len_torch_function_stack() == 1 and _is_installed():
        return torch._C.DisableTorchFunction()
    return contextlib.nullcontext()


_REWRITTEN = frozenset({torch.Tensor.cuda, torch.Tensor.type, torch.Tensor.to})
"""Functions whose result, or arguments without keywords, name a device."""


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites the device of every torch call: layers.py:261,873, param_and_grad_buffer.py:783,
    optimizer.py:473, grad_scaler.py:15, clip_grads.py:90, schedules.py:596,
    p2p_communication.py:190, utils.py:631, data.py:37, mappings.py:91,
    dist_checkpointing/exchange_utils.py:98 and others.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not kwargs and func not in _REWRITTEN:  # nearly all of a step's calls
            return func(*args)
        if func is torch.Tensor.cuda:  # language_module.py:244, data.py:84
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # clip_grads.py:167, optimizer.py:671, distrib_optimizer.py:361 compare this text;
            # a host's own stand-in may have changed it
            return _CPU_TYPE.sub("torch.cuda.", func(*args))
        if kwargs and "device" in kwargs:
            kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
        if kwargs and "pin_memory" in kwargs:  # rope_utils.py:62
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to:
            args = tuple(_on_cpu(arg) for arg in args)
        return func(*args, **(kwargs or {}))


def _on_cpu(device: Any) -> Any:
    if isinstance(device, str):
        return "cpu" if device.startswith("cuda") else device
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    return device


class _NoStream:
    """Streams and events (param_and_grad_buffer.py:417,529, distributed_data_parallel.py:230,
    timers.py); the CPU runs in program order, so nothing waits.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = 0.0

    def nothing(self, *args: Any, **kwargs: Any) -> None:
        """Stands for wait and synchronise."""

    wait_stream = wait_event = synchronize = wait = nothing

    def record(self, stream: Any = None) -> None:
        """Take the time, as of an event."""
        self._time = time.perf_counter()

    def elapsed_time(self, end: _NoStream) -> float:
        """Milliseconds between two records (core/utils.py:1599)."""
        return (end._time - self._time) * 1e3

    def record_event(self, event: Any = None) -> _NoStream:
        """An event to wait for (moe/token_dispatcher.py:895)."""
        return _NoStream()

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """All streams are alike (pipeline_parallel/utils.py:389 of 0.19)."""
        return (0, 0)

    def query(self) -> bool:
        """True: all work before this point is done."""
        return True


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _stand_ins() -> Iterator[tuple[Any, str, Any]]:
    """Replacements inside ``torch.cuda``: (module, name, value)."""
    cpu = torch.device("cpu")
    # A machine may have GPUs that this process does not use.
    yield torch.cuda, "is_available", lambda: False
    yield torch.cuda, "device_count", lambda: 0
    yield torch.cuda, "current_device", lambda: cpu
    # parallel_state.py:198,933, timers.py:152, p2p_communication.py:242,398,
    # filesystem_async.py:230
    yield torch.cuda, "synchronize", _nothing
    for name in ("Stream", "Event"):
        yield torch.cuda, name, _NoStream
    for name in ("current_stream", "default_stream"):
        yield torch.cuda, name, _NoStream
    yield torch.cuda, "stream", contextlib.nullcontext
    yield torch.cuda, "set_stream", _nothing  # transformer/cuda_graphs.py:471
    for holder in (torch.cuda, torch.cuda.graphs):  # nothing is ever captured
        yield holder, "is_current_stream_capturing", lambda: False
    # tensor_parallel/random.py:41-113, checkpoints of the random state
    yield torch.cuda, "default_generators", defaultdict(lambda: torch.default_generator)
    for holder in (torch.cuda, torch.cuda.random):
        yield holder, "get_rng_state", lambda device="cuda": torch.get_rng_state()
        yield holder, "set_rng_state", lambda state, device="cuda": torch.set_rng_state(state)
        yield holder, "manual_seed", torch.default_generator.manual_seed
        yield holder, "initial_seed", torch.initial_seed
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor"):  # transformer/module.py:20-22
        yield torch.cuda, name, getattr(torch, name)


def _split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """The result of moe/moe_utils.py:1078 for a tensor on a GPU, as numpy if asked for."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _core_stand_ins() -> Iterator[tuple[Any, str, Any]]:
    """Replacements inside megatron-core, for names that it binds when it is imported."""
    from megatron.dpp.core import compat

    sends = "pipeline_parallel.p2p_communication:_p2p_ops"
    values = {
        "jit:jit_fuser": compat.lookup("jit:noop_decorator"),
        "tensor_parallel.random:_lazy_call": lambda callback, **_: callback(),
        "tensor_parallel.random:_lazy_init": _nothing,
        "transformer.module:_FLOAT_TYPES": (torch.FloatTensor,),
        "transformer.module:_HALF_TYPES": (torch.HalfTensor,),
        "transformer.module:_BF16_TYPES": (torch.BFloat16Tensor,),
        "distributed.torch_fully_sharded_data_parallel:DeviceMesh": SimpleNamespace(
            from_group=lambda group, _: DeviceMesh.from_group(group, "cpu")
        ),
        "transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu": _split_sizes,
        # made once per process: a model on a GPU after one on the CPU needs its own
        "transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.cuda_dtoh_stream": None,
        sends: SafeSends(compat.lookup(sends)),
    }
    for name, value in (values | without_kernels()).items():
        yield *compat.resolve(name), value


def without_kernels() -> dict[str, Any]:
    """megatron-core's choices without Transformer Engine and Apex, by name. Where they are
    installed it binds their kernels when it is imported, and those want a GPU.
    """
    from megatron.core import utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from megatron.dpp.core import compat

    scale = utils.local_multi_tensor_scale
    values = {
        "optimizer:Adam": torch.optim.AdamW,
        "optimizer:SGD": torch.optim.SGD,
        "optimizer:USING_PYTORCH_OPTIMIZER": True,
        "optimizer.distrib_optimizer:Adam": torch.optim.Adam,
        "optimizer.distrib_optimizer:HAVE_APEX_OR_TE": False,
        "optimizer.optimizer:multi_tensor_scale_impl": scale,
        "optimizer.clip_grads:multi_tensor_scale_impl": scale,
        "optimizer.clip_grads:l2_norm_impl": utils.local_multi_tensor_l2_norm,
        "transformer.moe.moe_utils:te_general_gemm": None,
        # norms of a host's layers; ours have their own
        "transformer.transformer_block:LayerNormImpl": WrappedTorchNorm,
        "models.backends:LNImpl": WrappedTorchNorm,
        "models.gpt.gpt_layer_specs:LNImpl": WrappedTorchNorm,
    }
    clips_by_tensor = "optimizer.clip_grads:multi_tensor_scale_tensor_impl"
    return values | ({clips_by_tensor: None} if compat.has(clips_by_tensor) else {})


_ON_ANY_DEVICE = ("update_seqlen_stats_from_cu_seqlens",)  # training.py:739
"""Functions of Megatron-LM's training code that do without CUDA where there is none."""


def _asked_by_host() -> bool:
    """True if Megatron-LM's training code, which wants CUDA, asks a function that calls this."""
    frame = sys._getframe(2)
    caller: str = frame.f_globals.get("__name__", "")
    return caller.startswith("megatron.training.") and frame.f_code.co_name not in _ON_ANY_DEVICE


class _Profiler:
    """``torch.cuda.cudart()`` of Megatron-LM's profiling (training.py:2689), without a profiler."""

    cudaProfilerStart = cudaProfilerStop = staticmethod(_nothing)


_MEASURED = ("device_memory_used", "utilization", "temperature", "power_draw", "clock_rate")
"""Functions behind Megatron-LM's logs of device memory and stragglers."""


def _host_stand_ins() -> Iterator[tuple[Any, str, Any]]:
    """Replacements for what Megatron-LM's training code asks: (module, name, value). Files are
    those of ``megatron/training``.
    """
    yield torch.cuda, "is_available", lambda: _asked_by_host()  # initialize.py:62
    count = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    yield torch.cuda, "device_count", lambda: count * _asked_by_host()  # initialize.py:319,422
    yield torch.cuda, "set_device", _nothing  # initialize.py:331
    yield torch.cuda, "get_device_capability", lambda *device: (8, 0)  # arguments.py:853
    device = SimpleNamespace(
        name="cpu", major=8, minor=0, multi_processor_count=1, total_memory=1 << 34
    )
    yield torch.cuda, "get_device_properties", lambda *number: device  # utils.py:448
    # log_memory_to_tensorboard, training.py:1940
    yield torch.cuda, "memory_stats", lambda *device: defaultdict(int)
    for name in _MEASURED:  # core/utils.py:1592, utils.py:289
        yield torch.cuda, name, lambda *device: 0
    yield torch.cuda, "cudart", _Profiler
    yield torch.cuda, "check_error", _nothing
    for name in ("range_push", "range_pop"):  # core/utils.py:2167 for nvtx_ranges
        yield torch.cuda.nvtx, name, _nothing
    with contextlib.suppress(ImportError):  # there are none from 0.20 on
        kernels = importlib.import_module("megatron.legacy.fused_kernels")
        yield kernels, "load", _nothing  # initialize.py:210 asks nvcc for its version


class _KeptSend:
    """A send in flight with the tensor that it reads.

    megatron-core frees a stage's output as soon as ``isend`` has returned
    (schedules.py:1497,1522,1600,1770), which NCCL allows. gloo would send freed memory, and losses
    would be wrong. So a copy is sent, and kept.
    """

    def __init__(self, work: Any, tensor: torch.Tensor) -> None:
        self._work, self._tensor = work, tensor
        self.done = False
        """The send has been waited for."""

    def wait(self) -> bool:
        """Wait for the send; a second call returns at once (gloo's own would wait for ever)."""
        if not self.done:
            self._work.wait()
            self.done = True
            del self._tensor
        return True


class SafeSends:
    """``p2p_communication._p2p_ops`` whose sends own what they send
    (p2p_communication.py:80,92,112,122)."""

    def __init__(self, original: Callable[..., dict[str, Any]]) -> None:
        self._original = original
        self.kept: deque[_KeptSend] = deque()

    def __call__(self, **operations: Any) -> dict[str, Any]:
        copies: dict[str, torch.Tensor] = {}
        for way in ("prev", "next"):
            tensor = operations[f"tensor_send_{way}"]
            if tensor is not None:
                copies[f"send_{way}"] = operations[f"tensor_send_{way}"] = tensor.detach().clone()
        requests = self._original(**operations)
        for name, copy in copies.items():
            requests[name] = _KeptSend(requests[name], copy)
            self.kept.append(requests[name])
        # Some sends are never waited for. megatron-core itself waits for the one before
        # the last, so waiting for one this old cannot hold anybody up.
        while self.kept and (self.kept[0].done or len(self.kept) > MAX_KEPT_SENDS):
            self.kept.popleft().wait()
        return requests
