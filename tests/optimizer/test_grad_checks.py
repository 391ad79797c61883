"""Gradients that are not finite end their step, though the host does not wait for each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

from megatron.dpp.errors import DppError
from megatron.dpp_train.model.losses import check_step
from megatron.dpp_train.optimizer.grad_checks import GradientChecks
from megatron.dpp_train.state import LossCheck

FINE, NAN = torch.ones(8), torch.full((8,), float("nan"))


def group(*buckets: torch.Tensor) -> Any:
    made = Group.__new__(Group)
    made.buckets = [SimpleNamespace(grad_data=each) for each in buckets]
    return made


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Whom megatron-core's own check looked at."""
    seen: list[Any] = []

    def check_grads(self: Any, check_for_nan_or_inf: bool, check_for_large: bool) -> None:
        seen.append(self)

    monkeypatch.setattr(Group, "check_grads", check_grads)
    return seen


def test_a_bucket_that_is_not_finite_ends_the_step_when_it_is_launched(own: list[Any]) -> None:
    checks = GradientChecks()
    with checks.late():
        group(FINE).check_grads(True, False)
        group(FINE, NAN).check_grads(True, False)
    run: Any = SimpleNamespace(iteration=4, rank=2, loss_check=LossCheck())
    with pytest.raises(DppError, match="iteration 5: the gradients on rank 2 have a norm of nan in "
                       "bucket 1; lower --lr"):  # fmt: skip
        check_step(run, checks)
    check_step(run, checks)  # nothing is left of it
    assert not own


def test_a_step_that_was_broken_off_leaves_nothing(own: list[Any]) -> None:
    checks = GradientChecks()
    with checks.late():
        group(NAN).check_grads(True, False)
    with checks.late():
        pass
    assert checks.read() is None
    group(NAN).check_grads(True, False)
    assert len(own) == 1  # outside of a step it is megatron-core's


def test_gradients_that_are_compared_with_earlier_ones_are_megatron_cores(own: list[Any]) -> None:
    checks = GradientChecks()
    with checks.late():
        group(NAN).check_grads(True, True)
    assert len(own) == 1 and checks.read() is None


@pytest.mark.gpu
def test_the_host_does_not_wait_for_a_gpus_gradients() -> None:
    checks, fine, nan = GradientChecks(), FINE.cuda(), NAN.cuda()
    for _ in range(2):  # the first one allocates pinned memory, which may wait
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)
        with checks.late():
            group(fine, nan).check_grads(True, False)
        is_over = torch.cuda.current_stream().query()
    assert not is_over
    assert checks.read() == "nan in bucket 1"
