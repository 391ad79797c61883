"""The list of tested versions is that of the requirements."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import lock
import pytest
from packaging.version import Version

pytestmark = pytest.mark.skipif(
    lock.locked()["megatron-core"] != Version(metadata.version("megatron-core")),
    reason="the list is that of another Python",
)


def test_the_file_has_all_that_the_requirements_need() -> None:
    assert not lock.problems()


def test_what_is_missing_or_not_allowed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = lock.LOCK.read_text().splitlines()
    kept = ["ruff==0.0.1" if line.startswith("ruff==") else line for line in lines]
    path = tmp_path / "requirements-lock.txt"
    path.write_text("\n".join(line for line in kept if not line.startswith("sympy==")))
    monkeypatch.setattr(lock, "LOCK", path)
    missing, other = lock.problems()
    assert missing.startswith("sympy ") and missing.endswith(" has no line")
    assert other.startswith("ruff is 0.0.1, requirements-dev.txt asks for ==")
