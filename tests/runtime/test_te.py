"""Transformer Engine's delayed weight gradients as W tasks, over a stand-in for the package."""

from __future__ import annotations

import importlib.util
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core.utils
import pytest
import torch
from packaging.version import Version

from megatron.dpp.core.wgrad.te import (
    DelayedModules,
    _has_trained_weight,
    adding,
    delay_weight_gradients,
    is_delayed,
    refuse_delayed,
    why_fused,
)
from megatron.dpp.errors import ConfigError
from tests.runtime import te_double
from tests.runtime.cases import EXPERTS, LATE, OPTIMIZED, UNLIKE, case
from tests.runtime.launcher import run_ranks, shared_gpus

WORKER = Path(__file__).with_name("te_worker.py")
FUSED, SPLIT = {"split_backward": "off", "inject": LATE}, {"inject": LATE}


def graphed(**more: Any) -> list[dict[str, Any]]:
    """Runs whose blocks are replayed: static, with a fused and with a split backward."""
    graphs = {"cuda_graphs": "on", **more}
    return [{"static": True, **graphs}, {"split_backward": "off", **graphs},
            {"inject": LATE, **graphs}]  # fmt: skip


BOTH = [SPLIT, SPLIT | {"as_built": True}]
"""Layers that are built to delay their weight gradients, and layers as a host builds them."""
LAYERS: list[dict[str, Any]] = [
    {"name": "v2", "p": 2, "v": 2, "m": 6, "layers": 4,
     "runs": [run | {"as_built": built} for built in (False, True)
              for run in (SPLIT, {"policy": "breadth-first", "activation_cap": "8p",
                                  "inject": LATE})]},
    {"name": "overlap", "p": 2, "v": 2, "m": 4, "overlap": True, "runs": BOTH,
     "fused_wgrad": True, "distributed_optimizer": True},
    {"name": "frozen", "p": 2, "m": 4, "runs": BOTH, "layers": 4, "untied": True,
     "frozen": ["linear_qkv"]},
    # A captured W puts the entry of a module that delays back.
    {"name": "graphs", "p": 2, "v": 2, "m": 4, "fused_wgrad": True, "overlap": True,
     "runs": [*graphed(), graphed()[-1] | {"as_built": True}], "layers": 4, "iterations": 4},
    {"name": "main_grad", "p": 2, "v": 2, "m": 4, "fused_wgrad": True, "runs": [FUSED, *BOTH]},
    {"name": "recompute", "p": 2, "m": 4, "runs": BOTH[:1], "recompute": "selective"},
    {"name": "as built, bf16", "p": 2, "m": 4, "runs": BOTH[1:], "fused_wgrad": True,
     "bf16": True},
    {"name": "as built, no main_grad", "p": 2, "v": 2, "m": 4, "runs": BOTH[1:], "overlap": True},
    {"name": "as built, recompute", "p": 2, "m": 4, "runs": BOTH[1:], "recompute": "full"},
]  # fmt: skip
"""The ranks start once: their imports take longer than the cases. Both kinds of layers share the
static schedule's runs."""


def run(cases: list[dict[str, Any]]) -> str:
    return run_ranks(WORKER, 2, [json.dumps(cases)], timeout=240, preload="libraries")


def check(cases: list[dict[str, Any]], output: str) -> None:
    for one in cases:
        assert f"CASE {one['name']} ok" in output


def test_equal_to_the_static_schedule_bit_by_bit() -> None:
    """Some B run before the W of earlier microbatches, so the queues must keep their order."""
    check(LAYERS, run(LAYERS))


@pytest.mark.slow
def test_one_chunk_is_equal_to_the_static_schedule_bit_by_bit() -> None:
    cases: list[dict[str, Any]] = [
        {"name": "v1", "p": 2, "m": 5, "runs": [FUSED, SPLIT], "layers": 4},
        {"name": "graphs", "p": 2, "m": 5, "runs": graphed(), "layers": 4, "iterations": 4},
    ]
    check(cases, run(cases))


