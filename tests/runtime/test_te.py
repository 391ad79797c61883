"""Weight gradients of Transformer Engine's layers as W tasks, over a stand-in for the package."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel

from megatron.dpp.core import compat
from megatron.dpp.core.wgrad import accumulate, te_layer
from megatron.dpp.core.wgrad.te_layer import TELayer, adding
from tests.runtime import cases, te_double
from tests.runtime.cases import EXPERTS, LATE, OPTIMIZED, PADDED, TENSOR, UNLIKE, case
from tests.runtime.launcher import shared_gpus

FUSED, SPLIT = {"split_backward": "off", "inject": LATE}, {"inject": LATE}


def graphed(**more: Any) -> list[dict[str, Any]]:
    """Runs whose blocks are replayed: static, with a fused and with a split backward."""
    graphs = {"cuda_graphs": "on", **more}
    return [{"static": True, **graphs}, {"split_backward": "off", **graphs},
            {"inject": LATE, **graphs}]  # fmt: skip


FAR = {"policy": "breadth-first", "activation_cap": "8p", "inject": LATE}
LAYERS = [
    case("v2", 2, 6, SPLIT, FAR, v=2, layers=4),
    case("overlap", 2, 4, SPLIT, v=2, fused_wgrad=True, **OPTIMIZED),
    case("frozen", 2, 4, SPLIT, layers=4, untied=True, frozen=["linear_qkv"]),
    case("graphs", 2, 4, *graphed(), v=2, fused_wgrad=True, overlap=True, layers=4, iterations=4),
    case("main_grad", 2, 4, FUSED, SPLIT, v=2, fused_wgrad=True),
    case("bf16", 2, 4, SPLIT, fused_wgrad=True, bf16=True),
    case("no main_grad", 2, 4, SPLIT, v=2, overlap=True),
    case("recompute", 2, 4, SPLIT, recompute="full"),
]
"""The ranks start once: their imports take longer than the cases."""


check = partial(cases.check, worker=Path(__file__).with_name("te_worker.py"))


def test_equal_to_the_static_schedule_bit_by_bit() -> None:
    check(2, *LAYERS, preload="libraries")


HALF = {"bf16": True, "fusion": True}
DOCUMENTS = {"packed": "together", "per_token": True, "layers": 4, "model": UNLIKE}
GROUPED = EXPERTS | {"moe_grouped_gemm": True}
FIXED = GROUPED | PADDED
WHOLE = [{"static": True, "cuda_graphs": "on"},
         {"split_backward": "off", "cuda_graphs": "on", "inject": LATE}]  # fmt: skip
"""Runs of layers in 8 bit, whose weight gradients do not wait."""


def narrow(recipe: str, **more: Any) -> dict[str, Any]:
    """Settings of layers in 8 bit."""
    return {"fp8": "hybrid", "fp8_recipe": recipe, **more}


PACKAGE: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "fp32": (2, [
        case("v1", 2, 5, FUSED, SPLIT, layers=4, dropout=0.1),
        case("v2", 2, 6, SPLIT, FAR, v=2, layers=8),
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
        # Rows of 128 tokens.
        case("graphs", 2, 4, *graphed()[1:], v=2, packed="together", multiple=64, micro_batch=1,
             per_token=True, iterations=5, dropout=0.1, **HALF),
    ]),
    "experts": (2, [
        case("grouped", 2, 4, FUSED, SPLIT, v=2, layers=4, model=GROUPED, bf16=True),
        case("grouped, main_grad", 2, 4, FUSED, SPLIT, layers=4, model=GROUPED, iterations=4,
             **HALF),
        case("attention in graphs", 2, 4, *graphed(), v=2, layers=4, model=GROUPED, bf16=True,
             dropout=0.1, iterations=5),
        case("one by one", 2, 3, SPLIT, layers=4, model=EXPERTS, bf16=True),
        case("shared", 2, 3, SPLIT, *graphed(), layers=2, bf16=True, iterations=4,
             model=GROUPED | {"moe_shared_expert_intermediate_size": 32}),
        case("8 bit", 2, 4, *WHOLE, layers=4, iterations=5, model=narrow("tensorwise") | GROUPED,
             **HALF),
    ]),
    "expert parallel": (4, [
        case("ep2", 2, 4, SPLIT, ep=2, layers=2, model=GROUPED, **HALF, **OPTIMIZED),
    ]),
    "context parallel": (4, [
        case("cp2", 2, 4, FUSED, SPLIT, cp=2, layers=2, per_token=True, **HALF),
    ]),
    "graphs of parallel layers": (4, [
        case("tp2", 2, 4, *graphed(), tp=2, layers=4, iterations=4, bf16=True),
        case("tp2, sequence", 2, 4, *graphed(), v=2, layers=4, iterations=4, dropout=0.1,
             overlap=True, **TENSOR, **HALF),
        case("ep2", 2, 4, *graphed(), ep=2, layers=2, model=FIXED, iterations=4, **HALF,
             **OPTIMIZED),
        *(case(f"cp2, {way}", 2, 4, *graphed(), cp=2, layers=2, per_token=True, iterations=4,
               sequence=512, model={"cp_comm_type": way}, **HALF)
          for way in ("p2p", "all_gather", "a2a")),
    ]),
    "graphs of experts": (2, [
        case("grouped", 2, 4, *graphed(), v=2, layers=4, model=FIXED, iterations=4, **HALF),
        case("one by one", 2, 4, *graphed(), layers=4, model=PADDED, iterations=4, bf16=True),
        case("jitter", 2, 4, *graphed(), layers=2, model=FIXED | {"moe_input_jitter_eps": 0.1},
             iterations=4, bf16=True),
        case("random routes", 2, 4, *graphed(), layers=2, iterations=4, bf16=True,
             model=FIXED | {"moe_router_force_load_balancing": True}),
    ]),
    "graphs in 8 bit": (2, [
        case("tensorwise", 2, 4, *WHOLE, v=2, layers=4, iterations=5, model=narrow("tensorwise"),
             **HALF),
        case("delayed", 2, 4, *WHOLE, v=2, layers=4, iterations=6, model=narrow("delayed"), **HALF),
        case("delayed, history", 2, 4, *WHOLE, layers=4, iterations=6, **HALF,
             model=narrow("delayed", fp8_amax_history_len=16, fp8_amax_compute_algo="max")),
        case("parameters", 2, 4, *WHOLE, v=2, layers=4, iterations=6, **HALF,
             distributed_optimizer=True, model=narrow("tensorwise", fp8_param=True)),
        case("parameters, delayed", 2, 4, *WHOLE, layers=4, iterations=6, **HALF,
             distributed_optimizer=True, model=narrow("delayed", fp8_param=True)),
    ]),
}  # fmt: skip
"""Name -> ranks and cases. Each name is a start of its ranks."""


@pytest.mark.gpu
@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
)
@pytest.mark.parametrize("name", PACKAGE)
def test_the_package_itself_is_equal_to_the_static_schedule_bit_by_bit(name: str) -> None:
    num_ranks, given = PACKAGE[name]
    check(num_ranks, *given, place=shared_gpus, fresh=True)


def layer_of(return_bias: bool = False) -> Any:
    torch.manual_seed(7)
    layer = torch.nn.Module()
    layer.fc = te_double.Linear(
        4, 3, bias=True, return_bias=return_bias, tp_size=1, params_dtype=torch.float64,
        parallel_mode=None, fuse_wgrad_accumulation=False, init_method=torch.nn.init.normal_,
    )  # fmt: skip
    return layer


def backward(layer: Any, value: float) -> None:
    output = layer.fc(torch.full((2, 4), value, dtype=torch.float64, requires_grad=True))
    output = output[0] + output[1] if isinstance(output, tuple) else output
    (output * output).sum().backward()


def test_nothing_that_is_captured_overwrites_main_grad() -> None:
    """A graph captured in the first microbatch is replayed in all of them."""
    first, later = SimpleNamespace(is_first_microbatch=True), SimpleNamespace()
    with adding([first, later]):
        assert not first.is_first_microbatch
    assert first.is_first_microbatch
    assert not hasattr(later, "is_first_microbatch")


def built(*, fused: bool = False, return_bias: bool = False) -> tuple[Any, Any, Any]:
    """A layer as a host builds it, all that its W adds to, and what waits for a W."""
    layer = layer_of(return_bias)
    layer.fc.fuse_wgrad_accumulation = fused
    for parameter in layer.fc.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.grad_added_to_main_grad = False
    waiting: list[Any] = []
    taken: Any = TELayer(0, "fc", layer.fc, store_of(add, waiting), waiting.append)
    return layer, taken, waiting


def store_of(add: Any, waiting: list[Any]) -> Any:
    return SimpleNamespace(add=add, defer=lambda piece, work: waiting.append(work))


def add(parameter: Any, given: list[torch.Tensor]) -> None:
    if given:
        parameter.main_grad += given[0]
    else:
        parameter.grad_added_to_main_grad = True


@pytest.mark.parametrize("return_bias", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_hosts_hooks_do_not_run_within_b(fused: bool, return_bias: bool) -> None:
    """They would find no gradient, which DDP's refuse where reductions overlap."""
    layer, taken, waiting = built(fused=fused, return_bias=return_bias)
    now = layer_of(return_bias)
    early: list[str] = []
    for name, parameter in layer.fc.named_parameters():
        accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        accumulator.register_hook(lambda *_, name=name: early.append(name))
        parameter.keeps = accumulator
    with taken.bound():
        backward(layer, 1.0)
    backward(now, 1.0)
    assert early == (["bias"] if return_bias else [])  # one added outside of the product stays
    (work,) = waiting
    assert work.touches(layer.fc.weight) and not layer.fc.weight.main_grad.any()
    assert work.num_bytes() == 8 * (2 * 4 + 2 * 3)
    work.compute()
    for name, parameter in layer.fc.named_parameters():
        found = parameter.main_grad if parameter.grad is None else parameter.grad
        assert torch.equal(found, getattr(now.fc, name).grad)
    assert "forward" not in vars(layer.fc) and layer.fc.weight.is_leaf


