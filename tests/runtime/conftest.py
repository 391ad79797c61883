"""A clock that the tests of the executor share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.fake_network import VirtualClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """The clock of gaps and deadlines, and that of a network with ``stepping``."""
    made = VirtualClock()
    made.advance_to(1000.0)
    fake = SimpleNamespace(monotonic_ns=lambda: int(made.now() * 1e9))
    monkeypatch.setattr("megatron.dpp.runtime.gaps.time", fake)
    return made
