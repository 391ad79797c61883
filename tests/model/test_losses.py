"""Checks of losses, and reports that megatron-core's in-place changes do not reach."""

from __future__ import annotations

import argparse
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.errors import DppError
from megatron.dpp_train import state
from megatron.dpp_train.model import losses
from megatron.dpp_train.model.losses import check_norm, check_step, require_finite
from megatron.dpp_train.model.tasks import bert_loss, gpt_loss
from megatron.dpp_train.optimizer.grad_checks import GradientChecks
from megatron.dpp_train.state import LossCheck

RUN = SimpleNamespace(
    args=argparse.Namespace(check_for_nan_in_loss_and_grad=True),
    iteration=0,
    rank=0,
    loss_check=LossCheck(),
)
NAN = torch.tensor(float("nan"))


class Copy:
    """Stands for the event behind a loss that is on its way to the host."""

    def __init__(self) -> None:
        self.there = False
        self.waited_for = False

    def query(self) -> bool:
        return self.there

    def synchronize(self) -> None:
        self.there = self.waited_for = True


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Copy]:
    made: list[Copy] = []

    def on_the_way(loss: torch.Tensor) -> tuple[torch.Tensor, Copy]:
        made.append(Copy())
        return loss, made[-1]

    monkeypatch.setattr(state, "on_the_way", on_the_way)
    return made


@pytest.mark.parametrize("with_head", [False, True])
def test_berts_report_survives_the_division_by_microbatches(with_head: bool) -> None:
    logits = torch.zeros(2, 2) if with_head else None
    output = (torch.tensor([[1.0, 3.0], [5.0, 7.0]]), logits)
    mask = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    loss, report = bert_loss(RUN, mask, torch.tensor([0, 1]), output)
    loss /= 8  # as megatron-core's forward_step does
    assert report["lm loss"].item() == 3.0
    assert ("sop loss" in report) is with_head


def test_berts_training_stops_at_a_sum_that_is_not_finite() -> None:
    """The sentences' loss alone may be the bad one."""
    output = (torch.ones(1, 2, requires_grad=True), torch.tensor([[float("nan"), 0.0]]))
    with pytest.raises(DppError, match="iteration 1: the loss on rank 0 is nan"):
        bert_loss(RUN, torch.ones(1, 2), torch.tensor([0]), output)


def test_gpts_report_survives_it() -> None:
    loss, count, report = gpt_loss(RUN, torch.ones(1, 2), torch.tensor([[1.0, 3.0]]))
    loss /= 8
    assert (count.item(), report["lm loss"].tolist()) == (2, [4.0, 2.0])


def test_a_loss_that_is_not_finite_stops_training_but_no_evaluation() -> None:
    assert require_finite(RUN, NAN) is NAN
    with pytest.raises(DppError, match="iteration 1: the loss on rank 0 is nan"):
        require_finite(RUN, NAN.clone().requires_grad_())


def test_a_loss_is_read_when_it_is_there_and_none_is_waited_for(copies: list[Copy]) -> None:
    check, one = LossCheck(), torch.ones(())
    assert check.add(NAN, 0) is None
    assert check.add(one, 0) is None
    copies[0].there = True
    wrong = check.add(one, 0)
    assert wrong is not None and math.isnan(wrong)
    assert not any(copy.waited_for for copy in copies)


def test_the_end_of_a_step_waits_for_all(copies: list[Copy]) -> None:
    check = LossCheck()
    assert [check.add(torch.ones(()), 0) for _ in range(2)] == [None, None]
    assert check.rest() is None
    assert [check.add(x, 1) for x in (torch.tensor(math.inf), torch.ones(()))] == [None, None]
    assert check.rest() == math.inf
    assert check.rest() is None
    assert [copy.waited_for for copy in copies] == [True] * 4


def test_an_iteration_that_was_broken_off_leaves_nothing(copies: list[Copy]) -> None:
    check = LossCheck()
    check.add(NAN, 0)
    assert check.add(torch.ones(()), 1) is None
    assert check.rest() is None


def test_a_loss_that_comes_late_stops_the_step_that_has_it(copies: list[Copy]) -> None:
    run = SimpleNamespace(**{**vars(RUN), "loss_check": LossCheck()})
    require_finite(run, NAN.clone().requires_grad_())
    with pytest.raises(DppError, match="iteration 1: the loss on rank 0 is nan"):
        check_step(run, GradientChecks())


