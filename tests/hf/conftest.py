"""Models that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hf import tiny


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a family's model, made once."""
    root = tmp_path_factory.mktemp("models")

    def find_or_make(family: str) -> Path:
        folder = root / family
        return folder if folder.is_dir() else tiny.make(family, folder)

    return find_or_make
