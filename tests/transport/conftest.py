"""No test of this folder meets a real network card: a double of libibverbs fails on demand."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest

from tests.transport.kinds import fake_verbs

Trouble = Callable[[str, int], None]


@pytest.fixture(scope="session", autouse=True)
def double_of_libibverbs() -> None:
    """Loads the double before the first test: the first library of that name stays, and a test that
    only looks for cards loads one too. Tests that need the double skip where there is no compiler.
    """
    if shutil.which("g++") is not None:
        fake_verbs()


@pytest.fixture
def trouble() -> Iterator[Trouble]:
    """Asks the double for a fault."""
    fake = fake_verbs()

    def ask(name: str, value: int) -> None:
        fake.fake_verbs_set(name.encode(), value)

    yield ask
    ask("reset", 0)
