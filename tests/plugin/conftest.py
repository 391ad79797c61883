"""The unpacked versions of Megatron-LM, shared by the tests of a session, and spies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from megatron.dpp import plugin
from megatron.dpp.runtime.dynamic import DppSchedule
from tests.plugin.hosts import Hosts


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Hosts:
    return Hosts(tmp_path_factory.mktemp("megatron-lm"))


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    plugin.uninstall()


@pytest.fixture
def dynamic_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keywords that the dynamic schedule was called with."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(
        DppSchedule, "__call__", lambda self, **given: calls.append(given) or ["dynamic"]
    )
    return calls


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Sizes and packed rows that were announced to the dynamic schedule."""
    found: list[Any] = []
    monkeypatch.setattr(
        DppSchedule, "announce", lambda self, sizes, rows=(): found.append((sizes, rows))
    )
    return found


@pytest.fixture
def static_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Sizes and keywords of the calls of megatron-core's own schedules."""
    calls: list[tuple[Any, ...]] = []

    def fetch(pp_size: Any = None, vp_size: Any = None, schedule_pg_collection: Any = None) -> Any:
        return lambda **given: calls.append((pp_size, vp_size, given)) or ["static"]

    from megatron.core import pipeline_parallel
    from megatron.core.pipeline_parallel import schedules

    monkeypatch.setattr(schedules, "get_forward_backward_func", fetch)
    monkeypatch.setattr(pipeline_parallel, "get_forward_backward_func", fetch)
    return calls
