"""Layers that a host has changed, over groups that only compute."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from megatron.dpp.core.wgrad import product
from megatron.dpp.core.wgrad.linear import WeightGradients
from megatron.dpp.core.wgrad.own_way import modules_of, why_eager
from megatron.dpp.errors import ConfigError
from tests.runtime.launcher import REPOSITORY
from tests.runtime.test_weight_gradients import Chunk, Linear, inputs

sys.path.insert(0, str(REPOSITORY / "profiling"))

import fused_products


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    monkeypatch.setattr(product, "CLASSES", (Linear,))


@pytest.mark.parametrize("changed", ["input", "gradient"])
def test_operands_that_are_changed_in_place_before_their_w_are_refused(changed: str) -> None:
    chunk = Chunk(Linear())
    store = WeightGradients([chunk])
    value, gradient = inputs(1)[0], torch.ones(3, 1, 2)
    with store.bound():
        output = chunk(value)
        with store.collect(0, 0):
            output.backward(gradient)
        with torch.no_grad():
            (value if changed == "input" else gradient).mul_(2)
        with pytest.raises(ConfigError, match=r"layers\.0 has an input or an output gradient"):
            store.run(0, 0, 0)


def test_a_gradient_that_is_only_asked_for_defers_nothing() -> None:
    chunk = Chunk(Linear())
    store, value = WeightGradients([chunk]), inputs(1)[0]
    with store.bound(), store.divert() as deferred:
        torch.autograd.grad(chunk(value).sum(), value)
        assert not deferred and chunk.decoder.layers[0].weight.grad is None  # type: ignore[index,union-attr]


def test_a_hosts_own_replacement_stays() -> None:
    layer: Any = Linear()
    layer._forward_impl = replaced = lambda **given: given["input"] * 2
    store = WeightGradients([Chunk(layer)])
    with store.bound():
        pass
    assert layer._forward_impl is replaced and store.num_pieces == (0,)


@pytest.mark.parametrize("how", ["layer", "around", "everywhere", "compiled"])
def test_what_is_around_a_layer_counts(how: str) -> None:
    chunk, said = Chunk(Linear(), Linear()), list[str]()
    hook: Any = None
    if how == "everywhere":
        hook = torch.nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    elif how == "compiled":
        chunk.decoder.layers[0].compile()  # type: ignore[operator,union-attr,index]
    else:
        place = chunk.decoder if how == "around" else chunk.decoder.layers[0]  # type: ignore[union-attr,index]
        place.register_full_backward_hook(lambda *_: None)
    try:
        store = WeightGradients([chunk], said.append)
    finally:
        if hook is not None:
            hook.remove()
    assert store.num_pieces == ((2,) if how in ("layer", "compiled") else (0,))
    assert len(said) == 1 and "is computed within B" in said[0]
    assert ("decoder.layers.1" in said[0]) is (how in ("around", "everywhere"))


def test_a_module_in_itself_is_met_once() -> None:
    module = torch.nn.Module()
    module.again = module
    assert len(list(modules_of(module))) == 1


@pytest.mark.parametrize("what", ["nothing", "forward hook", "parameter hook", "forward"])
def test_a_replay_would_leave_out_hooks_and_replaced_forwards(what: str) -> None:
    layer: Any = torch.nn.Linear(2, 2)
    if what == "forward hook":
        layer.register_forward_hook(lambda *_: None)
    elif what == "parameter hook":
        layer.bias.register_hook(lambda gradient: gradient)
    elif what == "forward":
        layer.forward = layer.forward
    reason = why_eager(torch.nn.Sequential(layer))
    assert (reason is None) is (what == "nothing")
    assert reason is None or reason.startswith("0")


@pytest.mark.parametrize("first", ["product", "use"])
def test_a_weight_that_its_pass_uses_elsewhere_is_refused_in_either_order(
    first: str,
) -> None:
    """Autograd would have added up both gradients before it adds them to the weight's."""
    layer, value = Linear(), torch.ones(3, 1, 2, requires_grad=True)
    chunk = Chunk(layer)
    store = WeightGradients([chunk])
    with store.bound(), store.collect(0, 0):
        if first == "use":  # autograd runs what was made last first
            loss = chunk(value).sum() + layer.weight.square().sum()
        else:
            other = layer.weight.square().sum()
            loss = chunk(value).sum() + other
        with pytest.raises(ConfigError, match="weight is also used outside of its layer's own"):
            loss.backward()


def test_a_layer_beside_one_that_goes_its_own_way_in_a_call_defers() -> None:
    chunk = Chunk(Linear(), Linear(output_dtype=torch.float32))
    waits, own = (layer.weight for layer in chunk.decoder.layers)  # type: ignore[union-attr]
    value = torch.ones(3, 1, 2, requires_grad=True)
    chunk(value).square().sum().backward()
    expected = [waits.grad, own.grad]
    chunk.zero_grad()
    store = WeightGradients([chunk])
    with store.bound():
        with store.collect(0, 0):
            chunk(value).square().sum().backward()
        assert waits.grad is None and torch.equal(own.grad, expected[1])
        store.run(0, 0, 0)
        store.run(0, 0, 1)
    assert torch.equal(waits.grad, expected[0])


def test_products_of_one_pass_are_summed_before_they_are_added() -> None:
    """Beside 2**24 of fp32 each of them alone is lost."""
    layer = Linear()
    layer.weight.grad = torch.full((2, 2), 2.0**24)
    chunk = Chunk(layer)
    store = WeightGradients([chunk])
    with store.bound():
        rows = [torch.ones(1, 1, 2, requires_grad=True) for _ in range(2)]
        with store.collect(0, 0):
            torch.autograd.backward([chunk(row).sum() for row in rows])
        store.run(0, 0, 0)
    assert layer.weight.grad.unique().tolist() == [2.0**24 + 2]


@pytest.mark.parametrize("owner", ["megatron.core.distributed", "a.host"])
def test_a_replay_heeds_a_hosts_hooks_on_what_accumulates_a_gradient(owner: str) -> None:
    module: Any = torch.nn.Linear(2, 2)
    weight = module.weight

    def hook(*_: Any) -> None: ...

    hook.__module__ = owner
    module.keeps = weight.expand_as(weight).grad_fn.next_functions[0][0]
    module.keeps.register_hook(hook)
    assert why_eager(module) == (
        None if owner.startswith("megatron") else "Linear.weight has hooks"
    )


@pytest.mark.parametrize(
    ("kept", "given"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16,) * 2],
)
def test_a_fused_product_adds_into_the_main_gradient(
    monkeypatch: pytest.MonkeyPatch, kept: torch.dtype, given: torch.dtype
) -> None:
    """By the kernel of its dtype alone: the other one would read its memory as another's."""
    other = "fp16" if kept == torch.float32 else "fp32"
    monkeypatch.delattr(fused_products, f"wgrad_gemm_accum_{other}")
    monkeypatch.setattr(product.compat, "lookup", lambda name: fused_products)
    weight: Any = torch.nn.Parameter(torch.zeros(2, 3, dtype=given))
    weight.main_grad = torch.ones(2, 3, dtype=kept)
    tokens, grads = torch.ones(4, 3, dtype=given), torch.full((4, 2), 2.0, dtype=given)
    product.add_product(weight, tokens, grads)
    assert torch.equal(weight.main_grad, torch.full((2, 3), 9.0, dtype=kept))
