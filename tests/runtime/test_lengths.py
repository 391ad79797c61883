"""The executor with microbatches of unlike length: learning sizes, and the bound of evaluations."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.config import Backward, DppConfig
from megatron.dpp.core.boundary import TokenCounter
from megatron.dpp.runtime.decisions import Decisions
from megatron.dpp.runtime.executor import Iteration
from megatron.dpp.runtime.mail import Tensors
from megatron.dpp.runtime.prepared import Prepared
from megatron.dpp.schedule import Geometry, Scheduler
from tests.fake_network import FakeTransport
from tests.runtime import pipelines
from tests.runtime.pipelines import Arithmetic, check_values, run_pipeline

LENGTHS = [1, 9, 2, 16, 3, 3, 12, 1, 5, 2] * 6
LONGEST = max(LENGTHS)


class Drawn(Arithmetic):
    """A runner whose tensors have as many elements as their microbatch has tokens."""

    def _sizes(self) -> list[int]:
        return [4 * LENGTHS[self.log[-1][2]]]

    def same(self, received: Tensors | None, sizes: Any) -> torch.Tensor | None:
        return super().same(received, self._sizes())

    def spread(self, tensor: torch.Tensor, sizes: Any) -> Tensors:
        return super().spread(tensor, self._sizes())


@pytest.fixture
def schedulers(monkeypatch: pytest.MonkeyPatch) -> list[Scheduler]:
    """Pipelines of drawn lengths; returns the schedulers of their ranks."""
    made: list[Scheduler] = []

    def scheduler(*given: Any, **options: Any) -> Scheduler:
        made.append(Scheduler(*given, largest=LONGEST, **options))
        return made[-1]

    iteration = partial(Iteration, count_tokens=torch.Tensor.numel)
    monkeypatch.setattr(pipelines, "Scheduler", scheduler)
    monkeypatch.setattr(pipelines, "Iteration", iteration)
    monkeypatch.setattr(pipelines, "Arithmetic", Drawn)
    return made


@pytest.mark.parametrize(("p", "v", "members"), [(3, 1, 1), (2, 2, 1), (2, 2, 2)])
@pytest.mark.parametrize("policy", ["dynamic", "megatron"])
def test_all_ranks_learn_all_sizes(
    schedulers: list[Scheduler], p: int, v: int, members: int, policy: str
) -> None:
    """Members of a stage, too: a follower checks its leader's choices by sizes of its own."""
    sizes = [[4 * LONGEST]] * p
    runners = run_pipeline(
        p, v, 10, policy=policy, cap="strict", delay=0.002, members=members, sizes=sizes
    )
    check_values(runners, 10)
    assert len(schedulers) == p * members
    assert all(one.sizes.known == LENGTHS[:10] and one.held == 0 for one in schedulers)


def test_an_evaluation_is_bounded_by_tokens(
    schedulers: list[Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many short outputs may wait, or few long ones, and one message always."""
    pending: list[tuple[int, int]] = []
    put = FakeTransport.put

    def watched(own: FakeTransport, *given: Any, **options: Any) -> None:
        put(own, *given, **options)
        pending.append((own.pending(), own.pending_bytes()))

    monkeypatch.setattr(FakeTransport, "put", watched)
    monkeypatch.setattr("megatron.dpp.runtime.mail.MOST_PENDING", 4)
    runners = run_pipeline(
        2, 1, 60, policy="depth-first", split=False, forward_only=True, late=0.003,
        sizes=[[4 * LONGEST]] * 2,
    )  # fmt: skip
    assert all(len(runner.log) == 60 for runner in runners)
    largest_mean = max(sum(LENGTHS[:n]) / n for n in range(1, 61))
    assert max(number for number, _ in pending) > 4 + 1
    assert max(size for _, size in pending) <= 4 * (4 * largest_mean + LONGEST)


def test_tokens_of_a_boundary() -> None:
    tokens = TokenCounter(largest=32, hidden=8)
    assert tokens.count(torch.zeros(5, 2, 8)) == 10
    assert tokens.count(torch.zeros(6, 8)) == 6
    for other in (torch.zeros(5, 2, 4), torch.zeros(8)):
        assert tokens.count(other) is None, "no hidden states"
    assert tokens.count(torch.zeros([])) is None, "a loss"
    assert tokens.count([torch.zeros(5, 2, 8)]) is None
    assert TokenCounter(largest=32, hidden=0).count(torch.zeros(5, 2, 8)) is None
    assert TokenCounter(largest=8, hidden=8, parts=4).of_rank([16, 32]) == [4, 8]
    assert TokenCounter(largest=8, hidden=0, parts=4).of_rank([16, 32]) is None


def test_a_measured_activation_is_scaled_to_the_longest() -> None:
    """The first step measures microbatch 0; a cap in bytes counts activations of the longest."""
    stage: Any = SimpleNamespace(
        activation_bytes={0: 100.0, 1: 300.0}, deferred_bytes={0: 50.0}, runs_head_in_forward=False
    )
    decisions = Decisions(DppConfig(activation_cap="12KiB"), lambda line: None)
    session = SimpleNamespace(decisions=decisions, largest=lambda call, *values: list(values))
    sessions: Any = SimpleNamespace(current=session)
    call: Any = None
    Prepared(DppConfig(), sessions, print, print).account(call, 8 / 2, stage)
    assert decisions.activation_bytes == 4 * 300.0
    geometry = Geometry(2, 0, 2, 4)
    assert (
        decisions.scheduler(geometry, backward=Backward(), largest=8).view.cap == 12 * 1024 / 1200
    )
