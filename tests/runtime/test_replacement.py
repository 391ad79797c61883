"""What leaving a schedule by an error says, over the fake network."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.dpp.errors import PeerDead
from megatron.dpp.runtime.replacement import Replacement
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.transport.base import Transport
from megatron.dpp.transport.fake import FakeNetwork


class Opened(Replacement):
    """Rank 0 of two; a call or an optimizer after it fails as ``network`` does."""

    injected_seconds = 0.0

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.network = FakeNetwork(list(Topology((0, 1), 0, 1).channels([64], [64], 2).specs))
        self._transport = self.network.transport(0)
        self.peer = self.network.transport(1)
        self.closed = False

    def __call__(self, **keywords: Any) -> list[Any]:
        return []

    def close(self) -> None:
        self.closed = True

    def _links(self) -> Transport:
        return self._transport


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.dpp.transport.base._BLAME_SECONDS", 0.01)


def test_a_collective_that_fails_as_a_rank_died_names_the_rank() -> None:
    with pytest.raises(PeerDead, match="rank 1 died"), Opened() as schedule:
        schedule()
        schedule.network.kill(1)
        raise RuntimeError("Connection reset by peer")  # gloo, in the optimizer
    assert schedule.closed


def test_an_error_that_no_link_explains_is_kept() -> None:
    with pytest.raises(RuntimeError, match="Connection reset"), Opened() as schedule:
        raise RuntimeError("Connection reset by peer")
    assert schedule.closed


def test_an_error_of_our_own_is_not_replaced() -> None:
    with pytest.raises(KeyError), Opened() as schedule:
        schedule.network.kill(1)
        raise KeyError("attention_mask")
    assert schedule.closed
