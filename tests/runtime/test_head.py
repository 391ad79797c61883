"""The backward of the LM head in F: the numbers stay, and the logits of one microbatch are kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.core import boundary
from megatron.dpp.core.head import Head, HeadCut
from megatron.dpp.errors import ConfigError
from tests.runtime.cases import EXPERTS, LATE, OPTIMIZED, TENSOR, UNLIKE, case, check


def test_numbers_stay_and_logits_are_kept_once() -> None:
    on = {"head_in_forward": "on"}
    late, fused = on | {"inject": LATE}, on | {"split_backward": "off", "inject": LATE}
    all_first = {"policy": "breadth-first", "activation_cap": "4p", "inject": LATE}
    few = [all_first | {"most_logits": 0} | how for how in ({}, on)]
    check(
        2,
        case("tied", 2, 5, late, fused, on | {"policy": "megatron"}, layers=2, dropout=0.1),
        case("own head v2", 2, 4, late, fused, v=2, untied=True, recompute="selective",
             per_token=True),
        case("logits", 2, 5, *few, all_first | {"head_in_forward": "off"},
             on | {"host": "silent"}, layers=2, own_loss=True),
        case("tp2", 1, 3, on, tp=2, sp=True, layers=2, untied=True, dropout=0.1),
    )  # fmt: skip


@pytest.mark.slow
def test_numbers_stay_in_further_layouts() -> None:
    on = {"head_in_forward": "on"}
    late = on | {"inject": LATE}
    check(
        2,
        case("full, between", 2, 4, late, v=2, between=True, recompute="full", fusion=True,
             overlap=True),
        case("graphs", 2, 4, late | {"cuda_graphs": "on"}, v=2, iterations=4, untied=True),
        case("packed", 2, 3, late, packed="together", per_token=True, positions="rope",
             layers=4, model=UNLIKE),
        case("frozen", 2, 3, late, layers=2, untied=True, frozen=["layers", "layernorm"]),
        case("own head, one stage", 1, 3, on, untied=True, layers=2),
    )  # fmt: skip
    check(
        4,
        case("dp2", 2, 4, late, v=2, layers=4, **OPTIMIZED),
        case("experts, tp2", 2, 4, late, v=2, layers=4, model=EXPERTS, **TENSOR),
    )


def test_a_tied_head_of_one_stage_and_further_tokens_are_refused() -> None:
    on = {"head_in_forward": "on"}
    for more, words in (({}, "embedding of the same chunk"),
                        ({"model": {"mtp_num_layers": 1}}, "mtp_num_layers=1 runs")):  # fmt: skip
        with pytest.raises(AssertionError, match=words):
            check(1, case("one stage", 1, 2, on, layers=2, **more))


class Chunk(torch.nn.Module):
    """A last chunk of two products, whose second one is the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(grad_scale_func=None, deallocate_pipeline_outputs=False)
        self.inner, self.output_layer = torch.nn.Linear(4, 4), torch.nn.Linear(4, 6)

    def forward(self, given: torch.Tensor, how: str = "") -> torch.Tensor:
        hidden = self.inner(given)
        loss = self.output_layer(hidden).square().mean()
        if how == "reads hidden states":
            loss = loss + hidden.mean()
        if how == "runs it twice":
            loss = loss + self.output_layer(hidden).mean()
        return loss


@pytest.mark.parametrize("how", ["", "reads hidden states", "runs it twice"])
def test_a_head_has_the_gradients_of_the_scaled_loss_or_stays_whole(how: str) -> None:
    """The backward of a head that cannot be cut is the usual one, with nothing lost."""
    torch.manual_seed(1)
    chunk, said = Chunk(), list[str]()
    given = torch.randn(3, 4, requires_grad=True)
    expected = torch.autograd.grad(4 * chunk(given, how), [given, *chunk.parameters()])
    chunk.config.grad_scale_func = lambda loss: 4 * loss
    head = Head(chunk, said.append)
    with head.cut():
        chunk(given)  # of a step that failed
    with head.cut():
        loss = chunk(given, how)
    kept = head.backward(loss, given)
    assert (kept is None) == bool(how) == len(said)
    if kept is None:
        (4 * loss).backward()
    else:
        kept.hidden.backward(kept.gradient)
    for got, wanted in zip([given, *chunk.parameters()], expected, strict=True):
        assert got.grad is not None and torch.equal(got.grad, wanted)


def test_a_model_without_an_output_layer_is_named() -> None:
    def refuse(reason: str) -> Any:
        raise ConfigError(reason)

    with pytest.raises(ConfigError, match="Linear has no output_layer"):
        Head(torch.nn.Linear(2, 2), refuse)


def test_b_goes_on_from_hidden_states_whose_storage_could_not_be_freed() -> None:
    """megatron-core's own backward takes freed outputs alone."""
    given = torch.ones(3, requires_grad=True)
    outputs, gradients = HeadCut(2 * given, torch.full((3,), 5.0)).root
    config = SimpleNamespace(timers=None, grad_scale_func=None, deallocate_pipeline_outputs=True)
    found = boundary.backward(given, outputs, gradients, config)
    assert isinstance(found, torch.Tensor) and found.tolist() == [10.0] * 3
