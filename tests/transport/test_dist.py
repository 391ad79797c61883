"""The order in which a peer's channels end, over gloo."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron.dpp.transport.kinds import dist
from megatron.dpp.transport.kinds.dist import DistTransport
from tests.transport.kinds import PATIENCE, close_and_wait, opened, pair, take_next


@pytest.fixture(autouse=True)
def close_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that closes alone waits this long for its peers to do so."""
    monkeypatch.setattr(dist, "_CLOSE_SECONDS", 0.5)


class HeldBack:
    """A group whose sends wait until they are let go."""

    def __init__(self, group: Any) -> None:
        self.group, self.let_go = group, threading.Event()

    def send(self, *given: Any) -> Any:
        assert self.let_go.wait(PATIENCE)
        return self.group.send(*given)


def hold_back(sender: DistTransport, channel: int) -> HeldBack:
    held = HeldBack(sender._outgoing[channel]._group)
    sender._outgoing[channel]._group = held
    return held


def pair_of(transports: Sequence[Any]) -> tuple[DistTransport, DistTransport]:
    a, b = transports
    return a, b


def test_the_end_of_one_channel_is_not_the_end_of_another() -> None:
    with opened("dist", pair()) as transports:
        a, b = pair_of(transports)
        held = hold_back(a, 0)
        a.put(0, torch.full((3,), 7.0), iteration=0, microbatch=0)
        closer = threading.Thread(target=a.close)
        closer.start()
        b._incoming[1].thread.join(PATIENCE)  # it ends with its channel
        assert not b._incoming[1].thread.is_alive()
        assert not b.departed(0), "a message is still under way"
        held.let_go.set()
        assert bool((take_next(b, 0, 0).tensor == 7).all())
        closer.join(PATIENCE)
        close_and_wait(a, b)


def test_what_came_before_the_end_may_be_taken_after_it() -> None:
    with opened("dist", pair()) as transports:
        a, b = pair_of(transports)
        for channel in range(2):
            a.put(channel, torch.full((3,), float(channel)), iteration=0, microbatch=0)
        a.flush(PATIENCE)
        close_and_wait(a, b)
        assert list(b.poll()) == [1, 1]
        for channel in range(2):
            assert bool((b.take(channel).tensor == channel).all())


def test_a_link_that_breaks_behind_an_end_is_no_failure() -> None:
    with opened("dist", pair()) as transports:
        a, b = pair_of(transports)
        held = hold_back(a, 0)
        b.note_end(b.incoming[1])
        b.fail_link(b.incoming[0], RuntimeError("connection closed by peer"))
        assert b.departed(0)
        b.poll()
        held.let_go.set()