def test_a_bias_gradient_in_the_dtype_of_main_grad_is_cast_as_by_autograd() -> None:
    """A product that adds to fp32 gives the gradient of a bf16 bias in fp32, too."""
    layer = layer_of().to(torch.bfloat16)
    layer.fc.fuse_wgrad_accumulation = True
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    waiting: list[Any] = []
    taken: Any = TELayer(0, "fc", layer.fc, store_of(accumulate.add, waiting), waiting.append)
    given = torch.full((2, 4), 1.5, dtype=torch.bfloat16, requires_grad=True)
    with taken.bound():
        layer.fc(given).square().sum().backward()
    waiting[0].compute()
    deferred = layer.fc.bias.grad
    layer.zero_grad()
    layer.fc(given).square().sum().backward()
    assert deferred.any() and torch.equal(deferred, layer.fc.bias.grad)


@pytest.mark.parametrize("fused", [False, True])
def test_a_bias_gradient_that_b_computes_is_added_in_b(fused: bool) -> None:
    layer, taken, waiting = built(fused=fused)
    now = layer_of()
    for each in (layer, now):
        each.fc.bias_in_b = True
    with taken.bound():
        for value in (1.0, 3.0):
            backward(layer, value)
            backward(now, value)
    assert torch.equal(layer.fc.bias.main_grad, now.fc.bias.grad)
    for work in waiting:
        work.compute()
    for name in ("weight", "bias"):
        assert torch.equal(getattr(layer.fc, name).main_grad, getattr(now.fc, name).grad)


