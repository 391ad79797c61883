"""No test of this folder meets a real network card: a double of libibverbs fails on demand."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.netns import Hosts, two_hosts
from tests.transport.kinds import fake_verbs, load_fake_verbs

Trouble = Callable[[str, int], None]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Loads the double before any test where tests of this folder will run: the first library of
    that name stays, and in tests of other folders NCCL loads the real one.
    """
    folder = Path(__file__).parent
    files = {item.path for item in session.items}
    if shutil.which("g++") and any(folder in path.parents for path in files):
        load_fake_verbs()


@pytest.fixture(scope="session", autouse=True)
def double_of_libibverbs() -> None:
    """Fails each test that would meet another library. Tests that need the double skip where there
    is no compiler.
    """
    if shutil.which("g++") is not None:
        fake_verbs()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


@pytest.fixture
def trouble() -> Iterator[Trouble]:
    """Asks the double for a fault."""
    fake = fake_verbs()

    def ask(name: str, value: int) -> None:
        fake.fake_verbs_set(name.encode(), value)

    yield ask
    ask("reset", 0)
