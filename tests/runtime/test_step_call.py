"""A step's arguments, and the tensor between two stages that follows from them.

Only the dynamic schedule refuses settings for a static order.
"""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import schedules

from megatron.dpp.config import DppConfig
from megatron.dpp.core import compat
from megatron.dpp.core.boundary import Boundaries, TokenCounter, boundaries
from megatron.dpp.core.call import StepCall
from megatron.dpp.errors import ConfigError
from megatron.dpp.runtime.session import replica_of
from tests.runtime.test_stage import Chunk, config_with


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


# Boundaries ---------------------------------------------------------------------------------------


def call_of(tensor: int = 1, context: int = 1, decoder: int | None = None, **config: Any) -> Any:
    given = {
        "hidden_size": 8, "sequence_parallel": False, "fp32_residual_connection": False,
        "pipeline_dtype": torch.bfloat16, "params_dtype": torch.float16,
    }  # fmt: skip
    groups = SimpleNamespace(tp=FakeGroup(tensor), cp=FakeGroup(context), dp_cp=None)
    return StepCall.checked(
        data_iterator=None, model=Chunk(config_with(**given | config)), pg_collection=groups,
        forward_step_func=None, num_microbatches=1, seq_length=64, micro_batch_size=3,
        decoder_seq_length=decoder,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "length"),
    [
        ({}, 64),
        ({"context": 4}, 16),
        ({"tensor": 2}, 64),
        ({"tensor": 2, "sequence_parallel": True}, 32),
        ({"tensor": 2, "context": 4, "sequence_parallel": True}, 8),
        ({"context": 4, "decoder": 128}, 32),
    ],
)
def test_a_sequence_is_shared_out_over_context_and_tensor_ranks(
    sizes: dict[str, Any], length: int
) -> None:
    call = call_of(**sizes)
    assert call.boundary_example().shape == (length, 3, 8)
    assert call.boundaries(call.length).usual_bytes == length * 3 * 8 * 2
    tokens = call.tokens(call.length)
    assert (tokens.largest, tokens.hidden) == (length * 3, 8)
    assert tokens.count(call.boundary_example()) == tokens.largest


