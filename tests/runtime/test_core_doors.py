"""Edges of ``core`` that few models reach: one token too many, half precision, scaled layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron.dpp.core import boundary
from megatron.dpp.core.boundary import TokenCounter
from megatron.dpp.core.head import HeadCut
from megatron.dpp.core.slices import Keys, Slices, Unit
from megatron.dpp.core.varlen import attend
from megatron.dpp.errors import ConfigError
from tests.runtime.test_cut import USUAL, Chunk


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
