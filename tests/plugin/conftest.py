"""The unpacked versions of Megatron-LM, shared by the tests of a session."""

from __future__ import annotations

import pytest

from tests.plugin.hosts import Hosts


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Hosts:
    return Hosts(tmp_path_factory.mktemp("megatron-lm"))
