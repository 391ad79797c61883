"""megatron-core's stand-ins on the CPU: what they answer, and that nothing of them stays."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils
from torch.overrides import TorchFunctionMode

from megatron.dpp.core import compat, cpu


@pytest.fixture
def on_cpu() -> Iterator[None]:
    with contextlib.closing(cpu.install()):
        yield


def state() -> dict[tuple[str, str], Any]:
    """All that the modules of megatron-core and ``torch.cuda`` hold, without other modules."""
    return {
        (name, own): value
        for name, module in list(sys.modules.items())
        if name.startswith(("megatron.core", "torch.cuda"))
        for own, value in vars(module).items()
        if not isinstance(value, ModuleType)
    }


def changed(before: dict[tuple[str, str], Any]) -> set[tuple[str, str]]:
    """Places that differ, of modules that were there before."""
    now, modules = state(), {name for name, _ in before}
    return {
        place
        for place in {*now, *before}
        if place[0] in modules and now.get(place, place) is not before.get(place, place)
    }


def test_nothing_of_the_stand_ins_stays_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that was missing is missing again, and a device is the device that was named."""
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    before, modes = state(), torch.overrides._get_current_function_mode_stack()
    support = cpu.install(host=True)
    assert {(moe_utils.__name__, "te_general_gemm"), ("torch.cuda", "cudart")} < changed(before)
    assert len(torch.overrides._get_current_function_mode_stack()) == len(modes) + 1
    for _ in range(2):
        support.close()
        assert not changed(before)
        assert torch.overrides._get_current_function_mode_stack() == modes


def test_stand_ins_that_are_there_stay_for_the_one_that_made_them() -> None:
    """A second set would make ``torch.cuda.cuda.FloatTensor`` of a type. Answers for hosts stay as
    long as the host does."""
    before, modes = state(), torch.overrides._get_current_function_mode_stack()
    capability = torch.cuda.get_device_capability
    with contextlib.closing(cpu.install()):
        for _ in range(2):
            with contextlib.closing(cpu.install(host=True)):
                assert len(torch.overrides._get_current_function_mode_stack()) == len(modes) + 1
                cpu.install(host=True).close()
                assert torch.cuda.get_device_capability() == (8, 0)
            assert torch.cuda.get_device_capability is capability
            assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
            assert torch.empty(2, device="cuda").device.type == "cpu"
    for made in [cpu.install(host=True), cpu.install(host=True)]:
        made.close()
    assert not changed(before)
    assert torch.overrides._get_current_function_mode_stack() == modes


