"""What is reported is not what megatron-core goes on to change."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest
import torch

from megatron.dpp.errors import DppError
from megatron.dpp.train.bert import bert_loss
from megatron.dpp.train.gpt import language_model_loss
from megatron.dpp.train.losses import checked

RUN = SimpleNamespace(
    args=argparse.Namespace(check_for_nan_in_loss_and_grad=True), iteration=0, rank=0
)


@pytest.mark.parametrize("with_head", [False, True])
def test_berts_report_survives_the_division_by_microbatches(with_head: bool) -> None:
    logits = torch.zeros(2, 2) if with_head else None
    output = (torch.tensor([[1.0, 3.0], [5.0, 7.0]]), logits)
    mask = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    loss, report = bert_loss(RUN, mask, torch.tensor([0, 1]), output)
    loss /= 8  # as megatron-core's forward_step does
    assert report["lm loss"].item() == 3.0
    assert ("sop loss" in report) is with_head


def test_gpts_report_survives_it() -> None:
    loss, count, report = language_model_loss(RUN, torch.ones(1, 2), torch.tensor([[1.0, 3.0]]))
    loss /= 8
    assert (count.item(), report["lm loss"].tolist()) == (2, [4.0, 2.0])


def test_a_loss_that_is_not_finite_stops_training_but_no_evaluation() -> None:
    nan = torch.tensor(float("nan"))
    assert checked(RUN, nan) is nan
    with pytest.raises(DppError, match="iteration 1: the loss on rank 0 is nan"):
        checked(RUN, nan.clone().requires_grad_())