STRICT = {"policy": "breadth-first", "activation_cap": "8p", "inject": LATE}
HALF = {"bf16": True, "fusion": True}
DOCUMENTS = {"packed": "together", "per_token": True, "layers": 4, "model": UNLIKE}
GROUPED = EXPERTS | {"moe_grouped_gemm": True}
PACKAGE: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "fp32": (2, [
        case("v1", 2, 5, FUSED, SPLIT, layers=4, dropout=0.1),
        case("v2", 2, 6, SPLIT, STRICT, v=2, layers=8),
        case("main_grad", 2, 6, FUSED, SPLIT, v=2, fusion=True),
    ]),
    "bf16": (2, [
        case("bf16", 2, 6, FUSED, SPLIT, v=2, dropout=0.1, iterations=10, **HALF),
        case("overlap", 2, 4, SPLIT, v=2, fusion=True, **OPTIMIZED),
        case("recompute", 2, 4, SPLIT, recompute="selective"),
        case("unlike lengths", 2, 6, FUSED, SPLIT, v=2, layers=4, lengths=True, model=UNLIKE,
             **HALF),
    ]),
    "graphs": (2, [
        case("graphs", 2, 6, *graphed(), v=2, dropout=0.1, overlap=True, iterations=5, **HALF),
        case("graphs, fp32", 2, 5, *graphed(), layers=4, iterations=4),
        case("graphs, recompute", 2, 4, *graphed(), recompute="selective", dropout=0.1,
             iterations=4),
    ]),
    "packed": (2, [
        case("fp32", 2, 3, FUSED, SPLIT, **DOCUMENTS, rounding=1e-2),
        # Dropout: no comparison with unpacked rows, one of which is a single token (not cuDNN's).
        case("bf16", 2, 4, FUSED, SPLIT, v=2, **DOCUMENTS, **HALF, dropout=0.1),
        case("rope", 2, 3, SPLIT, **DOCUMENTS, **HALF, positions="rope", dropout=0.1),
    ]),
    "experts": (2, [
        case("grouped", 2, 4, FUSED, SPLIT, v=2, layers=4, model=GROUPED, bf16=True),
        case("grouped, main_grad", 2, 4, FUSED, SPLIT, layers=4, model=GROUPED, iterations=4,
             **HALF),
        case("one by one", 2, 3, SPLIT, layers=4, model=EXPERTS, bf16=True),
        case("shared", 2, 3, SPLIT, layers=2, bf16=True,
             model=GROUPED | {"moe_shared_expert_intermediate_size": 32}),
    ]),
    "expert parallel": (4, [
        case("ep2", 2, 4, SPLIT, ep=2, layers=2, model=GROUPED, **HALF, **OPTIMIZED),
    ]),
    "context parallel": (4, [
        case("cp2", 2, 4, FUSED, SPLIT, cp=2, layers=2, per_token=True, **HALF),
    ]),
}  # fmt: skip
"""Name -> ranks and cases. Each name is a start of its ranks."""


BUILT = ("fp32", "bf16", "graphs", "packed", "experts", "expert parallel")
"""Those whose layers are also run as a host builds them."""


@pytest.mark.gpu
@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
)
@pytest.mark.parametrize(
    ("name", "built"), [*((name, False) for name in PACKAGE), *((name, True) for name in BUILT)]
)
def test_the_package_itself_is_equal_to_the_static_schedule_bit_by_bit(
    name: str, built: bool
) -> None:
    """Also with layers as a host builds them."""
    num_ranks, cases = PACKAGE[name]
    told = json.dumps([one | {"as_built": built} for one in cases])
    output = run_ranks(WORKER, num_ranks, [told], timeout=150, place=shared_gpus, fresh=True)
    check(cases, output)
    print("\n".join(line for line in output.splitlines() if line.startswith(("CASE", "LAYERS"))))


def layer_of(double: Any, return_bias: bool, delay: bool) -> Any:
    torch.manual_seed(7)
    layer = torch.nn.Module()
    layer.fc = double.Linear(
        4, 3, bias=True, return_bias=return_bias, tp_size=1, params_dtype=torch.float64,
        parallel_mode=None, fuse_wgrad_accumulation=False, init_method=torch.nn.init.normal_,
        delay_wgrad_compute=delay,
    )  # fmt: skip
    return layer


def backward(layer: Any, value: float) -> None:
    output = layer.fc(torch.full((2, 4), value, dtype=torch.float64, requires_grad=True))
    output = output[0] + output[1] if isinstance(output, tuple) else output
    (output * output).sum().backward()


def with_hooks(layer: Any) -> Any:
    """Adds DistributedDataParallel's hooks: each gradient is added to main_grad."""

    def hook_of(parameter: Any) -> Any:
        def hook() -> None:
            parameter.main_grad += parameter.grad
            parameter.grad = None

        return hook

    for parameter in layer.fc.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
        layer.fc.register_wgrad_accumulation_and_reduce_hooks(hook_of(parameter))
    return SimpleNamespace(ddp_config=SimpleNamespace(delay_wgrad_compute=True))


def test_nothing_that_is_captured_overwrites_main_grad() -> None:
    """A graph captured in the first microbatch is replayed in all of them."""
    first, later = SimpleNamespace(is_first_microbatch=True), SimpleNamespace()
    with adding([first, later]):
        assert not first.is_first_microbatch
    assert first.is_first_microbatch
    assert not hasattr(later, "is_first_microbatch")


