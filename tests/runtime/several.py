"""Compares stages that exchange three tensors with one process, bit by bit.

The three are a hidden state, a second stream that most stages hand on untouched, and integers,
which have no gradient. In an uneven case the last rank hands on two: the hidden state, and the
other two as one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
)
from megatron.core.transformer import TransformerConfig

from megatron.dpp import ConfigError, DppConfig, DppSchedule
from megatron.dpp.runtime.static import StaticSchedule

SEQUENCE, BATCH, HIDDEN, LAYERS = 6, 2, 16, 8
LATE = {"inject": "delay:3ms,message-delay:4ms"}
FUSED = {"split_backward": "off"}
CASES: list[dict[str, Any]] = [
    {"name": "v1", "m": 5, "runs": [FUSED | LATE, {"transport": "shm"}]},
    {"name": "v2", "v": 2, "m": 4, "runs": [LATE, FUSED | LATE | {"slots": 1}]},
    {"name": "uneven", "v": 2, "m": 4, "runs": [FUSED | LATE, LATE], "uneven": True},
    {"name": "v4", "v": 4, "m": 6, "runs": [LATE | {"activation_cap": "strict"}]},
]
"""Of two ranks."""


def config_for(case: dict[str, Any]) -> TransformerConfig:
    v = case.get("v", 1)
    return TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=2,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=v if v > 1 else None,
        pipeline_dtype=torch.float32, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, deallocate_pipeline_outputs=True,
    )  # fmt: skip


class Layer(torch.nn.Module):
    """One transformer layer, reduced to its linear layers; even ones read the second stream."""

    def __init__(self, number: int, config: ModelParallelConfig) -> None:
        super().__init__()
        self.number = number
        options = {
            "config": config, "init_method": torch.nn.init.xavier_normal_, "bias": True,
            "skip_bias_add": False,
        }  # fmt: skip
        self.fc1 = ColumnParallelLinear(HIDDEN, 2 * HIDDEN, gather_output=False, **options)
        self.fc2 = RowParallelLinear(2 * HIDDEN, HIDDEN, input_is_parallel=True, **options)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)

    def forward(self, hidden: torch.Tensor, stream: torch.Tensor, steps: torch.Tensor) -> Any:
        inner = torch.tanh(self.fc1(hidden)[0])
        hidden = hidden + self.fc2(inner)[0] * steps.unsqueeze(-1)
        if self.number % 2 == 0:
            hidden = hidden + 0.5 * stream
        return hidden, stream, steps


class Chunk(torch.nn.Module):
    """Layers first..last of the model; stage 0 reads the data, the last one computes the loss."""

    def __init__(self, first: int, last: int, config: Any, packs: bool = False) -> None:
        super().__init__()
        self.config, self.model_type = config, 1
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList(
            Layer(number, config) for number in range(first, last)
        )
        self.begins, self.ends, self.packs = first == 0, last == LAYERS, packs
        self.given: list[torch.Tensor] = []
        if self.begins:
            generator = torch.Generator().manual_seed(99)
            self.entry = torch.nn.Parameter(torch.randn(2, HIDDEN, generator=generator))

    def set_input_tensor(self, tensors: list[torch.Tensor]) -> None:
        self.given = tensors

    def forward(self, data: torch.Tensor) -> Any:
        if self.begins:
            steps = torch.arange(SEQUENCE).view(-1, 1).expand(-1, BATCH) % 3
            state = (data * self.entry[0], data * self.entry[1], steps)
        else:
            state = tuple(self.given if len(self.given) == 3 else unpacked(*self.given))
        for layer in self.decoder.layers:
            state = layer(*state)
        if self.ends:
            return state[0] * state[1]
        return packed(*state) if self.packs else list(state)


def packed(hidden: torch.Tensor, stream: torch.Tensor, steps: torch.Tensor) -> list[torch.Tensor]:
    return [hidden, torch.cat([stream, steps.unsqueeze(-1).to(stream.dtype)], dim=-1)]


def unpacked(hidden: torch.Tensor, both: torch.Tensor) -> list[torch.Tensor]:
    return [hidden, both[..., :HIDDEN], both[..., HIDDEN].long()]


def batches() -> Any:
    generator = torch.Generator().manual_seed(5)
    while True:
        yield torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator)


def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = (output * output).mean()
    return loss, {"loss": loss.detach().clone()}


def forward_step(iterator: Any, model: Any) -> Any:
    return model(next(iterator)), loss_func


def run(schedule: Any, chunks: list[Chunk], m: int, **more: Any) -> list[float]:
    """Two steps, whose gradients add up, and an evaluation; returns the losses."""
    iterators = [batches() for _ in chunks]
    losses = []
    for forward_only in (False, False, True):
        out = schedule(
            forward_step_func=forward_step, data_iterator=iterators, model=chunks,
            num_microbatches=m, seq_length=SEQUENCE, micro_batch_size=BATCH,
            forward_only=forward_only, **more,
        )  # fmt: skip
        losses += [entry["loss"].item() for entry in out]
    return losses


def three(receives: list[Any], sends: list[Any]) -> tuple[list[Any], list[Any]]:
    return receives * 3, sends * 3


def two_from_the_last_rank(receives: list[Any], sends: list[Any]) -> tuple[list[Any], list[Any]]:
    """In a pipeline of two ranks."""
    (*rest, width), three = sends[0], sends * 3
    two = [tuple(sends[0]), (*rest, width + 1)]
    return (three, two) if dist.get_rank() else (two, three)


def compare(chunks: list[Chunk], whole: Chunk, what: str) -> None:
    expected = {layer.number: layer for layer in whole.decoder.layers}
    for chunk in chunks:
        pairs = [(layer, expected[layer.number]) for layer in chunk.decoder.layers]
        named = [(f"layer {one.number}", a, b) for one, other in pairs
                 for a, b in zip(one.parameters(), other.parameters(), strict=True)]  # fmt: skip
        named += [("entry", chunk.entry, whole.entry)] if chunk.begins else []
        for name, got, wanted in named:
            assert wanted.grad is not None
            assert wanted.grad.abs().max() > 0
            assert got.grad is not None, f"{what}: {name} has no gradient"
            assert torch.equal(got.grad, wanted.grad), f"{what}: the gradient of {name} differs"


def run_case(case: dict[str, Any]) -> None:
    p, v, m = 2, case.get("v", 1), case["m"]
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=p,
        virtual_pipeline_model_parallel_size=v if v > 1 else None,
    )
    config = config_for(case)
    whole = Chunk(0, LAYERS, config)
    expected = run(schedules.forward_backward_no_pipelining, [whole], m)
    per_stage, uneven = LAYERS // (p * v), case.get("uneven", False)
    adjust = two_from_the_last_rank if uneven else three
    for settings in case["runs"]:
        stages = [chunk * p + dist.get_rank() for chunk in range(v)]
        packs = uneven and dist.get_rank() == p - 1
        chunks = [Chunk(s * per_stage, (s + 1) * per_stage, config, packs) for s in stages]
        said: list[str] = []
        with DppSchedule(DppConfig(**settings), log=said.append, capture=unused) as schedule:
            got = run(schedule, chunks, m, adjust_tensor_shapes_fn=adjust)
        compare(chunks, whole, f"{case['name']} with {settings}")
        if stages[-1] == p * v - 1:
            assert got == expected, f"{case['name']}: losses {got} != {expected}"
        numbers = ("2 received, 3 sent", "3 received, 2 sent")[dist.get_rank()]
        told = f"carries several tensors ({numbers if uneven else '3 received, 3 sent'})"
        assert any(told in line for line in said), said
    refuse(chunks, m)
    dist.barrier()
    parallel_state.destroy_model_parallel()


def unused(*_: Any) -> Any:
    raise AssertionError("nothing is captured where boundaries carry several tensors")


def refuse(chunks: list[Chunk], m: int) -> None:
    """megatron-core's own schedules would wait for tensors that it never sends."""
    try:
        run(StaticSchedule(), chunks, m, adjust_tensor_shapes_fn=three)
    except ConfigError as error:
        assert "static schedules send one" in str(error)
    else:
        raise AssertionError("the static schedule took several tensors")