def test_megatron_core_tells_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its models send several streams per token (enable_hyper_connections)."""

    def streams(*, seq_length: int, micro_batch_size: int, config: Any, **_: Any) -> Any:
        hidden = 4 * config.hidden_size
        return [()] if config.variable_seq_lengths else [(seq_length, micro_batch_size, hidden)]

    monkeypatch.setattr(schedules, "get_tensor_shapes", streams)
    for varies in (False, True):
        call = call_of(variable_seq_lengths=varies)
        assert call.boundary_example().shape == (64, 3, 32)
        assert call.tokens(64).hidden == 32
        assert call.config.variable_seq_lengths == varies


def test_tokens_are_those_of_hidden_states_alone() -> None:
    """A rank counts its own part of a microbatch's: at least one, as a nominal length of 1 is
    shared out as well and sizes divide by it.
    """
    tokens = TokenCounter(largest=32, hidden=8)
    assert tokens.count(torch.zeros(5, 2, 8)) == 10 and tokens.count(torch.zeros(6, 8)) == 6
    for other in (torch.zeros(5, 2, 4), torch.zeros(8), torch.zeros([]), [torch.zeros(5, 2, 8)]):
        assert tokens.count(other) is None
    assert TokenCounter(largest=32, hidden=0).count(torch.zeros(5, 2, 8)) is None
    assert TokenCounter(largest=8, hidden=0, parts=4).of_rank([16, 32]) is None
    call = call_of(tensor=2, context=4, sequence_parallel=True)
    assert call.tokens(64).of_rank([64 * 3, 80]) == [8 * 3, 10]
    assert dataclasses.replace(call, seq_length=1).tokens(1).largest == 1
    for varies, rows in ((True, 96), (False, 16)):  # of the longest sequence where lengths vary
        call = call_of(context=4, variable_seq_lengths=varies)
        assert call.tokens(96 * 4).largest == rows * 3
    adjust = {"adjust_tensor_shapes_fn": lambda receives, sends: (receives, sends)}
    call = dataclasses.replace(call_of(), **adjust)
    assert call.tokens(call.length).hidden == 0, "tensors of other shapes"


def test_shapes_that_are_no_shapes_are_refused_and_links_hold_the_largest() -> None:
    assert boundaries((4, 2, 8), 2, None) == (128, (128,), (128,))
    both = boundaries((4, 2, 8), 2, lambda r, s: (r, [*s, (3,)]))
    assert both == (128, (128,), (128, 6)) and both.several
    four = [(4,)]
    for given in (None, ([], four), (four, []), ([], []), ([("x",)], four)):
        with pytest.raises(ConfigError, match="adjust_tensor_shapes_fn returned"):
            boundaries((4, 2, 8), 2, lambda r, s, given=given: given)
    assert not Boundaries(8, (8,), (8,)).several
    assert Boundaries(8, (8, 8), (8,)).several and Boundaries(8, (8,), (8, 8)).several
    opened = Boundaries(8, (8, 64), (32, 16))
    for fits in (opened, Boundaries(8, (64, 8), (16, 32))):
        fits.check_fits(opened)
    for receives, sends, said in (
        ((8, 65), (32, 16), "receive 2 tensors of up to 65 bytes"),
        ((8, 64), (8, 33), "send 2 tensors of up to 33 bytes"),
        ((8,), (32, 16), r"receive 1 tensors .* 2 of up"),
    ):
        with pytest.raises(ConfigError, match=said):
            Boundaries(8, receives, sends).check_fits(opened)


@pytest.mark.parametrize(
    ("varies", "most", "named"),
    [
        (True, 5, "DppConfig(max_tokens=5)"),
        (True, 0, "seq_length=2 times micro_batch_size=3"),
        (False, 0, "seq_length=2 times micro_batch_size=3"),
    ],
)
def test_a_microbatch_beyond_the_bound_names_the_setting_that_gave_it(
    varies: bool, most: int, named: str
) -> None:
    call = dataclasses.replace(call_of(variable_seq_lengths=varies), seq_length=2)
    tokens = call.tokens(call.longest(most), most)
    assert tokens.count(torch.zeros(2, 3, 8)) == 6
    with pytest.raises(ConfigError) as caught:
        tokens.count(torch.zeros(7, 1, 8))
    assert f"7 tokens, and links and the memory cap have room for 6 ({named})" in str(caught.value)
    assert "DppConfig(max_tokens=7), or more" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"pipeline_dtype": None}, torch.float16),
        ({"fp32_residual_connection": True}, torch.float32),
    ],
)
def test_boundaries_have_the_type_of_the_pipeline(config: dict[str, Any], dtype: Any) -> None:
    assert call_of(**config).boundary_example().dtype == dtype


def test_graphs_are_made_for_the_longest_length_where_lengths_may_be_unlike() -> None:
    call, given = call_of(context=4), {"max_tokens": 3 * 512}
    varies = call_of(context=4, variable_seq_lengths=True)
    assert len(call.boundary_example(DppConfig(**given))) == 16
    assert len(varies.boundary_example(DppConfig(**given))) == 128
    assert len(call.boundary_example(DppConfig(length_buckets="512", **given))) == 128
    assert len(varies.boundary_example()) == 16


@pytest.mark.parametrize(
    ("buckets", "rows"),
    [("off", []), ("32", [8]), ("32,64,1024", [8, 16]), ("1024", []), ("geometric", [16])],
)
def test_lengths_above_the_longest_that_is_known_are_not_captured(
    buckets: str, rows: list[int]
) -> None:
    assert call_of(context=4).captured_rows(DppConfig(length_buckets=buckets)) == rows


@pytest.mark.parametrize("buckets", ["geometric", "66"])
def test_captured_lengths_are_shared_out_without_a_remainder(buckets: str) -> None:
    call = dataclasses.replace(call_of(context=3), seq_length=3 * 640)
    rows = call.captured_rows(DppConfig(length_buckets=buckets))
    lengths = DppConfig(length_buckets=buckets).buckets(3 * 640, 3)
    assert [3 * row for row in rows] == list(lengths)
    with pytest.raises(ConfigError, match="64 is no multiple of 3"):
        call.captured_rows(DppConfig(length_buckets="64"))


@pytest.mark.parametrize(("rank", "replica"), [(0, 0), (3, 0), (4, 1), (11, 2)])
def test_context_ranks_share_a_replica(
    monkeypatch: pytest.MonkeyPatch, rank: int, replica: int
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda _: rank)
    assert replica_of(call_of(context=4)) == replica


@pytest.mark.parametrize(
    ("name", "said"), [("num_moe_experts", "num_moe_experts=4"), ("mtp_num_layers", "mtp_num_l")]
)
def test_losses_scaled_by_one_tensor_need_one_tensor(name: str, said: str) -> None:
    several = {"adjust_tensor_shapes_fn": lambda receives, sends: (receives, [*sends, (3,)])}
    dataclasses.replace(call_of(), **several).boundaries(64)
    call_of(**{name: 4}).boundaries(64)
    with pytest.raises(ConfigError, match="exchange one tensor"):  # megatron-core asks for None
        dataclasses.replace(call_of(**{name: 0}), **several).boundaries(64)
    with pytest.raises(ConfigError, match=f"{said}.* exchange one tensor, not 2"):
        dataclasses.replace(call_of(**{name: 4}), **several).boundaries(64)