@pytest.mark.parametrize("return_bias", [False, True])
def test_every_gradient_waits_for_its_own_microbatch(return_bias: bool) -> None:
    """A bias added outside the module has its gradient before its turn."""
    now, later = (layer_of(te_double, return_bias, delay) for delay in (False, True))
    delayed = DelayedModules(later, [later], with_hooks(later))
    for _ in range(2):
        delayed.restart()
        for microbatch in range(2):
            backward(now, 1.0 + microbatch)
            backward(later, 1.0 + microbatch)
            delayed.after_backward(microbatch)
        assert delayed.num_bytes() == 2 * 8 * (2 * 4 + 2 * 3)
        with pytest.raises(AssertionError, match="where the queue has 0"):
            delayed.run(0, 1)
        for microbatch in range(2):
            delayed.run(0, microbatch)
        delayed.check_empty()
    for one, other in zip(now.parameters(), later.parameters(), strict=True):
        assert torch.equal(one.grad, other.main_grad)


def test_a_module_outside_of_the_layers_computes_its_gradient_after_a_backward() -> None:
    """A backward that does not come to it has left nothing there."""
    layer, head = (layer_of(te_double, return_bias=False, delay=True) for _ in range(2))
    chunk = torch.nn.ModuleList([layer, head])
    with_hooks(head)
    delayed = DelayedModules(chunk, [layer], with_hooks(layer))
    backward(layer, 1.0)
    delayed.after_backward(0)
    assert not head.fc.weight.main_grad.any()
    backward(layer, 1.0)
    backward(head, 1.0)
    delayed.after_backward(1)
    once = head.fc.weight.main_grad
    assert once.any() and not layer.fc.weight.main_grad.any()
    assert not delayed.knows(head.fc.weight) and delayed.knows(layer.fc.weight)
    for microbatch in range(2):
        delayed.run(0, microbatch)
    assert torch.equal(layer.fc.weight.main_grad, 2 * once)


def test_a_captured_entry_is_the_newest_and_is_computed_before_those_that_wait() -> None:
    """Graphs are captured while eager microbatches wait for their W."""
    layer, alone = (layer_of(te_double, return_bias=True, delay=True) for _ in range(2))
    delayed, expected = (DelayedModules(each, [each], with_hooks(each)) for each in (layer, alone))
    parameters = list(layer.fc.parameters())
    backward(layer, 1.0)
    delayed.after_backward(0)
    backward(layer, 2.0)  # captured
    ((number, entry),) = delayed.take({parameter: parameter.grad for parameter in parameters})
    layer.zero_grad()
    entry.compute()
    backward(alone, 2.0)
    expected.after_backward(0)
    expected.run(0, 0)
    assert number == 0 and entry.num_bytes() == 0
    for one, other in zip(layer.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one.main_grad, other.main_grad)
    delayed.run(0, 0)
    backward(alone, 1.0)
    expected.after_backward(1)
    expected.run(0, 1)
    delayed.check_empty()
    for one, other in zip(layer.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one.main_grad, other.main_grad)


def test_a_module_that_was_built_without_the_delay_is_left_alone() -> None:
    layer = layer_of(te_double, return_bias=False, delay=False)
    delayed = DelayedModules(layer, [layer], None)
    assert not delayed and not is_delayed(layer.fc)
    delayed.after_backward(0)
    refuse_delayed([layer], "no W")
    with pytest.raises(ConfigError, match=r"chunk 1: .* would be lost: no W"):
        refuse_delayed([layer, layer_of(te_double, return_bias=False, delay=True)], "no W")


def test_memory_that_a_weight_has_yet_to_get_is_not_kept() -> None:
    """A grouped layer leaves it in ``grad``, without numbers."""
    layer = layer_of(te_double, return_bias=False, delay=True)
    delayed = DelayedModules(layer, [layer], with_hooks(layer))
    backward(layer, 1.0)
    layer.fc.weight.grad = torch.full_like(layer.fc.weight, torch.nan)
    left = weakref.ref(layer.fc.weight.grad)
    delayed.after_backward(0)
    assert left() is None
    delayed.run(0, 0)
    assert layer.fc.weight.main_grad.isfinite().all()


def test_a_backward_out_of_order_is_our_own_error() -> None:
    layer = layer_of(te_double, False, True)
    delayed = DelayedModules(layer, [layer], with_hooks(layer))
    with pytest.raises(AssertionError, match="microbatch 1 where 0 was due"):
        delayed.after_backward(1)
    backward(layer, 1.0)
    with pytest.raises(AssertionError, match="1 delayed weight gradients were not computed"):
        delayed.check_empty()


