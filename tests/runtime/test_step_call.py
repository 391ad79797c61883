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
        ("overlap_moe_expert_parallel_comm", True, "--overlap-moe-expert-parallel-comm"),
        ("moe_paged_stash", True, "--moe-paged-stash"),
        ("hybrid_context_parallel", True, "--hybrid-context-parallel"),
        ("defer_embedding_wgrad_compute", True, "--defer-embedding-wgrad-compute"),
        ("cuda_graph_impl", "local", "--cuda-graph-impl"),
    ],
)
def test_settings_that_need_a_static_order_are_refused_by_name(
    setting: str, value: object, flag: str
) -> None:
    call = call_with(**{setting: value})  # a static schedule goes no further
    with pytest.raises(ConfigError, match=f"^{flag} needs megatron-core's own order .* without"):
        call.refuse_ordered()


def test_expert_parallelism_is_not_refused() -> None:
    settings = {"moe_router_load_balancing_type": ["global_aux_loss"], "cuda_graph_impl": "none"}
    call_with(expert_model_parallel_size=2, **settings).refuse_ordered()
    name = "num_microbatches_with_partial_activation_checkpoints"
    with pytest.raises(ConfigError, match="global_aux_loss with partial checkpoints needs"):
        call_with(**settings, **{name: 1}).refuse_ordered()


def test_weight_gradients_outside_of_autocast_are_refused_by_name() -> None:
    chunk = torch.nn.Module()
    chunk.config = SimpleNamespace(enable_autocast=True)
    with pytest.raises(ConfigError, match=r"enable_autocast.*--no-dpp-split-backward"):
        WeightGradients([chunk])
