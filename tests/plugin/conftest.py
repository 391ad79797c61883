"""The unpacked versions of Megatron-LM, shared by the tests of a session, and a spy."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.dpp.runtime.dynamic import DppSchedule
from tests.plugin.hosts import Hosts


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Hosts:
    return Hosts(tmp_path_factory.mktemp("megatron-lm"))


@pytest.fixture
def dynamic_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keywords that the dynamic schedule was called with."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(
        DppSchedule, "__call__", lambda self, **given: calls.append(given) or ["dynamic"]
    )
    return calls
