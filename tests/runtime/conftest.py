"""A clock that the tests of the executor share."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from megatron.dpp.transport.fake import VirtualClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """The executor's clock, and that of a network with ``stepping``."""
    made = VirtualClock()
    made.advance_to(1000.0)
    fake = SimpleNamespace(
        monotonic_ns=lambda: int(made.now() * 1e9), perf_counter_ns=time.perf_counter_ns
    )
    monkeypatch.setattr("megatron.dpp.runtime.executor.time", fake)
    return made
