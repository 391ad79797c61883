"""A run ends at its intervals, when its time is up, and on a signal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.dpp_train import exits


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
    monkeypatch.setattr(exits, "time", SimpleNamespace(monotonic=lambda: 1000.0 + 60.0 * minutes))
    monkeypatch.setattr(exits, "largest", lambda values: [max(*values, elsewhere)])
    ends = exits.ExitConditions(SimpleNamespace(args=args, started=1000.0))  # type: ignore[arg-type]
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
    assert callable(signal.getsignal(signal.SIGTERM)), "the run's own"
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
