"""Fixtures of all tests of data."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core warns where it finds no rank, which torchrun sets."""
    monkeypatch.setenv("RANK", "0")
