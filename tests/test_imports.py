"""Holds the table of docs/architecture.md: which package may import which, and what is public."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron.dpp

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron" / "dpp"

# A package may import itself and these. train plugs everything together and is not restricted.
MAY_IMPORT = {
    "errors": set(),
    "config": {"errors"},
    "hosts": {"errors"},
    "schedule": {"config", "errors"},
    "trace": {"config", "errors", "schedule"},
    "sim": {"config", "errors", "schedule", "trace"},
    "estimate": {"config", "errors", "schedule", "sim", "train"},
    "launch": {"config", "errors", "estimate", "schedule", "sim", "train"},
    "transport": {"config", "errors", "hosts", "trace"},
    "mcore": {"config", "errors", "trace", "transport"},
    "runtime": {"config", "errors", "hosts", "schedule", "transport", "trace", "mcore"},
}
WITHOUT_TORCH = {"errors", "config", "hosts", "schedule", "sim", "estimate", "launch"}
PUBLIC = {
    "Action",
    "ConfigError",
    "DataError",
    "DppConfig",
    "DppError",
    "DppSchedule",
    "Geometry",
    "Kind",
    "ScheduleError",
    "Scheduler",
    "TransportError",
    "__version__",
    "open_recorder",
    "open_transport",
}


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def files_of(room: str) -> list[Path]:
    folder = PACKAGE / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{room}.py"]


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_package_imports_only_what_the_table_allows(room: str) -> None:
    files = files_of(room)
    assert files
    allowed = MAY_IMPORT[room] | {room}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files
        for line, name in imports_of(path)
        if name.startswith("megatron.dpp.") and name.split(".")[2] not in allowed
    ]
    assert not wrong


@pytest.mark.parametrize("room", sorted(WITHOUT_TORCH))
def test_schedules_and_simulator_do_without_torch(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files_of(room)
        for line, name in imports_of(path)
        if name.split(".")[0] == "torch" or name.startswith("megatron.core")
    ]
    assert not wrong


def test_only_mcore_knows_megatron_cores_private_names() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != "mcore"
        for line, name in imports_of(path)
        if name.startswith("megatron.core") and any(p.startswith("_") for p in name.split("."))
    ]
    assert not wrong


def test_importing_the_front_door_loads_no_torch() -> None:
    code = (
        "import sys, megatron.dpp, megatron.dpp.schedule, megatron.dpp.sim; "
        "sys.exit('torch' in sys.modules or 'megatron.core' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_public_names_are_these_and_exist() -> None:
    assert set(megatron.dpp.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(megatron.dpp, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        megatron.dpp.nonsense  # noqa: B018


def test_megatron_stays_a_namespace_package() -> None:
    assert not (ROOT / "megatron" / "__init__.py").exists()
    for folder in ("tools", "profiling"):
        assert not (ROOT / folder / "__init__.py").exists()
    assert importlib.import_module("megatron.core.parallel_state")