def test_a_layer_that_ran_twice_adds_both_products_as_autograd_does() -> None:
    layer, taken, waiting = built()
    now = layer_of()
    with taken.bound():
        inputs = [torch.full((2, 4), v, dtype=torch.float64, requires_grad=True) for v in (1.0, 3)]
        for each in (layer, now):
            sum(each.fc(given).square().sum() for given in inputs).backward()
    first, second = waiting
    first.task = second.task = 1
    assert first.join(second)
    first.compute()
    assert torch.equal(layer.fc.weight.main_grad, now.fc.weight.grad)
    assert torch.equal(layer.fc.bias.main_grad, now.fc.bias.grad)


@pytest.mark.parametrize("sums", ["adjacent", "apart", "hooked"])
def test_gradients_of_experts_are_added_as_ddp_adds_them(sums: str) -> None:
    """By one kernel, without their hooks, where DDP's sums are one behind the other."""
    number, size, runs = 3, (4, 5), [0, 0]
    layers = [te_double.GroupedLinear(number, 5, 4, torch.bfloat16) for _ in runs]
    layers[1].load_state_dict(layers[0].state_dict())

    def watched(parameter: Any, turn: int) -> None:
        def hook(*_: Any) -> None:
            runs[turn] += 1
            parameter.main_grad.add_(parameter.grad)
            parameter.grad = None

        hook.__module__ = DistributedDataParallel.__module__
        parameter.keeps = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        parameter.keeps.register_hook(hook)

    for turn, layer in enumerate(layers):
        buffer = torch.zeros(2 * number, *size)
        for place, parameter in enumerate(reversed([*layer.parameters()])):
            parameter.main_grad = buffer[place * (2 if sums == "apart" else 1)]
            parameter.grad_added_to_main_grad = False
            watched(parameter, turn)
    if sums == "hooked":
        layers[0].weight1.keeps.register_hook(lambda *_: None)
    waiting: list[Any] = []
    taken: Any = TELayer(0, "fc", layers[0], store_of(accumulate.add, waiting), waiting.append)
    given = torch.randn(9, 5, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        with taken.bound():
            layers[0](given, [4, 0, 5]).square().sum().backward()
            waiting.pop().compute()
        layers[1](given, [4, 0, 5]).square().sum().backward()
    for one, other in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        assert torch.equal(one.main_grad, other.main_grad) and one.grad is None
    assert runs == [0 if sums == "adjacent" else 2 * number, 2 * number]


def test_what_a_host_changed_goes_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers that a host built without the delay."""
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", te_double)
    monkeypatch.setattr(te_layer, "is_te_min_version", lambda version: True)

    def why(change: Any = lambda layer: None, uses: int = 1) -> str | None:
        layer = layer_of().fc
        change(layer)
        return TELayer.why_not(layer, lambda weight: uses)

    def subclassed(layer: Any) -> None:
        layer.__class__ = type("Quantised", (te_double.Linear,), {"forward": lambda self, x: x})

    assert why() is None
    assert why(subclassed) == "its class is Quantised"
    assert why(lambda layer: setattr(layer, "forward", print)) == "its forward was replaced"
    assert why(uses=2) == "its weight is tied"
    assert why(lambda layer: layer.weight.register_hook(lambda g: g)) == "its weight has hooks"
    overlapped = why(lambda layer: setattr(layer, "ub_bulk_wgrad", True))
    assert overlapped is not None and "tp_comm_overlap" in overlapped
    parts = why(lambda layer: setattr(layer, "weight_names", ["query_weight", "key_weight"]))
    assert parts == "its weight is a part of another"
    offloads = SimpleNamespace(cpu_offloading=True)
    assert why(lambda layer: setattr(layer, "config", offloads)) == "activations are offloaded"
    narrow = SimpleNamespace(fp8="hybrid")
    narrow_reason = why(lambda layer: setattr(layer, "config", narrow))
    assert narrow_reason == "it is faster there in 8 bit, and was not timed in 4"
    monkeypatch.setattr(te_layer, "is_te_min_version", lambda version: False)
    monkeypatch.setattr(te_layer, "get_te_version", lambda: "2.3.0")
    assert why() == "Transformer Engine 2.3.0 is older than 2.7.0"


@pytest.mark.parametrize("replaced", ["nothing", "forward", "autograd function", "class"])
def test_transformer_engines_layers_are_taken_as_it_wrote_them(
    monkeypatch: pytest.MonkeyPatch, replaced: str
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", te_double)
    monkeypatch.setattr(te_layer, "is_te_min_version", lambda version: True)
    layer = layer_of().fc
    if replaced == "forward":
        monkeypatch.setattr(te_double.Linear, "forward", lambda self, value: value)
    elif replaced == "autograd function":
        other = type("_Linear", (), {"forward": staticmethod(lambda ctx, value: value)})
        monkeypatch.setattr(te_double, "_Linear", other, raising=False)
    elif replaced == "class":  # by one that a host tells to be of megatron-core
        layer.__class__ = type("Linear", (te_double.Linear,), {"__module__": compat.TE_LAYERS})
    expected = None if replaced == "nothing" else "its class is Linear"
    assert te_layer.TELayer.why_not(layer, lambda weight: 1) == expected
