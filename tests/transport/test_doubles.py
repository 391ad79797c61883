"""The doubles of system libraries, which must be loaded before those."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.transport import conftest

HERE = Path(__file__)


@pytest.mark.parametrize(
    ("files", "loads"),
    [([HERE.parents[1] / "runtime" / "test_one.py", HERE], 1),
     ([HERE.parent / "deeper" / "test_one.py"], 1),
     ([HERE.parents[1] / "runtime" / "test_one.py"], 0), ([], 0)],
    ids=["after others", "deeper", "others alone", "none"],
)  # fmt: skip
def test_the_double_of_libibverbs_is_loaded_before_tests_of_other_folders_load_the_library(
    files: list[Path], loads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[bool] = []
    monkeypatch.setattr(conftest, "load_fake_verbs", lambda: loaded.append(True))
    monkeypatch.setattr(conftest.shutil, "which", lambda name: name)
    session: Any = SimpleNamespace(items=[SimpleNamespace(path=path) for path in files])
    conftest.pytest_collection_finish(session)
    assert len(loaded) == loads


def test_no_compiler_no_double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "load_fake_verbs", lambda: pytest.fail("it was built"))
    monkeypatch.setattr(conftest.shutil, "which", lambda name: None)
    session: Any = SimpleNamespace(items=[SimpleNamespace(path=HERE)])
    conftest.pytest_collection_finish(session)