class Other(torch.overrides.TorchFunctionMode):
    """A host's own stand-in of a type."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(found, str) and ".cuda." not in found:
            return found.replace("torch.", "torch.cuda.", 1)
        return found


def test_types_are_told_right_beside_a_hosts_own_stand_in() -> None:
    for inner, outer in ((Other, cpu.install), (cpu.install, Other)):
        with contextlib.ExitStack() as both:
            for each in (inner, outer):
                made: Any = each()
                both.enter_context(made if each is Other else contextlib.closing(made))
            assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
            assert torch.zeros(2).type(torch.float64).dtype == torch.float64


def test_a_host_measures_no_memory_and_profiles_nothing() -> None:
    """``--log-memory-to-tensorboard`` ended with a KeyError, and others of its flags alike."""
    with contextlib.closing(cpu.install(host=True)):
        found = torch.cuda.memory_stats()
        assert found["reserved_bytes.all.current"] == found["allocation.all.current"] == 0
        for name in ("device_memory_used", "utilization", "temperature", "power_draw"):
            assert getattr(torch.cuda, name)() == getattr(torch.cuda, name)(0) == 0
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaProfilerStart())
        with torch.cuda.nvtx.range("step"):
            torch.cuda.check_error(runtime.cudaProfilerStop())
        torch.cuda.set_stream(torch.cuda.Stream())


def test_a_warning_of_one_generator_for_both_devices_is_left_out_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    with contextlib.closing(cpu.install()):
        logger.warning("CPU RNG state changed within GPU RNG context")
        logger.warning("another")
    assert caplog.messages == ["another"]
    logger.warning("CPU RNG state changed within GPU RNG context")
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("name", ["cuda", "cuda:1", "cpu", "meta"])
@pytest.mark.parametrize("made", [str, torch.device])
def test_tensors_for_a_gpu_are_made_and_moved_on_the_cpu(
    name: str, made: Callable[[str], Any], on_cpu: None
) -> None:
    """Other devices stay: megatron-core makes tensors without memory on ``meta``."""
    expected = "meta" if name == "meta" else "cpu"
    tensor, device = torch.zeros(2), made(name)
    for found in (torch.empty(2, device=device), tensor.to(device), tensor.to(device=device)):
        assert found.device.type == expected
    assert tensor.cuda() is tensor


def test_generators_tensors_and_types_are_the_cpus(on_cpu: None) -> None:
    """Outputs of 16 bits become those of 32 for losses; megatron-core compares types as texts."""
    tensor = torch.zeros(2)
    assert tensor.type() == "torch.cuda.FloatTensor"
    assert tensor.type(torch.float64).dtype == tensor.type(dtype=torch.float64).dtype
    assert tensor.type(torch.float64).dtype == torch.float64
    for name, found in (
        ("FLOAT", torch.FloatTensor), ("HALF", torch.HalfTensor), ("BF16", torch.BFloat16Tensor),
    ):  # fmt: skip
        assert compat.lookup(f"transformer.module:_{name}_TYPES") == (found,)
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor"):
        assert getattr(torch.cuda, name) is getattr(torch, name)
    assert not torch.zeros(2, pin_memory=True).is_pinned(), "PyTorch refuses it without a GPU"
    assert torch.cuda.current_device() == torch.device("cpu")
    assert torch.cuda.default_generators[0] is torch.default_generator
    for module in (torch.cuda, torch.cuda.random):
        module.manual_seed(5)
        state, drawn = module.get_rng_state(), torch.rand(3)
        module.set_rng_state(state)
        assert torch.equal(torch.rand(3), drawn)
        assert torch.equal(torch.rand(3, generator=torch.Generator().manual_seed(5)), drawn)


def test_work_of_the_cpu_is_done_in_order_and_nothing_waits(on_cpu: None) -> None:
    """Calls that would start CUDA do nothing, nor does any ask a stream for its GPU."""
    assert torch.cuda.Event().query() and torch.cuda.current_stream().record_event().query()
    assert not torch.cuda.is_current_stream_capturing()
    assert not torch.cuda.graphs.is_current_stream_capturing()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    last.record(torch.cuda.current_stream())
    assert first.elapsed_time(last) > 0 and len(torch.cuda.Stream.priority_range()) == 2
    stream, other = torch.cuda.Stream(priority=-1), torch.cuda.default_stream()
    with torch.cuda.stream(stream) as given:
        torch.cuda.synchronize()
    assert given is stream
    for wait in (stream.synchronize, stream.wait_stream, stream.wait_event, stream.wait):
        wait(other)
    compat.lookup("tensor_parallel.random:_lazy_init")()
    called: list[int] = []
    compat.lookup("tensor_parallel.random:_lazy_call")(lambda: called.append(1), seed_all=True)
    assert called == [1] and compat.lookup("jit:jit_fuser")(print) is print


def test_what_megatron_core_asks_of_its_device_is_the_cpus(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mesh of a group, and counts of tokens, which a dispatcher wants as arrays."""
    mesh = SimpleNamespace(from_group=lambda group, device: (group, device))
    monkeypatch.setattr(cpu, "DeviceMesh", mesh)
    made = compat.lookup("distributed.torch_fully_sharded_data_parallel:DeviceMesh")
    assert made.from_group("ranks", "cuda") == ("ranks", "cpu")
    move = compat.lookup("transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu")
    tensor = torch.arange(3)
    assert move(tensor) is tensor and move(None, as_numpy=True) is None
    found = move(tensor, as_numpy=True, record_stream=True)
    assert type(found).__module__ == "numpy" and found.tolist() == [0, 1, 2]


def test_a_host_starts_without_compiling_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capability of 8.0 is that of bfloat16, which the CPU has, too; of 9.0 would be fp8's."""
    kernels = ModuleType("megatron.legacy.fused_kernels")
    kernels.load = lambda args: pytest.fail("nvcc")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.legacy", ModuleType("megatron.legacy"))
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    with contextlib.closing(cpu.install(host=True)):
        kernels.load(None)
        torch.cuda.set_device(3)
        assert torch.cuda.get_device_capability() == torch.cuda.get_device_capability(0) == (8, 0)
        found = torch.cuda.get_device_properties(0)
        assert (found.major, found.minor) == (8, 0) and found.total_memory > 0


def test_choices_on_the_cpu_are_megatron_cores_own_without_kernels() -> None:
    """Losses of a machine do not depend on what is installed there."""
    if any(importlib.util.find_spec(name) for name in ("transformer_engine", "apex")):
        pytest.skip("megatron-core chooses the kernels that are installed here")
    chosen = cpu.without_kernels()
    chosen.pop("transformer.moe.moe_utils:te_general_gemm")  # a name that it lacks without them
    assert {name: compat.lookup(name) for name in chosen} == chosen


def asked_from(module: str) -> tuple[bool, int]:
    """Answers of ``torch.cuda`` to a module of this name."""
    names: dict[str, Any] = {"__name__": module, "cuda": torch.cuda}
    exec("found = cuda.is_available(), cuda.device_count()", names)
    found: tuple[bool, int] = names["found"]
    return found


