"""``slice_tokens="auto"`` of calls whose microbatches have one length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp import DppConfig
from megatron.dpp.core.steps import StepCall
from megatron.dpp.errors import ConfigError
from megatron.dpp.runtime.slicing import Slicing
from megatron.dpp.sim.lengths import LengthCosts
from megatron.dpp.sim.pipeline_model import PipelineModel, Rows
from megatron.dpp.sim.slices import Row
from megatron.dpp.sim.weighing import weigh_rows
from megatron.dpp_train.cost.shape import ModelShape, RunSchedule, RunShape

MODEL = ModelShape(
    hidden_size=64, seq_length=16384, vocab_size=512, num_heads=4, num_groups=2, head_size=16,
    ffn_hidden_size=256, gated=True,
)  # fmt: skip


def call_of(shape: RunShape, **more: Any) -> StepCall:
    """The training step of a run with this shape."""
    chunk: Any = torch.nn.Module()
    model = shape.model
    chunk.config = SimpleNamespace(
        hidden_size=model.hidden_size, ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_heads, num_query_groups=model.num_groups,
        kv_channels=model.head_size, gated_linear_unit=model.gated, num_moe_experts=None,
        sequence_parallel=False,
    )  # fmt: skip
    groups = SimpleNamespace(
        pp=SimpleNamespace(size=lambda: shape.pipeline), tp=SimpleNamespace(size=lambda: 1)
    )
    given: dict[str, Any] = {
        "forward_step_func": None, "data_iterator": [None] * shape.chunks,
        "model": [chunk] * shape.chunks, "num_microbatches": shape.num_microbatches,
        "seq_length": model.seq_length, "micro_batch_size": shape.micro_batch,
        "pg_collection": groups,
    }  # fmt: skip
    return StepCall(**given | more)


def shape_of(num_microbatches: int, chunks: int, **schedule: Any) -> RunShape:
    return RunShape(
        model=MODEL, layers=(1,) * 4 * chunks, pipeline=4, num_microbatches=num_microbatches,
        schedule=RunSchedule(
            dynamic=True, policy="auto", cap="auto", split_backward=True, slice_tokens="auto",
            **schedule,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("num_microbatches", [4, 96])
def test_a_run_is_cut_as_its_estimate_says(num_microbatches: int, chunks: int) -> None:
    """Few long sequences are cut, many are not. The log has the choice, the figures, the reason."""
    shape, said = shape_of(num_microbatches, chunks), list[str]()
    config = DppConfig(slice_tokens="auto", cuda_graphs="on")
    slicing, call = Slicing(config, said.append), call_of(shape)
    if num_microbatches == 96:
        assert slicing.cut(call, take=True) is call and len(shape.slices) == 1
    else:
        with pytest.raises(ConfigError, match="does not go with slices"):  # so they would run
            slicing.cut(call, take=True)
    assert slicing.tokens == (shape.slices[0].model.seq_length if len(shape.slices) > 1 else 0)
    (line,) = said
    assert line.endswith(f" takes {shape.weighed.text}") and "of the time of whole" in line


def test_a_cap_in_bytes_and_an_evaluation_always_cut() -> None:
    """Before a step nothing tells the bytes that whole sequences hold."""
    shape, said = shape_of(96, 1), list[str]()
    config = DppConfig(slice_tokens="auto", cuda_graphs="on", activation_cap="20GiB")
    slicing = Slicing(config, said.append)
    for more in ({}, {"forward_only": True}):
        with pytest.raises(ConfigError, match="does not go with slices"):
            slicing.cut(call_of(shape, **more), take=True)
    assert len(said) == 1 and said[0].endswith("limits bytes")
    bounded = dataclasses.replace(shape.schedule, cap="20GiB")
    assert len(dataclasses.replace(shape, schedule=bounded).slices) > 1


def slices_of_rows(
    rows: Rows, *, chunks: int = 1, said: Callable[[str], None] = lambda _: None, **more: Any
) -> int:
    """Most tokens of a slice in a step of announced packed rows; 0 where they run whole."""
    settings = {"activation_cap": more.pop("activation_cap", "auto")}
    slicing = Slicing(DppConfig(slice_tokens="auto", cuda_graphs="on", **settings), said)
    call = call_of(shape_of(len(rows), chunks), **more)
    slicing.announce((), [sum(row) for row in rows], 0, rows)
    try:
        assert slicing.cut(call, take=True) is call
    except ConfigError as error:
        assert "does not go with slices" in str(error)  # so they would run
        return slicing.tokens or -1
    return slicing.tokens


FEW, MANY, SHORT = ([[9000, 7000, 384]] * 4, [[9000, 7000, 384]] * 96, [[900, 2100]] * 8)


@pytest.mark.parametrize("chunks", [1, 2])
def test_announced_rows_are_weighed(chunks: int) -> None:
    """Few long rows are cut, many are not."""
    said = list[str]()
    assert 0 < slices_of_rows(FEW, chunks=chunks, said=said.append) <= 4096
    assert slices_of_rows(SHORT, chunks=chunks) == 0
    assert slices_of_rows(MANY, chunks=chunks) == 0
    (line,) = said
    assert "of the time of whole sequences" in line and line.endswith("weighs each step's rows")
    assert slices_of_rows(MANY, chunks=chunks, activation_cap="20GiB") > 0
    assert slices_of_rows(MANY, chunks=chunks, forward_only=True) == -1, "it keeps no tokens"


def test_what_rows_are_weighed_is_said_once() -> None:
    said = list[str]()
    slicing = Slicing(DppConfig(slice_tokens="auto"), said.append)
    for number in (96, 90):
        slicing.announce((), [16384] * number, 0, MANY[:number])
        slicing.cut(call_of(shape_of(number, 1)), take=True)
    assert len(said) == 1


def test_documents_of_a_row_count_by_their_own_squares() -> None:
    """Attention leaves no document: rows of short ones are lighter."""
    one = PipelineModel(num_ranks=4, num_chunks=1, longest=16384, policy="auto")
    long = LengthCosts(per_square=(1e-3, 2.5e-3, 0.0))
    model = dataclasses.replace(one, costs=long)
    alone, packed = (
        weigh_rows(model, tuple(rows)) for rows in ([(16384,)] * 4, [(128,) * 128] * 4)
    )
    assert packed.times[4096] != alone.times[4096]
    row = Row((0, 1), (100, 60), (64, 128, 160))
    assert [unit.squares for unit in row.units] == [64**2, 100**2 - 64**2 + 28**2, 60**2 - 28**2]
    assert sum(unit.squares for unit in row.units) == 100**2 + 60**2


def test_the_choice_is_said_once() -> None:
    said = list[str]()
    slicing = Slicing(DppConfig(slice_tokens="auto"), said.append)
    for _ in range(2):
        slicing.cut(call_of(shape_of(96, 1)), take=True)
    assert len(set(said)) == 1
