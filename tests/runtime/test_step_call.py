"""Checks of a step's arguments: only the dynamic schedule refuses settings for a static order."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch

from megatron.dpp.core import compat
from megatron.dpp.core.call import StepCall
from megatron.dpp.errors import ConfigError


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
    ("setting", "usual", "value"),
    [
        ("overlap_moe_expert_parallel_comm", False, True),
        ("moe_paged_stash", False, True),
        ("hybrid_context_parallel", False, True),
        ("dynamic_context_parallel", False, True),
        ("max_seqlen_per_dp_cp_rank", None, 4096),  # verl's sign
        ("defer_embedding_wgrad_compute", False, True),
        ("delay_wgrad_compute", False, True),
        ("overlap_dispatch_backward_with_experts_wgrad", False, True),
        ("cuda_graph_impl", "none", "local"),
        ("gtp_weight_remat_size", 1, 2),
        ("expert_gtp_weight_remat_size", 1, 2),
        ("moe_expert_rank_capacity_factor", None, 1.5),
    ],
)
def test_settings_that_need_a_static_order_are_refused(
    setting: str, usual: object, value: object
) -> None:
    call_with(**{setting: usual}).refuse_ordered()
    call = call_with(**{setting: value})  # a static schedule goes no further
    with pytest.raises(ConfigError, match=f"^{setting}={value!r} needs megatron-core's own order"):
        call.refuse_ordered()


def test_expert_parallelism_is_refused_with_partial_checkpoints_of_a_global_loss_alone() -> None:
    kinds, partial = (
        "moe_router_load_balancing_type",
        {"num_microbatches_with_partial_activation_checkpoints": 1},
    )
    call_with(expert_model_parallel_size=2, **{kinds: ["global_aux_loss"]}).refuse_ordered()
    call_with(**partial, **{kinds: ["aux_loss"]}).refuse_ordered()
    with pytest.raises(ConfigError, match=r"global_aux_loss.? with partial checkpoints needs"):
        call_with(**partial, **{kinds: ["global_aux_loss"]}).refuse_ordered()


def test_arguments_that_do_not_fit_together_are_refused() -> None:
    chunk, groups = torch.nn.Module(), SimpleNamespace()
    usual = {
        "forward_step_func": None, "num_microbatches": 1, "seq_length": 8, "micro_batch_size": 1,
        "pg_collection": groups, "data_iterator": [None], "model": [chunk],
    }  # fmt: skip
    assert StepCall.checked(**usual).pg_collection is groups
    with pytest.raises(ConfigError, match="num_microbatches is 0: at least 1 is needed"):
        StepCall.checked(**usual | {"num_microbatches": 0})
    with pytest.raises(ConfigError, match="2 model chunks need a list of as many iterators, got 1"):
        StepCall.checked(**usual | {"model": [chunk, chunk]})
    with pytest.raises(ConfigError, match=r"^a_new_one, later: megatron-core .* passes this"):
        StepCall.checked(**usual | {"later": 1, "a_new_one": None})


@pytest.mark.parametrize(
    ("varies", "longest", "refused"), [(True, 1, True), (True, 2, False), (False, 1, False)]
)
def test_a_nominal_length_is_refused_where_no_other_is_known(
    varies: bool, longest: int, refused: bool
) -> None:
    call = call_with(variable_seq_lengths=varies)
    with pytest.raises(ConfigError, match="slots and") if refused else contextlib.nullcontext():
        call.check_length(longest)


def test_the_longest_sequence_is_that_of_the_call_the_host_or_a_full_microbatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = dataclasses.replace(call_with(), micro_batch_size=3)
    monkeypatch.setattr(compat, "longest_length", lambda config: 5)
    assert call.longest(0) == 8
    assert call.longest(25) == 9, "rounded up"
    monkeypatch.setattr(compat, "longest_length", lambda config: 50)
    assert call.longest(25) == 50
    assert dataclasses.replace(call, decoder_seq_length=64).longest(25) == 64
