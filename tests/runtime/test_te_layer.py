"""Weight gradients of Transformer Engine's layers as a host built them, over a stand-in."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.core.wgrad import accumulate, te_layer
from megatron.dpp.core.wgrad.te_layer import TELayer
from tests.runtime import te_double
from tests.runtime.test_te import backward, layer_of


def built(double: Any, *, fused: bool = False, return_bias: bool = False) -> tuple[Any, Any, Any]:
    """A layer as a host builds it, all that its W adds to, and what waits for a W."""
    layer = layer_of(double, return_bias, delay=False)
    layer.fc.fuse_wgrad_accumulation = fused
    for parameter in layer.fc.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.grad_added_to_main_grad = False
    waiting: list[Any] = []
    taken: Any = TELayer(
        0, "fc", layer.fc, add, lambda piece, work: waiting.append(work), waiting.append
    )
    return layer, taken, waiting


def add(parameter: Any, given: list[torch.Tensor]) -> None:
    if given:
        parameter.main_grad += given[0]
    else:
        parameter.grad_added_to_main_grad = True


@pytest.mark.parametrize("return_bias", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_hosts_hooks_do_not_run_within_b(fused: bool, return_bias: bool) -> None:
    """They would find no gradient, which DDP's refuse where reductions overlap."""
    layer, taken, waiting = built(te_double, fused=fused, return_bias=return_bias)
    now = layer_of(te_double, return_bias, delay=False)
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
    layer = layer_of(te_double, return_bias=False, delay=False).to(torch.bfloat16)
    layer.fc.fuse_wgrad_accumulation = True
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    waiting: list[Any] = []
    taken: Any = TELayer(
        0, "fc", layer.fc, accumulate.add,
        lambda piece, work: waiting.append(work), waiting.append,
    )  # fmt: skip
    given = torch.full((2, 4), 1.5, dtype=torch.bfloat16, requires_grad=True)
    with taken.bound():
        layer.fc(given).square().sum().backward()
    waiting[0].compute()
    deferred = layer.fc.bias.grad
    layer.zero_grad()
    layer.fc(given).square().sum().backward()
    assert deferred.any() and torch.equal(deferred, layer.fc.bias.grad)


def test_a_layer_that_ran_twice_adds_both_products_as_autograd_does() -> None:
    layer, taken, waiting = built(te_double)
    now = layer_of(te_double, return_bias=False, delay=False)
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


def test_what_a_host_changed_goes_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers that a host built without the delay."""
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", te_double)
    monkeypatch.setattr(te_layer, "is_te_min_version", lambda version: True)

    def why(change: Any = lambda layer: None, uses: int = 1) -> str | None:
        layer = layer_of(te_double, return_bias=False, delay=False).fc
        change(layer)
        return te_layer.why_layer(layer, lambda weight: uses)

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
