"""Grouped products of experts, without a model around them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.core import experts
from megatron.dpp.core.experts import GroupedExperts, GroupedLinear, weight_gradients
from megatron.dpp.core.graphs.slots import reasons_of_experts
from megatron.dpp.errors import ConfigError

COUNTS = [5, 0, 9]


def layers(dtype: torch.dtype = torch.float32) -> list[torch.nn.Linear]:
    torch.manual_seed(1)
    return [torch.nn.Linear(16, 24, bias=False, dtype=dtype) for _ in COUNTS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("together", [True, False])
def test_products_equal_those_of_one_expert_after_the_other(
    dtype: torch.dtype, together: bool
) -> None:
    """Bit by bit, where an expert has no token, too, and where the weights lie apart."""
    own, single = layers(dtype), layers(dtype)
    linear = GroupedLinear(own)
    if together:
        linear.lay_out()
    assert (linear.together().data_ptr() == own[0].weight.data_ptr()) is together
    tokens = torch.randn(sum(COUNTS), 16, dtype=dtype)
    ends = torch.tensor(COUNTS).cumsum(0).to(torch.int32)
    one, other = (tokens.clone().requires_grad_() for _ in range(2))
    got = linear(one, ends)
    parts = zip(single, other.split(COUNTS), strict=True)
    expected = torch.cat([layer(part) for layer, part in parts])
    assert torch.equal(got, expected)
    probe = torch.randn_like(got)
    got.backward(probe)
    expected.backward(probe)
    assert torch.equal(one.grad, other.grad)
    for layer, alone in zip(own, single, strict=True):
        assert torch.equal(layer.weight.grad, alone.weight.grad)


def test_weights_in_another_order_of_one_storage_are_copied() -> None:
    """A distributed optimizer's buffer holds the parameters from the last one to the first."""
    own = layers()
    weights = [layer.weight.detach().clone() for layer in own]
    buffer = torch.stack(weights[::-1])
    for layer, place in zip(own, reversed(buffer.unbind()), strict=True):
        layer.weight.data = place
    assert torch.equal(GroupedLinear(own).together(), torch.stack(weights))


def test_weights_at_unequal_distances_are_copied() -> None:
    own = layers()
    weights, size = [layer.weight.detach().clone() for layer in own], own[0].weight.numel()
    storage = torch.zeros(5 * size)
    for layer, start in zip(own, (0, 1, 3), strict=True):
        place = storage[start * size : (start + 1) * size].view_as(layer.weight)
        layer.weight.data = place.copy_(layer.weight.detach())
    assert torch.equal(GroupedLinear(own).together(), torch.stack(weights))


def test_converted_weights_lie_together_again() -> None:
    built = GroupedExperts.__new__(GroupedExperts)
    torch.nn.Module.__init__(built)
    built.local_experts = torch.nn.ModuleList(layers())
    built.linears = (GroupedLinear(list(built.local_experts)),)
    expected = torch.stack([layer.weight.detach() for layer in layers()]).bfloat16()
    built.bfloat16()
    (linear,) = built.linears
    assert torch.equal(linear.together(), expected)
    assert linear.together().data_ptr() == linear.weights[0].data_ptr(), "no copy"