def test_gradient_buffers_must_know_of_the_delay() -> None:
    unaware = SimpleNamespace(ddp_config=SimpleNamespace(delay_wgrad_compute=False))
    layer = layer_of(te_double, False, True)
    for ddp in (None, unaware):
        with pytest.raises(ConfigError, match="whose DistributedDataParallelConfig has it as well"):
            DelayedModules(layer, [layer], ddp)


def test_without_transformer_engine_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_fused(SimpleNamespace()) == "Transformer Engine is not installed"


@pytest.mark.parametrize(
    ("version", "cases"),
    [
        ("2.6.0", [({}, "Transformer Engine 2.6.0 is too old: 2.7.0 or newer is needed")]),
        (
            "2.8.0",
            [
                ({"fp8": "hybrid"}, "8- and 4-bit layers"),
                ({"fp4": "nvfp4"}, "8- and 4-bit layers"),
                ({"cpu_offloading": True}, "activations are offloaded"),
                ({"fine_grained_activation_offloading": True}, "activations are offloaded"),
                ({"tp_comm_overlap": True}, "tp_comm_overlap"),
                ({"moe_shared_expert_overlap": True}, "moe_shared_expert_overlap"),
                ({"use_cpu_initialization": True}, "use_cpu_initialization"),
                ({"num_moe_experts": 4}, "None"),
                ({}, "None"),
            ],
        ),
    ],
)
def test_what_stays_fused(
    version: str, cases: list[tuple[dict[str, Any], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(megatron.core.utils, "get_te_version", lambda: Version(version))
    names = ("fp8", "fp4", "tp_comm_overlap", "moe_shared_expert_overlap", "cpu_offloading",
             "fine_grained_activation_offloading", "use_cpu_initialization")  # fmt: skip
    for values, reason in cases:
        config = SimpleNamespace(**dict.fromkeys(names), delay_wgrad_compute=False)
        vars(config).update(values)
        assert reason in str(delay_weight_gradients(config))
        assert config.delay_wgrad_compute is (reason == "None")


def test_a_frozen_weight_with_a_trained_bias_is_refused() -> None:
    layer = layer_of(te_double, return_bias=False, delay=True)
    layer.fc.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="would lose the bias's gradient"):
        DelayedModules(layer, [layer], with_hooks(layer))
    layer.fc.bias.requires_grad_(False)
    assert not DelayedModules(layer, [layer], with_hooks(layer))


class Layer(torch.nn.Module):
    """Parameters of 1 (a bias) or 2 dimensions; with ``delayed`` they skip the backward's hook."""

    def __init__(self, **parameters: tuple[int, bool, bool]) -> None:
        super().__init__()
        for name, (dimensions, trained, delayed) in parameters.items():
            made = torch.nn.Parameter(torch.zeros([1] * dimensions), requires_grad=trained)
            if delayed:
                made.skip_backward_post_hook = True  # type: ignore[attr-defined]
            self.register_parameter(name, made)


def test_only_a_weight_that_is_trained_and_delayed_is_put_into_a_queue() -> None:
    assert _has_trained_weight(Layer(weight=(2, True, True)))
    assert _has_trained_weight(Layer(weight=(2, True, True), bias=(1, True, True)))
    assert _has_trained_weight(Layer(weight=(2, True, True), bias=(1, False, True)))
    assert not _has_trained_weight(Layer(weight=(2, False, True), bias=(1, False, True)))
    assert not _has_trained_weight(Layer(weight=(2, True, False), norm=(1, True, False)))
    assert not _has_trained_weight(Layer(weight=(2, False, True), norm=(1, True, False)))
    outer = Layer(norm=(1, True, False))
    outer.inner = Layer(weight=(2, True, True))
    assert not _has_trained_weight(outer), "its layers have queues of their own"
    with pytest.raises(ConfigError, match="a Layer of Transformer Engine with a frozen weight"):
        _has_trained_weight(Layer(weight=(2, False, True), bias=(1, True, True)))


def test_a_replayed_backward_leaves_its_weights_to_its_graph() -> None:
    """It puts nothing into the queues. The next iteration may run the same microbatch eagerly."""
    layer = layer_of(te_double, return_bias=False, delay=True)
    delayed = DelayedModules(layer, [layer], with_hooks(layer))
    backward(layer, 1.0)
    delayed.after_backward(0)
    delayed.after_backward(1)  # replayed
    delayed.run(0, 0)
    once = layer.fc.weight.main_grad.clone()
    delayed.run(0, 1)
    assert torch.equal(layer.fc.weight.main_grad, once)
    delayed.restart()
    for microbatch in range(2):
        backward(layer, 1.0)
        delayed.after_backward(microbatch)
        delayed.run(0, microbatch)
    delayed.check_empty()
    assert torch.equal(layer.fc.weight.main_grad, 3 * once)
