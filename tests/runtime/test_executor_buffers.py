"""Runners whose results lie in memory that is freed, or overwritten by a later task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from megatron.dpp.runtime.mail import Tensors
from tests.runtime import pipelines
from tests.runtime.pipelines import Arithmetic, check_values, run_pipeline

NAN = float("nan")


@dataclass
class Freed(Arithmetic):
    """An output's storage is replaced when it is freed, as megatron-core does."""

    outputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def forward(self, chunk: int, microbatch: int, received: Tensors | None) -> Tensors:
        output = super().forward(chunk, microbatch, received)
        assert isinstance(output, torch.Tensor)
        self.outputs[chunk, microbatch] = output
        return output

    def free_output(self, chunk: int, microbatch: int) -> None:
        self.outputs.pop((chunk, microbatch)).data = torch.full((2,), NAN)


@dataclass
class Strided(Freed):
    """Results are every second element of a buffer."""

    def spread(self, tensor: torch.Tensor, sizes: Any) -> Tensors:
        buffer = torch.full((2, 2), NAN)
        buffer[:, 0] = tensor
        assert not buffer[:, 0].is_contiguous()
        return buffer[:, 0]


@pytest.mark.parametrize("kind", [Freed, Strided])
def test_outputs_are_freed_once_they_are_put_and_may_lie_in_strides(
    kind: type[Freed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelines, "Arithmetic", kind)
    runners = run_pipeline(3, 2, 5, delay=0.002, sizes=[[8]] * 3, iterations=2)
    check_values(runners, 5, iterations=2)
    for runner in runners:
        assert isinstance(runner, Freed)
        last = runner.topology.stage(1) == 5
        assert set(runner.outputs) == ({(1, i) for i in range(5)} if last else set())


@dataclass
class Slots(Arithmetic):
    """Works in slots, as CUDA graphs do: an activation's input and output lie in the buffers of its
    slot from its F to its last W, and then in those of another. Every B writes to one place, whose
    content is copied for the neighbour.
    """

    pieces: int = 2
    """W tasks of an activation; without them a slot is free after B."""
    free: list[torch.Tensor] = field(default_factory=list)
    held: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    gradient: torch.Tensor = field(default_factory=lambda: torch.full((2,), NAN))
    num_slots: int = 0

    def forward(self, chunk: int, microbatch: int, received: Tensors | None) -> Tensors:
        if not self.free:
            self.free.append(torch.full((2, 2), NAN))
            self.num_slots += 1
        slot = self.held[chunk, microbatch] = self.free.pop()
        if received is not None:
            assert isinstance(received, torch.Tensor)
            slot[0].copy_(received)
            received = slot[0]
        slot[1].copy_(super().forward(chunk, microbatch, received))  # type: ignore[arg-type]
        return slot[1]

    def backward(self, chunk: int, microbatch: int, received: Tensors | None) -> Tensors | None:
        found = super().backward(chunk, microbatch, received)
        self._work_on(chunk, microbatch, last=not self.pieces)
        if found is None:
            return None
        assert isinstance(found, torch.Tensor)
        return self.gradient.copy_(found).clone()

    def weight(self, chunk: int, microbatch: int, piece: int) -> None:
        super().weight(chunk, microbatch, piece)
        self._work_on(chunk, microbatch, last=piece == self.pieces - 1)

    def _work_on(self, chunk: int, microbatch: int, *, last: bool) -> None:
        slot = self.held[chunk, microbatch]
        assert slot[1, 0].item() == self.results["F", chunk, microbatch], "it is this activation's"
        if last:
            self.free.append(self.held.pop((chunk, microbatch)).fill_(NAN))


@dataclass
class Fused(Slots):
    """With a fused backward."""

    pieces: int = 0


@pytest.mark.parametrize("policy", ["dynamic", "depth-first", "megatron"])
@pytest.mark.parametrize("kind", [Slots, Fused])
def test_a_slot_is_used_again_once_nothing_in_it_is_needed(
    kind: type[Slots], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then its output has arrived, and its input is no longer read."""
    monkeypatch.setattr(pipelines, "Arithmetic", kind)
    runners = run_pipeline(
        3, 2, 8, delay=0.002, sizes=[[8]] * 3, iterations=2, policy=policy, split=kind is Slots
    )
    check_values(runners, 8, iterations=2)
    for runner in runners:
        assert isinstance(runner, Slots) and not runner.held
        assert runner.num_slots < 2 * 8, "slots are used again"