def test_losses_are_means_over_microbatches_and_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses.mpu, "is_pipeline_last_stage", lambda ignore_virtual: True)
    """Context-parallel ranks hold other tokens of the same samples."""

    def group(*, with_context_parallel: bool = False) -> str:
        return "dp and cp" if with_context_parallel else "dp"

    def all_reduce(sums: torch.Tensor, group: str) -> None:
        assert group == "dp and cp"
        sums *= 2  # two ranks with the same ones

    sizes = {"dp and cp": 2, "dp": 1}
    monkeypatch.setattr(losses.mpu, "get_data_parallel_group", group)
    monkeypatch.setattr(
        losses.mpu, "get_data_parallel_world_size", lambda **given: sizes[group(**given)]
    )
    monkeypatch.setattr(losses.dist, "all_reduce", all_reduce)
    reduced = [
        {"mean": torch.tensor([1.0]), "by token": torch.tensor([6.0, 3.0])},
        {"mean": torch.tensor([4.0]), "by token": torch.tensor([2.0, 5.0])},
    ]
    means = {name: value.item() for name, value in losses.mean_losses(reduced).items()}
    assert means == {"mean": 2.5, "by token": 1.0}
    sums = {name: value.tolist() for name, value in losses.summed_losses(reduced).items()}
    assert sums == {"mean": [10.0, 4.0], "by token": [16.0, 16.0]}


def test_losses_are_summed_in_fp32_whatever_their_dtype() -> None:
    """bf16 has no 257."""
    ones = torch.ones(1, 257, dtype=torch.bfloat16)
    total, count = losses.masked_sum(ones, ones)
    assert (total.item(), total.dtype) == (257.0, torch.float32)
    assert (count.item(), count.dtype) == (257, torch.int32)


def test_a_norm_that_is_not_finite_ends_every_replica() -> None:
    check_norm(RUN, None)  # a skipped iteration's
    check_norm(RUN, 1.0)
    with pytest.raises(DppError, match="iteration 1: the norm of all gradients is nan; lower --lr"):
        check_norm(RUN, math.nan)
    going_on = argparse.Namespace(check_for_nan_in_loss_and_grad=False)
    check_norm(SimpleNamespace(args=going_on), math.nan)


@pytest.mark.gpu
def test_the_host_does_not_wait_for_a_gpus_loss() -> None:
    check = LossCheck()
    one, nan = torch.ones((), device="cuda"), NAN.cuda()
    check.add(one, 0)  # the first one allocates pinned memory, which may wait
    assert check.rest() is None
    torch.cuda._sleep(1_000_000_000)
    assert check.add(nan, 1) is None
    assert check.add(one, 1) is None
    assert not torch.cuda.current_stream().query()
    wrong = check.rest()
    assert wrong is not None and math.isnan(wrong)


def test_losses_that_layers_add_are_means_over_microbatches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core.transformer import multi_token_prediction
    from megatron.core.transformer.moe import moe_utils

    told: dict[str, Any] = {}

    def of_experts(*, total_loss_dict: dict[str, torch.Tensor], **given: Any) -> None:
        told.update(given)
        total_loss_dict["load_balancing_loss"] = SHARED

    def further(scale: float, iteration: int, *, total_loss_dict: Any, **_: Any) -> None:
        total_loss_dict["mtp_1 loss"] = torch.tensor(scale)

    monkeypatch.setattr(moe_utils, "track_moe_metrics", of_experts)
    helper = SimpleNamespace(track_mtp_metrics=further)
    monkeypatch.setattr(multi_token_prediction, "MTPLossLoggingHelper", helper)
    SHARED = torch.tensor(3.0)
    args = argparse.Namespace(
        num_experts=4, num_layers=6, mtp_num_layers=2, moe_z_loss_coeff=0.1,
        moe_router_load_balancing_type=["seq_aux_loss", "none", "global_aux_loss"],
        moe_layer_freq=[0, 1, 0, 1, 0, 1],
    )  # fmt: skip
    found = losses.added_losses(args, 8)
    assert found["mtp_1 loss"].item() == 1 / 8
    assert told == {
        "loss_scale": 1 / 8, "iteration": 0, "force_initialize": True, "num_layers": 8,
        "moe_layer_freq": [0, 1, 0, 1, 0, 1], "mtp_num_layers": 2,
        "track_names": ["seq_load_balancing_loss", "global_load_balancing_loss", "z_loss"],
    }  # fmt: skip
    for coefficient, kept in ((0.0, True), (None, False)):
        args.moe_z_loss_coeff = coefficient
        losses.added_losses(args, 8)
        assert ("z_loss" in told["track_names"]) is kept
    SHARED.zero_()  # megatron-core clears its tensors for the next step
    assert found["load_balancing_loss"].item() == 3.0
    args = argparse.Namespace(num_experts=None, mtp_num_layers=None)
    assert losses.added_losses(args, 8) == {}
