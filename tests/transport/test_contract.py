"""The common part of transports: deadlines of a flush, and whose fault a late message is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from megatron.dpp.errors import PeerDead, TransferTimeout
from megatron.dpp.transport import ChannelSpec, Direction, base
from megatron.dpp.transport.base import Transport

FORWARD = ChannelSpec(0, 1, 0, Direction.FORWARD, 64, 2)
BACKWARD = ChannelSpec(1, 0, 0, Direction.BACKWARD, 64, 1)


class Scripted(Transport):
    """``left``: pending puts, by time; ``waits``: how long it was asked to sleep."""

    def __init__(self, left: Callable[[float], int], naps: float = 100.0) -> None:
        self.rank, self.incoming, self.outgoing = 0, [BACKWARD], [FORWARD]
        self.left, self.naps = left, naps
        self.time = 50.0
        self.waits: list[float] = []
        self.calls: list[str] = []
        self.gone: set[int] = set()

    def now(self) -> float:
        return self.time

    def put(self, channel: int, tensor: torch.Tensor, **labels: Any) -> None:
        raise AssertionError

    def poll(self) -> Sequence[int]:
        self.calls.append("poll")
        return [0]

    def take(self, channel: int) -> Any:
        raise AssertionError

    def wait(self, seconds: float) -> bool:
        assert self.calls[-1] != "wait", "a change before the poll would be slept over"
        self.calls.append("wait")
        self.waits.append(seconds)
        assert len(self.waits) < 100, "it waits for ever"
        self.time += min(seconds, self.naps)
        return True

    def pending(self) -> int:
        assert self.calls[-1] == "poll", "a change between the two would be slept over"
        return self.left(self.time - 50.0)

    def pending_bytes(self) -> int:
        return 0

    def links(self) -> Sequence[Any]:
        return []

    def departed(self, peer: int) -> bool:
        return peer in self.gone

    def abort(self, reason: str) -> None:
        self.calls.append(f"abort {reason}")

    def close(self) -> None:
        self.calls.append("close")


def test_a_flush_ends_where_no_put_has_left_for_its_time() -> None:
    stuck = Scripted(lambda now: 2)
    with pytest.raises(TransferTimeout, match="rank 0: 2 puts are pending, and none left for 3 s"):
        stuck.flush(3.0)
    assert stuck.waits == [3.0]


def test_every_put_that_leaves_gives_a_flush_its_time_again() -> None:
    leaving = Scripted(lambda now: 3 - int(now / 2.0), naps=2.0)
    leaving.flush(2.5)
    assert leaving.waits == [2.5] * 3
    stops = Scripted(lambda now: 3 if now < 2.0 else 2, naps=1.0)
    with pytest.raises(TransferTimeout, match="2 puts"):
        stops.flush(2.5)
    assert stops.waits == [2.5, 1.5, 2.5, 1.5, 0.5]
    comes_back = Scripted(lambda now: 1 if now < 2.0 else 2, naps=1.0)
    with pytest.raises(TransferTimeout, match="2 puts"):
        comes_back.flush(2.5)  # another put is no progress
    assert comes_back.waits == [2.5, 1.5, 0.5]
    Scripted(lambda now: 0).flush(0.0)


def test_a_late_message_is_its_senders() -> None:
    one = Scripted(lambda now: 0)
    text = "rank 0: microbatch 4 of iteration 9 (backward of chunk 0, rank 1 -> 0) has not arrived"
    late = one.overdue(0, 1.5, iteration=9, microbatch=4)
    assert type(late) is TransferTimeout and str(late).startswith(f"{text} after 1.5 s; rank 1 is")
    one.gone = {0}
    assert type(one.overdue(0, 1.5, iteration=9, microbatch=4)) is TransferTimeout
    one.gone = {1}
    late = one.overdue(0, 1.5, iteration=9, microbatch=4)
    assert type(late) is PeerDead and "rank 1 has closed its transport" in str(late)


def test_a_failure_that_shows_in_a_second_explains_another(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = Scripted(lambda now: 0, naps=0.05)
    monkeypatch.setattr(base.time, "monotonic", lambda: quiet.time)
    quiet.raise_failure()
    assert len(quiet.waits) in (20, 21) and set(quiet.waits) == {0.05}
    fails = Scripted(lambda now: 0, naps=0.05)
    monkeypatch.setattr(base.time, "monotonic", lambda: fails.time)

    def poll() -> Sequence[int]:
        if len(fails.waits) == 3:
            raise PeerDead("rank 1 died")
        fails.calls.append("poll")
        return [0]

    monkeypatch.setattr(fails, "poll", poll)
    with pytest.raises(PeerDead, match="rank 1 died"):
        fails.raise_failure()


def test_a_block_that_fails_gives_up_before_it_closes() -> None:
    one = Scripted(lambda now: 0)
    with one as entered:
        assert entered is one
    assert one.calls == ["close"]
    one.calls.clear()
    with pytest.raises(KeyError), one:
        raise KeyError("x")
    assert one.calls == ["abort KeyError: 'x'", "close"]
