"""``slice_tokens="auto"`` of calls whose microbatches have one length."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp import DppConfig
from megatron.dpp.core.steps import StepCall
from megatron.dpp.errors import ConfigError
from megatron.dpp.runtime.slicing import Slicing
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


def test_the_choice_is_said_once() -> None:
    said = list[str]()
    slicing = Slicing(DppConfig(slice_tokens="auto"), said.append)
    for _ in range(2):
        slicing.cut(call_of(shape_of(96, 1)), take=True)
    assert len(set(said)) == 1
