"""Checks of a step's arguments: only the dynamic schedule refuses settings for a static order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron.dpp.errors import ConfigError
from megatron.dpp.mcore.steps import StepCall
from megatron.dpp.mcore.wgrad.linear import WeightGradients


class FakeGroup:
    """A process group that knows its size."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def call_with(**settings: object) -> StepCall:
    chunk = torch.nn.Module()
    chunk.config = SimpleNamespace(**settings)
    return StepCall.checked(
        data_iterator=iter(()), model=chunk,
        pg_collection=SimpleNamespace(dp_cp=FakeGroup(2), cp=FakeGroup(1)),
        forward_step_func=None, num_microbatches=1, seq_length=8, micro_batch_size=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "value", "flag"),
    [
        ("expert_model_parallel_size", 2, "--expert-model-parallel-size"),
        ("expert_tensor_parallel_size", 2, "--expert-tensor-parallel-size above .*"),
        (
            "moe_router_load_balancing_type",
            ["global_aux_loss"],
            "--moe-router-load.*global_aux_loss",
        ),
        ("cuda_graph_impl", "local", "--cuda-graph-impl"),
    ],
)
def test_settings_that_need_a_static_order_are_refused_by_name(
    setting: str, value: object, flag: str
) -> None:
    call = call_with(**{setting: value})  # a static schedule goes no further
    with pytest.raises(ConfigError, match=f"^{flag} needs the same order .* without --use-dpp"):
        call.refuse_ordered()


def test_a_plain_model_is_not_refused() -> None:
    call_with(expert_model_parallel_size=1, cuda_graph_impl="none").refuse_ordered()


def test_weight_gradients_outside_of_autocast_are_refused_by_name() -> None:
    chunk = torch.nn.Module()
    chunk.config = SimpleNamespace(enable_autocast=True)
    with pytest.raises(ConfigError, match=r"enable_autocast.*--no-dpp-split-backward"):
        WeightGradients([chunk])
