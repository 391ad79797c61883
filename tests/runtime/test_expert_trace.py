"""The experts' records of a step, with layers of which only the hooks run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron.dpp.core import expert_trace
from megatron.dpp.core.expert_trace import traced_experts

COUNTS = torch.tensor([3, 0])


class Experts(torch.nn.Module):
    """Experts that may fail."""

    fails = False

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ArithmeticError("an expert failed")
        return tokens


class Layer(MoELayer):  # type: ignore[misc]
    """The fourth layer of a model; this rank has its experts 2 and 3."""

    def __init__(self, *, padded: bool = False) -> None:
        torch.nn.Module.__init__(self)
        self.config = SimpleNamespace(moe_pad_expert_input_to_capacity=padded)
        self.layer_number, self.local_expert_indices, self.ep_group = 4, [2, 3], [7, 5]
        self.experts = Experts()


class Noted:
    """A recorder that notes its experts, with the number of its mark as the time."""

    enabled = in_forward = True

    def __init__(self) -> None:
        self.marks = 0
        self.found: list[Any] = []

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def experts(self, start: int, end: int, **given: Any) -> None:
        self.found.append((start, end, given))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(expert_trace, "get_process_group_ranks", lambda group: group)
    return Noted()


def run(layer: Layer, counts: torch.Tensor = COUNTS) -> None:
    layer.experts(torch.ones(3, 8), counts)


def test_a_forwards_experts_are_recorded_while_the_block_runs(recorder: Any) -> None:
    layer = Layer()
    with traced_experts([torch.nn.Sequential(layer)], recorder):
        run(layer)
        recorder.in_forward = False  # recomputed in a backward
        run(layer)
        recorder.in_forward = True
        run(layer, COUNTS + 1)
    run(layer)
    whose = {"layer": 4, "first": 2, "group": 5}
    assert recorder.found == [
        (1, 2, whose | {"counts": [3, 0]}),
        (3, 4, whose | {"counts": [4, 1]}),
    ]


def test_experts_that_failed_leave_no_beginning_behind(recorder: Any) -> None:
    layer = Layer()
    with traced_experts([layer], recorder):
        layer.experts.fails = True
        with pytest.raises(ArithmeticError):
            run(layer)
        layer.experts.fails, recorder.in_forward = False, False
        run(layer)
        assert not recorder.found
        recorder.in_forward = True
        run(layer)
    assert [found[:2] for found in recorder.found] == [(2, 3)]


def test_padded_experts_and_a_recorder_that_is_off_have_no_hooks(recorder: Any) -> None:
    padded, layer = Layer(padded=True), Layer()
    with traced_experts([padded], recorder):
        run(padded)
    recorder.enabled = False
    with traced_experts([layer], recorder):
        run(layer)
        assert not layer.experts._forward_hooks
    assert recorder.marks == 0 and not recorder.found
