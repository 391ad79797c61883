"""Holds the table of docs/architecture.md: which package may import which, and what is public."""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import megatron.dpp
from megatron.dpp import trace
from tests.sources import ROOT, tree_of

PACKAGE = ROOT / "megatron" / "dpp"

# A room may import itself and the rooms named here, all of which stand above it in this table: so
# no arrow runs upwards.
MAY_IMPORT = {
    "errors": set(),
    "naming": {"errors"},
    "direction": set(),
    "config": {"errors"},
    "hosts": {"errors"},
    "safe_files": set(),
    "processes": set(),
    "locks": {"errors", "safe_files"},
    "text_files": {"errors", "safe_files"},
    "tokenizers": {"errors", "safe_files", "text_files"},
    "models": {"errors", "safe_files", "text_files"},
    "inject": {"errors"},
    "schedule": {"config", "direction", "errors", "safe_files"},
    "trace": {"config", "direction", "errors", "locks", "schedule", "safe_files"},
    "sim": {"config", "direction", "errors", "schedule", "trace", "safe_files"},
    "pictures": {"errors", "sim", "trace", "safe_files"},
    "plan": {"config", "errors", "naming", "schedule", "sim", "trace", "safe_files"},
    "transport": {"config", "direction", "errors", "hosts"},
    "mcore": {"config", "direction", "errors", "processes", "trace", "transport"},
    "runtime": {
        *("config", "direction", "errors", "hosts", "inject", "schedule", "trace"),
        *("transport", "mcore"),
    },
    "cli": {
        *("config", "errors", "locks", "text_files", "tokenizers", "schedule", "trace", "plan"),
        *("inject", "models", "naming", "safe_files"),
    },
    "convert": {"cli", "errors", "locks", "models", "safe_files", "text_files"},
    "launch": {
        *(
            "config",
            "errors",
            "models",
            "hosts",
            "locks",
            "processes",
            "safe_files",
            "text_files",
            "tokenizers",
            "schedule",
            "plan",
            "cli",
            "naming",
        ),
    },
    "train": {
        *("config", "errors", "locks", "text_files", "tokenizers", "schedule", "trace", "plan"),
        *("transport", "mcore", "runtime", "cli", "convert", "models"),
        *("naming", "processes", "safe_files"),
    },
    "inference": {"errors", "models", "plan", "mcore", "cli", "train"},
    "plugin": {"config", "errors", "mcore", "runtime", "schedule", "trace"},
    "commands": {
        *("config", "errors", "hosts", "text_files", "pictures", "tokenizers", "schedule"),
        *("trace", "sim"),
        *("plan", "transport", "mcore", "cli", "launch", "plugin", "convert", "models"),
        *("inference", "locks", "naming", "processes", "safe_files"),
    },
}
RECORDING = {
    *("clock", "host", "lines", "recorder", "scalars", "schema", "step_lengths", "vocabulary"),
    "writer",
}
"""The modules of ``trace`` that a training program loads. The others read what they wrote."""
ENGINE = {"transport", "mcore", "runtime", "plugin", "train"}
DOORS = {"__init__", "__main__", "doctor", "estimate", "run", "sim.__main__"}
"""Entry points, which may import any room."""
WITHOUT_TORCH = {
    *(
        "errors",
        "naming",
        "direction",
        "config",
        "hosts",
        "locks",
        "processes",
        "safe_files",
        "text_files",
        "tokenizers",
        "models",
        "inject",
        "pictures",
        "schedule",
    ),
    *("sim", "plan", "cli"),
    "launch",
}
PUBLIC = {
    "Action", "ConfigError", "DataError", "DppConfig", "DppError", "DppSchedule", "Geometry",
    "Kind", "ScheduleError", "Scheduler", "TransportError", "__version__", "open_recorder",
    "open_transport",
}  # fmt: skip


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that a file imports, wherever in the file."""
    yield from imports_of_nodes(ast.walk(tree_of(str(path))), path)


def imports_of_nodes(nodes: Iterable[ast.AST], path: Path) -> Iterator[tuple[int, str]]:
    """The same for some nodes of a file."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def module_of(path: Path) -> str:
    """``megatron/dpp/sim/clock.py`` -> ``sim.clock``."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def files_of(room: str) -> list[Path]:
    folder = PACKAGE / room
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{room}.py"]
    return [path for path in files if module_of(path) not in DOORS]


def test_every_room_is_in_the_table() -> None:
    rooms = {module_of(path).split(".")[0] for path in PACKAGE.rglob("*.py")}
    assert rooms - DOORS == set(MAY_IMPORT)


def test_no_arrow_of_the_table_runs_upwards() -> None:
    above: set[str] = set()
    for room, allowed in MAY_IMPORT.items():
        assert allowed <= above, room
        above.add(room)


def modules() -> dict[str, Path]:
    """Name below ``megatron.dpp`` -> file, packages by their own name."""
    return {module_of(path).removesuffix(".__init__"): path for path in PACKAGE.rglob("*.py")}


def arrows() -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports while it is imported itself."""
    known = modules()
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        tree = tree_of(str(path))
        names = [name for _, name in imports_of_nodes(top_level(tree), path)]
        below = [name.removeprefix("megatron.dpp.") for name in names if "megatron.dpp." in name]
        found[module] = {
            name if name in known else name.rpartition(".")[0] for name in below
        } & set(known)
    return found


def top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run at import: not those inside of functions or for type checkers."""
    for node in tree.body:
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node


def test_no_circle_of_modules() -> None:
    """Circles within a room count too. Prints the table of rooms."""
    below = arrows()
    for room, allowed in MAY_IMPORT.items():
        print(f"{room:<12} -> {', '.join(sorted(allowed))}")
    try:
        tuple(graphlib.TopologicalSorter(below).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_package_imports_only_what_the_table_allows(room: str) -> None:
    files = files_of(room)
    assert files
    allowed = MAY_IMPORT[room] | {room}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files
        for line, name in imports_of(path)
        if name.startswith("megatron.dpp.") and name.split(".")[2] in set(MAY_IMPORT) - allowed
    ]
    assert not wrong


def test_recording_imports_no_analysis() -> None:
    recording = {f"megatron.dpp.trace.{name}" for name in RECORDING}
    files = [PACKAGE / "trace" / f"{name}.py" for name in (*RECORDING, "__init__")]
    files += [path for room in ENGINE for path in files_of(room)]
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files
        for line, name in imports_of(path)
        if name.startswith(("megatron.dpp.trace.", "megatron.dpp.pictures"))
        and not any(f"{name}.".startswith(f"{each}.") for each in recording)
        and name.rpartition(".")[2] not in trace.__all__
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


def private_names_of_core(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of each private name of megatron-core that a file imports or reads."""
    tree = tree_of(str(path))
    core = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.core")
        for alias in node.names
    }
    for line, name in imports_of(path):
        if name.startswith("megatron.core") and any(p.startswith("_") for p in name.split(".")):
            yield line, name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            owner = ast.unparse(node.value)
            if owner in core or owner.startswith("megatron.core"):
                yield node.lineno, f"{owner}.{node.attr}"


def test_only_mcores_table_knows_megatron_cores_private_names() -> None:
    """Also within ``mcore`` they are reached through ``mcore.compat`` only."""
    folders = (PACKAGE, ROOT / "profiling", ROOT / "tools", ROOT / "examples")
    wrong = [
        f"{path.relative_to(ROOT)}:{line} uses {name}"
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        for line, name in private_names_of_core(path)
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
