"""Estimated activations, divided over context and tensor ranks."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.dpp_train.cost.memory import deferred_bytes, head_bytes, layer_bytes, logits
from tests.cost.test_formulas import shape

TENSOR = "--tensor-model-parallel-size"


@pytest.mark.parametrize("flags", ["", "--swiglu --disable-bias-linear", "--normalization RMSNorm"])
def test_context_ranks_share_all_out(flags: str) -> None:
    alone = shape(flags)
    shared = dataclasses.replace(alone, context=4)
    shared = dataclasses.replace(shared, gathers_keys=False)
    for measure in (layer_bytes, deferred_bytes, head_bytes, logits):
        assert measure(shared) == pytest.approx(measure(alone) / 4)
    keys = 2 * shared.element_bytes * shared.tokens * shared.model.keys
    gathering = dataclasses.replace(shared, gathers_keys=True)
    assert layer_bytes(gathering) == pytest.approx(layer_bytes(shared) + 3 * keys)
    again = dataclasses.replace(gathering, recompute="selective")  # gathered once more in B
    assert layer_bytes(again) == layer_bytes(dataclasses.replace(again, gathers_keys=False))


@pytest.mark.parametrize("measure", [layer_bytes, deferred_bytes, head_bytes, logits])
@pytest.mark.parametrize("flags", ["", "--sequence-parallel"])
def test_tensor_ranks_share_a_part_and_keep_another(measure: object, flags: str) -> None:
    """The shared part halves with each doubling."""
    assert callable(measure)
    one = measure(shape())
    two, four = (measure(shape(f"{TENSOR} {t} {flags}", world_size=t)) for t in (2, 4))
    assert one > two > four > one / 4 * 0.999
    assert one - two == pytest.approx(2 * (two - four))


def test_each_tensor_rank_has_its_share_of_the_logits() -> None:
    assert logits(shape(f"{TENSOR} 4", world_size=4)) == pytest.approx(logits(shape()) / 4)
