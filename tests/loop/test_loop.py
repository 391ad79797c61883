"""The values that the ranks of a model agree on at the end of a step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp_train import exits
from megatron.dpp_train.loop import loop

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


@pytest.fixture
def term() -> Iterator[None]:
    """Gives SIGTERM its handler and this thread its mask back."""
    handler, mask = signal.getsignal(signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    signal.signal(signal.SIGTERM, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.mark.usefixtures("term")
@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_signal_to_any_rank_ends_all_of_them(
    here: bool, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank alone would wait without end for the others in its save."""
    asked: list[int] = []

    def over_all_ranks(values: list[int]) -> list[int]:
        asked.extend(values)
        return [max(*values, elsewhere)]

    monkeypatch.setattr(exits, "largest", over_all_ranks)
    args = SimpleNamespace(exit_signal_handler=True, exit_duration_in_mins=None, exit_interval=None)
    ends = exits.ExitConditions(SimpleNamespace(args=args))  # type: ignore[arg-type]
    if here:
        signal.raise_signal(signal.SIGTERM)
    assert ends.reason(1) == ("a rank received SIGTERM" if here or elsewhere else None)
    assert asked == [here], "every rank takes part in the collective"


@pytest.mark.usefixtures("term")
def test_a_handler_of_sigterm_is_given_back_once() -> None:
    run: Any = SimpleNamespace(args=SimpleNamespace(exit_signal_handler=True))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ends = exits.ExitConditions(run)
    assert signal.getsignal(signal.SIGTERM) == ends._note
    ends.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of who comes after
    ends.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


@pytest.mark.usefixtures("term")
@pytest.mark.parametrize("before", [signal.SIG_BLOCK, signal.SIG_UNBLOCK])
def test_a_mask_is_what_it_was_after_a_save(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits.resource_tracker, "ensure_running", lambda: None)
    signal.pthread_sigmask(before, {signal.SIGTERM})
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with exits.sigterm_held_back():
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
