"""The values that the ranks of a model agree on at the end of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.train import exits, loop

NORM = torch.tensor(2.5, dtype=torch.float64)


@pytest.mark.parametrize(
    ("num_ranks", "values", "expected", "num_collectives"),
    [
        (1, (1.0, None), [1.0, None], 0),
        (1, (0.0, NORM), [0.0, 2.5], 1),
        (2, (0.0, NORM), [1.0, 2.5], 1),
        (2, (0.0, None), [1.0, 2.0], 1),
    ],
)
def test_the_largest_of_each_value_wherever_it_is(
    num_ranks: int,
    values: tuple[Any, ...],
    expected: list[float | None],
    num_collectives: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The norm is read once, with the other values. A single rank does not read the device."""
    asked: list[torch.Tensor] = []

    def with_another_rank(whole: torch.Tensor, op: Any, group: Any) -> None:
        asked.append(whole)
        assert op == torch.distributed.ReduceOp.MAX
        if group.size() > 1:
            whole.copy_(torch.maximum(whole, whole.new_tensor([1.0, 2.0])))

    group = SimpleNamespace(size=lambda: num_ranks)
    monkeypatch.setattr(loop.mpu, "get_model_parallel_group", lambda: group)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(loop.dist, "all_reduce", with_another_rank)
    assert loop._largest(*values) == expected
    assert len(asked) == num_collectives


@pytest.mark.parametrize(
    ("iteration", "minutes", "elsewhere", "reason"),
    [
        (6, 1.9, 0, None),
        (8, 0.0, 0, "--exit-interval 4"),
        (6, 2.1, 0, "2.1 minutes have passed (--exit-duration-in-mins)"),
        (6, 1.9, 1, "1.9 minutes have passed (--exit-duration-in-mins)"),
    ],
)
def test_a_run_ends_at_an_interval_and_when_its_time_is_up_on_any_rank(
    iteration: int, minutes: float, elsewhere: int, reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    args = SimpleNamespace(exit_signal_handler=False, exit_duration_in_mins=2, exit_interval=4)
    monkeypatch.setattr(exits, "time", SimpleNamespace(time=lambda: 1000.0 + 60.0 * minutes))
    monkeypatch.setattr(exits, "largest", lambda values: [max(*values, elsewhere)])
    ends = exits.ExitConditions(SimpleNamespace(args=args, start_time=1000.0))  # type: ignore[arg-type]
    assert ends.reason(iteration) == reason
