"""A clock that the tests of the executor share, and a chunk for those of graphs."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from tests.fake_network import VirtualClock
from tests.runtime.graphed import Chunk


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """The clock of gaps and deadlines, and that of a network with ``stepping``."""
    made = VirtualClock()
    made.advance_to(1000.0)
    fake = SimpleNamespace(monotonic=made.now, perf_counter_ns=time.perf_counter_ns)
    for name in ("executor", "gaps"):
        monkeypatch.setattr(f"megatron.dpp.runtime.{name}.time", fake)
    return made


@pytest.fixture
def captured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk is captured in its first step."""
    monkeypatch.setattr("megatron.dpp.core.graphs.slots.why_not_captured", lambda chunk: None)
    monkeypatch.setattr("megatron.dpp.core.graphs.slots.WARM_UP_STEPS", 0)


@pytest.fixture
def chunk() -> Chunk:
    return Chunk()