def test_weight_gradients_are_deferred_unless_autograd_would_stop_before_them() -> None:
    linear, kept = GroupedLinear(layers()), []

    class Kept:
        def takes(self, weights: list[Any]) -> bool:
            return True

        def __call__(self, *operands: torch.Tensor) -> None:
            kept.append(operands)

    linear.defer = Kept()
    ends = torch.tensor(COUNTS).cumsum(0).to(torch.int32)
    tokens = torch.randn(sum(COUNTS), 16)
    linear(tokens, ends).sum().backward()  # nothing before it wants a gradient
    now = [weight.grad for weight in linear.weights]
    assert not kept and all(gradient is not None for gradient in now)
    for weight in linear.weights:
        weight.grad = None
    linear(tokens.requires_grad_(), ends).sum().backward()
    assert len(kept) == 1, "an input without a history is no frozen layer's output"
    kept.clear()
    tokens.grad = None
    linear(tokens * 1.0, ends).sum().backward()
    assert kept[0][0].grad_fn is None, "it would keep the graph"
    sums = [
        weight.detach().sum(dim=0).expand(n, -1)
        for weight, n in zip(linear.weights, COUNTS, strict=True)
    ]
    torch.testing.assert_close(tokens.grad, torch.cat(sums))
    assert len(kept) == 1 and not any(weight.grad is not None for weight in linear.weights)
    for got, wanted in zip(weight_gradients(*kept[0]), now, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("number", [1, 2])
def test_only_products_that_are_grouped_leave_the_fusion(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without tokens the experts run one after the other. If that added a gradient in place, DDP
    would take the next microbatch's for added, too. A single expert runs as megatron-core's.
    """

    def expert() -> Any:
        made = torch.nn.Module()
        made.linear_fc1, made.linear_fc2 = layers()[:2]
        made.linear_fc1.gradient_accumulation_fusion = True  # type: ignore[assignment]
        made.linear_fc2.gradient_accumulation_fusion = True  # type: ignore[assignment]
        return made

    def build(self: Any) -> None:
        torch.nn.Module.__init__(self)
        self.config = SimpleNamespace(add_bias_linear=False)
        self.local_experts = torch.nn.ModuleList(expert() for _ in range(number))

    monkeypatch.setattr(experts.SequentialMLP, "__init__", build)
    built = GroupedExperts()
    assert len(list(built.parameters())) == 2 * number, "each is registered once"
    fused = {layer.gradient_accumulation_fusion for one in built.linears for layer in one.layers}
    assert fused == {number == 1}


def test_what_cannot_be_grouped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(add_bias_linear=False)
    weight = SimpleNamespace(
        is_cuda=True, dtype=torch.bfloat16, shape=(24, 12), element_size=lambda: 2
    )
    layer = SimpleNamespace(weight=weight)

    def build(self: Any) -> None:
        torch.nn.Module.__init__(self)
        self.config = config
        self.local_experts = [SimpleNamespace(linear_fc1=layer, linear_fc2=layer)]

    monkeypatch.setattr(experts.SequentialMLP, "__init__", build)
    monkeypatch.setattr(GroupedLinear, "lay_out", lambda self: None)
    with pytest.raises(ConfigError, match=r"experts of \[24, 12\] in torch.bfloat16"):
        GroupedExperts()
    weight.shape, weight.dtype = (24, 16), torch.float16
    with pytest.raises(ConfigError, match=r"experts of \[24, 16\] in torch.float16"):
        GroupedExperts()
    weight.shape, weight.dtype = (12, 24), torch.bfloat16
    with pytest.raises(ConfigError, match=r"experts of \[12, 24\]"):
        GroupedExperts()
    weight.shape = (24, 16)
    GroupedExperts()
    config.add_bias_linear = True
    with pytest.raises(ConfigError, match="add_bias_linear=False"):
        GroupedExperts()
    monkeypatch.setattr(experts, "grouped_mm", None)
    with pytest.raises(ConfigError, match=r"has no torch.nn.functional.grouped_mm"):
        GroupedExperts()


CAPTURED = {
    "num_moe_experts": 4, "moe_pad_expert_input_to_capacity": True,
    "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": ["aux_loss"],
    "moe_input_jitter_eps": None, "moe_router_force_load_balancing": False,
    "moe_shared_expert_overlap": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({}, None),
        ({"moe_router_load_balancing_type": "seq_aux_loss"}, None),
        ({"num_moe_experts": None, "moe_pad_expert_input_to_capacity": False}, None),
        ({"moe_pad_expert_input_to_capacity": False}, "varying shapes"),
        ({"moe_token_dispatcher_type": "allgather"}, "dispatcher alltoall"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
        ({"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]}, "global_aux_loss"),
        ({"moe_input_jitter_eps": 0.1}, "noise of routers"),
        ({"moe_shared_expert_overlap": True}, "stream of their own"),
    ],
)
def test_only_experts_of_fixed_shapes_are_captured(
    setting: dict[str, Any], reason: str | None
) -> None:
    found = reasons_of_experts(SimpleNamespace(**CAPTURED | setting), torch.nn.Identity())
    held = [text for text, holds in found.items() if holds]
    assert len(held) == (reason is not None)
    assert reason is None or reason in held[0]


def test_a_padded_capacity_gives_the_ends_that_the_counts_would() -> None:
    """Without a copy from the host, which a graph does not take."""
    built = GroupedExperts.__new__(GroupedExperts)
    torch.nn.Module.__init__(built)
    built.local_experts = torch.nn.ModuleList(layers())
    tokens, counts = torch.zeros(15, 16), torch.tensor([5, 5, 5])
    ends = []
    for padded in (True, False):
        built.config = SimpleNamespace(moe_pad_expert_input_to_capacity=padded)
        ends.append(built.ends_of(tokens, counts))
    assert ends[0].tolist() == ends[1].tolist() == [5, 10, 15]
    assert {one.dtype for one in ends} == {torch.int32}


@pytest.mark.parametrize(("number", "tokens"), [(1, 4), (2, 0)])
def test_a_single_expert_and_experts_without_tokens_run_by_themselves(
    number: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each weight then gets its gradient of zeros, which DDP waits for."""
    monkeypatch.setattr(experts.SequentialMLP, "forward", lambda _, *given: given)
    built = GroupedExperts.__new__(GroupedExperts)
    torch.nn.Module.__init__(built)
    built.local_experts, built.linears = [None] * number, ()
    given = (torch.ones(tokens, 2), torch.zeros(number), torch.ones(tokens))
    assert all(one is other for one, other in zip(built.forward(*given), given, strict=True))


def test_probabilities_on_the_input_are_not_applied_twice() -> None:
    given: list[torch.Tensor] = []

    class Expert:
        def forward(self, tokens: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
            given.extend((tokens, probs))
            return tokens, None

    built = GroupedExperts.__new__(GroupedExperts)
    torch.nn.Module.__init__(built)
    built.config = SimpleNamespace(
        moe_apply_probs_on_input=True, moe_pad_expert_input_to_capacity=False
    )
    built.local_experts, built.linears = [Expert(), Expert()], (None, None)
    built.are_as_built = lambda: True  # type: ignore[method-assign]
    ends: list[list[int]] = []
    real = built.ends_of

    def told(*given: torch.Tensor) -> torch.Tensor:
        ends.append(real(*given).tolist())
        return real(*given)

    built.ends_of = told  # type: ignore[method-assign]
    tokens, probs = torch.ones(3, 2), torch.tensor([0.5, 0.25, 1.0])
    built.forward(tokens, torch.tensor([1, 2]), probs)
    assert given[0].tolist() == [[0.5, 0.5], [0.25, 0.25], [1.0, 1.0]]
    assert given[1].tolist() == [1.0, 1.0, 1.0]
    assert ends == [[1, 3]], "the first expert's tokens are first"
    built.forward(tokens.bfloat16(), torch.tensor([1, 2]), probs)
    assert given[2].dtype == torch.bfloat16, "weights of fp32 would widen the product"