def test_only_training_code_of_a_host_sees_a_gpu_for_each_rank_of_its_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other code would use what is not there, also on a machine with GPUs (``--device cpu``)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", "8")
    for number in ("4", None):
        if number is None:
            monkeypatch.delenv("LOCAL_WORLD_SIZE")
        else:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", number)
        with contextlib.closing(cpu.install(host=True)):
            assert asked_from("megatron.training.initialize") == (True, int(number or 1))
            assert asked_from("megatron.core.utils") == asked_from("torch.x") == (False, 0)
    with contextlib.closing(cpu.install()):
        assert asked_from("megatron.training.initialize") == asked_from("torch.x") == (False, 0)
    assert asked_from("torch.x") == (True, 2)
    # Megatron's count of packed tokens asked for the device "cuda:cpu".
    name, own = "update_seqlen_stats_from_cu_seqlens", {"__name__": "megatron.training.training"}
    exec(f"import torch\ndef {name}(): return torch.cuda.is_available()", own)
    with contextlib.closing(cpu.install(host=True)):
        assert not own[name]()  # type: ignore[operator]


@pytest.mark.parametrize("before", [None, "0", "1"])
@pytest.mark.parametrize("disabled", [True, False])
def test_compilation_is_off_on_the_cpu_and_as_before_after_it(
    monkeypatch: pytest.MonkeyPatch, before: str | None, disabled: bool
) -> None:
    """Also where PyTorch's settings of it are imported after the stand-ins. What a program has
    turned off stays off.
    """
    from torch._dynamo import config

    name = "TORCHDYNAMO_DISABLE"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with config.patch(disable=disabled):
        with contextlib.closing(cpu.install()):
            assert (config.disable, os.environ[name]) == (True, "1")
        assert (config.disable, os.environ.get(name)) == (disabled, before)


class Work:
    """A send in flight, whose second wait would not end."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


class Peers:
    """Stands for megatron-core's ``_p2p_ops``; keeps what it is given."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.sent: list[torch.Tensor] = []

    def __call__(self, **operations: Any) -> dict[str, Any]:
        requests: dict[str, Any] = {}
        for way in ("prev", "next"):
            if operations[f"tensor_send_{way}"] is not None:
                self.sent.append(operations[f"tensor_send_{way}"])
                requests[f"send_{way}"] = Work()
                self.works.append(requests[f"send_{way}"])
            if operations[f"tensor_recv_{way}"] is not None:
                requests[f"recv_{way}"] = "received"
        return requests


def operations(**given: Any) -> dict[str, Any]:
    ways = (f"tensor_{what}_{way}" for what in ("send", "recv") for way in ("prev", "next"))
    return dict.fromkeys(ways) | given


@pytest.mark.parametrize("way", ["prev", "next"])
def test_a_send_owns_what_it_sends_until_it_was_waited_for(way: str) -> None:
    """megatron-core frees a stage's output at once. gloo would read what lies there later."""
    peers = Peers()
    sends = cpu.SafeSends(peers)
    tensor = torch.ones(2, requires_grad=True)
    recv = {"tensor_recv_prev": torch.zeros(2)}
    requests = sends(**operations(**{f"tensor_send_{way}": tensor}, **recv))
    tensor.data.zero_()
    assert peers.sent[0].tolist() == [1, 1] and not peers.sent[0].requires_grad
    assert requests["recv_prev"] == "received"
    sent = requests[f"send_{way}"]
    assert not sent.done and peers.works[0].waits == 0
    assert sent.wait() and sent.wait() and sent.done
    assert peers.works[0].waits == 1


def test_sends_that_were_waited_for_are_let_go_and_old_ones_are_waited_for() -> None:
    """The newest are left to megatron-core, as a peer may take them later only."""
    peers = Peers()
    sends, most = cpu.SafeSends(peers), cpu.MAX_KEPT_SENDS
    for number in range(most):
        assert len(sends.kept) == number
        last = sends(**operations(tensor_send_next=torch.ones(1)))["send_next"]
    assert not any(work.waits for work in peers.works)
    sends(**operations(tensor_send_next=torch.ones(1), tensor_send_prev=torch.ones(1)))
    assert [work.waits for work in peers.works] == [1, 1, *[0] * most]
    for kept in list(sends.kept):
        kept.wait()
    assert last.done
    sends(**operations(tensor_recv_prev=torch.zeros(1)))
    assert len(sends.kept) == 0


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("hosts_own", [True, False])
def test_what_names_no_gpu_is_not_rewritten_call_by_call(installed: bool, hosts_own: bool) -> None:
    """But a host's own function mode sees every call."""
    seen: list[Any] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    own = Mode() if hosts_own else contextlib.nullcontext()
    support = cpu.install() if installed else None
    try:
        with own, cpu.without_rewriting():
            is_direct = torch._C._is_torch_function_all_disabled()
            torch.ones(2).sum()
    finally:
        if support is not None:
            support.close()
    assert bool(seen) is hosts_own
    assert is_direct is (installed and not hosts_own)
