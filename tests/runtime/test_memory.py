"""Activations are counted on the graph, and a backward notices nothing of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.dpp.memory import room, saved_bytes


class Doubled(torch.autograd.Function):
    """Saves its input, as Functions of Python do."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value)
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (value,) = ctx.saved_tensors
        return gradient * 2 + value * 0


def test_every_storage_counts_once_and_weights_do_not() -> None:
    model = torch.nn.Linear(8, 8, bias=False)
    first = torch.ones(4, 8, requires_grad=True)
    hidden = model(first)  # saves first and the weight
    doubled = Doubled.apply(hidden)  # type: ignore[no-untyped-call]  # saves hidden
    output = doubled * hidden  # saves both: hidden is known already
    assert saved_bytes([output], model) == 3 * 4 * 8 * 4
    both = torch.cat([output, output.exp()])  # exp saves its result
    assert saved_bytes([both, output], model) == 4 * 4 * 8 * 4
    assert saved_bytes([torch.ones(3)], model) == 0


def test_weights_that_share_a_buffer_do_not_count() -> None:
    """A distributed optimizer's buffer holds all of them."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(2)))
    buffer = torch.zeros(3, 8, 8)
    for layer, place in zip(model, buffer[1:], strict=True):
        layer.weight.data = place
    output = model(torch.ones(4, 8, requires_grad=True))
    assert saved_bytes([output], model) == 2 * 4 * 8 * 4, "the two layers' inputs"


def test_a_backward_sees_the_parameter_itself() -> None:
    """A copy would have neither ``main_grad`` nor the parameter's attributes."""
    seen: list[torch.Tensor] = []

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(value, weight)
            return value @ weight.t()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            seen.append(ctx.saved_tensors[1])
            return gradient @ ctx.saved_tensors[1], None

    model = torch.nn.Linear(8, 8, bias=False)
    value = torch.ones(4, 8, requires_grad=True)
    output = Linear.apply(value, model.weight)  # type: ignore[no-untyped-call]
    assert saved_bytes([output], model) == 4 * 8 * 4
    output.sum().backward()
    assert seen[0] is model.weight


def test_memory_that_pytorch_keeps_unused_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's count lacks it, and the allocator gives it to the next tensors."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 30)
    for available, expected in ((True, 100 + 50 - 30), (False, None)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert room() == expected


def test_a_nested_tensor_of_the_loss_is_counted_by_its_values() -> None:
    """verl's log-probabilities are nested tensors, which have no storage of their own."""
    model = torch.nn.Linear(4, 1, bias=False)
    scores = model(torch.ones(6, 4))
    nested = torch.nested.nested_tensor_from_jagged(scores, offsets=torch.tensor([0, 2, 6]))
    counted = saved_bytes([(nested * nested).values()], model)
    assert counted >= 6 * 4 * 4 + 6 * 4, "the input and the scores"
