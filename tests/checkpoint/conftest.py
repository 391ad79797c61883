"""One rank, and small runs of it that save and load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint import shards
from tests.checkpoint.small import Job


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    with shards.alone():
        yield


@pytest.fixture
def job(one_rank: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Job:
    """A run that saves into, and loads from, ``tmp_path``."""
    return Job(monkeypatch, tmp_path)
