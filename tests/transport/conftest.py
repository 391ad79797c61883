"""No test of this folder meets a real network card."""

from __future__ import annotations

import shutil

import pytest

from tests.transport.kinds import fake_verbs


@pytest.fixture(scope="session", autouse=True)
def double_of_libibverbs() -> None:
    """Loads the double before the first test: the first library of that name stays, and a test that
    only looks for cards loads one too. Tests that need the double skip where there is no compiler.
    """
    if shutil.which("g++") is not None:
        fake_verbs()
