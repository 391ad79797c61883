"""Edges of ``core`` that few models reach: one token too many, half precision, scaled layers."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron.dpp.core import boundary
from megatron.dpp.core.boundary import TokenCounter
from megatron.dpp.core.grad_sync import GradSync
from megatron.dpp.core.head import HeadCut
from megatron.dpp.core.slices import Keys, Slices, Unit
from megatron.dpp.core.varlen import attend
from megatron.dpp.core.wgrad import product, te_layer
from megatron.dpp.core.wgrad.linear import WeightGradients
from megatron.dpp.core.wgrad.own_way import why_eager
from megatron.dpp.errors import ConfigError
from tests.runtime import te_double
from tests.runtime.test_cut import USUAL, Chunk
from tests.runtime.test_te import layer_of
from tests.runtime.test_weight_gradients import Chunk as LayerChunk
from tests.runtime.test_weight_gradients import Linear


def test_one_token_more_than_there_is_room_for_is_refused() -> None:
    counter = TokenCounter(largest=6, hidden=8, bound="seq_length=6")
    assert counter.count(torch.zeros(6, 1, 8)) == 6
    with pytest.raises(ConfigError, match="a microbatch has 7 tokens"):
        counter.count(torch.zeros(7, 1, 8))


def test_gradients_of_a_slices_keys_are_added_in_fp32() -> None:
    """Each later slice adds its own: two eps / 2 of bf16 beside 1 would both be lost in bf16."""
    first, second, third = (Unit(0, n, n + 1, 3) for n in range(3))
    half = torch.finfo(torch.bfloat16).eps / 2
    key = torch.zeros(1, 1, 1, 2, dtype=torch.bfloat16)
    row = Keys().row(0, first, 0, key, key)
    for unit, value in ((third, 1.0), (second, half), (first, half)):
        own = row.share(unit, [torch.full((unit.end, 1, 1, 2), value).bfloat16()] * 2)
    assert all(grad.dtype == torch.bfloat16 for grad in own)
    assert all(grad.unique().tolist() == [1 + 2 * half] for grad in own)


class Core(DotProductAttention):  # type: ignore[misc]
    """megatron-core's attention of a layer, without process groups."""

    def __init__(self, *, scales: bool) -> None:
        torch.nn.Module.__init__(self)
        self.config = SimpleNamespace(**USUAL, apply_query_key_layer_scaling=scales)
        self.softmax_scale, self.layer_number, self.attention_dropout = 0.2, 3, torch.nn.Dropout(0)


@pytest.mark.parametrize("scales", [True, False])
def test_scores_that_megatron_scales_by_the_layer_are_scaled_back(scales: bool) -> None:
    core: Any = Core(scales=scales)
    unit, drawn = Unit(0, 0, 3, 6), torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(3, 1, 2, 4, generator=drawn) for _ in range(3))
    slices = Slices([Chunk(core)])
    with slices.bound(), slices.running(0, unit):
        output = core(q, k, v)
    expected = attend(q, k, v, unit.spans, scale=0.2 * (3 if scales else 1))
    torch.testing.assert_close(output, expected)


def test_b_goes_on_from_hidden_states_whose_storage_could_not_be_freed() -> None:
    """megatron-core's own backward takes freed outputs alone."""
    given = torch.ones(3, requires_grad=True)
    outputs, gradients = HeadCut(2 * given, torch.full((3,), 5.0)).root
    config = SimpleNamespace(timers=None, grad_scale_func=None, deallocate_pipeline_outputs=True)
    found = boundary.backward(given, outputs, gradients, config)
    assert isinstance(found, torch.Tensor) and found.tolist() == [10.0] * 3


@pytest.mark.parametrize("first", ["product", "use"])
def test_a_weight_that_its_pass_uses_elsewhere_is_refused_in_either_order(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Autograd would have added up both gradients before it adds them to the weight's."""
    monkeypatch.setattr(product, "CLASSES", (Linear,))
    layer, value = Linear(), torch.ones(3, 1, 2, requires_grad=True)
    chunk = LayerChunk(layer)
    store = WeightGradients([chunk])
    with store.bound(), store.collect(0, 0):
        if first == "use":  # autograd runs what was made last first
            loss = chunk(value).sum() + layer.weight.square().sum()
        else:
            other = layer.weight.square().sum()
            loss = chunk(value).sum() + other
        with pytest.raises(ConfigError, match="weight is also used outside of its layer's own"):
            loss.backward()


def test_a_layer_beside_one_that_goes_its_own_way_in_a_call_defers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(product, "CLASSES", (Linear,))
    chunk = LayerChunk(Linear(), Linear(output_dtype=torch.float32))
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


def test_products_of_one_pass_are_summed_before_they_are_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside 2**24 of fp32 each of them alone is lost."""
    monkeypatch.setattr(product, "CLASSES", (Linear,))
    layer = Linear()
    layer.weight.grad = torch.full((2, 2), 2.0**24)
    chunk = LayerChunk(layer)
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


@pytest.mark.parametrize("replaced", ["nothing", "forward", "autograd function"])
def test_transformer_engines_layers_are_taken_as_it_wrote_them(
    monkeypatch: pytest.MonkeyPatch, replaced: str
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", te_double)
    monkeypatch.setattr(te_layer, "is_te_min_version", lambda version: True)
    layer = layer_of(te_double, return_bias=False, delay=False).fc
    if replaced == "forward":
        monkeypatch.setattr(te_double.Linear, "forward", lambda self, value: value)
    elif replaced == "autograd function":
        other = type("_Linear", (), {"forward": staticmethod(lambda ctx, value: value)})
        monkeypatch.setattr(te_double, "_Linear", other, raising=False)
    expected = None if replaced == "nothing" else "its class is Linear"
    assert te_layer.TELayer.why_not(layer, lambda weight: 1) == expected


def test_chunks_are_reduced_from_the_last_one_on() -> None:
    """Replicas whose orders differ would issue collectives in unlike orders."""
    config = SimpleNamespace(no_sync_func=None, grad_sync_func=None)
    model = [torch.nn.Identity(), torch.nn.Identity()]
    call: Any = SimpleNamespace(config=config, forward_only=True, model=model)
    with pytest.raises(AssertionError, match="chunk 0 is complete before chunk 1"):
        GradSync(call).complete(0)
