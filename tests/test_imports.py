"""Holds the tables of docs/architecture.md: which package may import which, and what is public."""

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
from tests.sources import ROOT, tree_of

ENGINE, TRAINER = ROOT / "megatron" / "dpp", ROOT / "megatron" / "dpp_train"

# A room may import itself and the rooms named here, all of which stand above it in its table: so
# no arrow runs upwards.
ENGINE_ROOMS = {
    "errors": set(),
    "direction": set(),
    "config": {"errors"},
    "hosts": {"errors"},
    "memory": set(),
    "inject": {"errors"},
    "processes": {"errors"},
    "files": {"errors"},
    "schedule": {"config", "direction", "errors", "files"},
    "command_line": {"config", "errors", "processes", "schedule"},
    "trace": {"config", "direction", "errors", "files", "schedule"},
    "sim": {
        *("command_line", "config", "direction", "errors", "files", "schedule"),
        "trace",
    },
    "transport": {"config", "direction", "errors", "hosts", "processes"},
    "core": {"config", "direction", "errors", "memory", "processes", "trace", "transport"},
    "runtime": {
        *("config", "direction", "errors", "hosts", "inject", "memory", "processes", "schedule"),
        *("trace", "transport", "core"),
    },
    "metrics": {"core", "errors", "files"},
    "plugin_lengths": {"core", "errors"},
    "plugin_order": {"config", "errors", "core", "schedule", "sim", "plugin_lengths"},
    "plugin": {
        *("config", "errors", "core", "runtime", "schedule", "trace"),
        *("plugin_lengths", "plugin_order"),
    },
    "torch": {
        *("config", "direction", "errors", "inject", "memory", "runtime", "schedule", "trace"),
    },
    "report": {
        *("command_line", "config", "errors", "files", "hosts", "processes", "schedule", "sim"),
        "trace",
    },
}
WITHOUT_MEGATRON = (
    *("schedule", "runtime", "transport", "trace", "sim", "report", "files", "torch"),
)
"""Rooms that reach megatron-core through ``core`` alone."""
OPEN_TO_THE_TRAINER = {
    *("command_line", "config", "errors", "files", "hosts", "plugin", "processes"),
    *("report", "run", "schedule", "sim", "trace", "metrics"),
    *("core.cpu", "core.compat", "core.varlen"),
}
"""Rooms and modules of the engine that the trainer may import, beside the front door."""

TRAINER_ROOMS = {
    "text_files": set(),
    "cost": set(),
    "data": {"text_files"},
    "hf": {"data", "text_files"},
    "presets": {"cost", "data", "hf", "text_files"},
    "pretrain": {"data", "presets", "hf"},
    "deepspeed": {"data", "presets", "pretrain"},
}
DOORS = {*("__init__", "__main__", "autoload", "doctor", "run", "sim_command")}
"""Entry points of the engine, which may import any of its rooms."""
WITHOUT_TORCH = (
    *("megatron.dpp", "megatron.dpp.schedule", "megatron.dpp.sim_command", "megatron.dpp.doctor"),
    *("megatron.dpp.__main__", "megatron.dpp.inject", "megatron.dpp.hosts", "megatron.dpp.run"),
    *("megatron.dpp.command_line", "megatron.dpp.files.locks", "megatron.dpp.autoload"),
    *("megatron.dpp.report.report_command", "megatron.dpp.report.whatif"),
    *("megatron.dpp_train.presets.train_command", "megatron.dpp_train.data.preprocess_command"),
)
"""Modules that answer within a fraction of a second, so that neither they nor what they import
loads PyTorch."""
PUBLIC = {
    "Action", "ConfigError", "DataError", "DppConfig", "DppError", "DppSchedule", "Geometry",
    "Kind", "ScheduleError", "Scheduler", "StaticSchedule", "TransportError", "__version__",
    "open_recorder", "open_transport",
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
    package = TRAINER if path.is_relative_to(TRAINER) else ENGINE
    return ".".join(path.relative_to(package).with_suffix("").parts)


def files_of(package: Path, room: str) -> list[Path]:
    folder = package / room
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [package / f"{room}.py"]
    return [path for path in files if package == TRAINER or module_of(path) not in DOORS]


@pytest.mark.parametrize(
    ("package", "table"), [(ENGINE, ENGINE_ROOMS), (TRAINER, TRAINER_ROOMS)], ids=["dpp", "train"]
)
def test_every_room_is_in_the_table(package: Path, table: dict[str, set[str]]) -> None:
    rooms = {module_of(path).split(".")[0] for path in package.rglob("*.py")}
    assert rooms - DOORS == set(table)


def test_no_arrow_of_the_tables_runs_upwards() -> None:
    for table in (ENGINE_ROOMS, TRAINER_ROOMS):
        above: set[str] = set()
        for room, allowed in table.items():
            assert allowed <= above, room
            above.add(room)


def name_of(path: Path) -> str:
    """``megatron/dpp/sim/__init__.py`` -> ``megatron.dpp.sim``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def arrows() -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports while it is imported itself."""
    known = {name_of(path): path for p in (ENGINE, TRAINER) for path in p.rglob("*.py")}
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        names = [name for _, name in imports_of_nodes(top_level(tree_of(str(path))), path)]
        below = [name for name in names if name.startswith("megatron.dpp")]
        found[module] = {
            name if name in known else name.rpartition(".")[0] for name in below
        } & set(known)
        found[module] -= {module, "megatron.dpp"}  # the front door loads names when asked for
    return found


def top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run at import: not those inside of functions or for type checkers."""
    for node in tree.body:
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node


def test_no_circle_of_modules() -> None:
    """Circles within a room count too. Prints the tables of rooms."""
    below = arrows()
    for room, allowed in [*ENGINE_ROOMS.items(), *TRAINER_ROOMS.items()]:
        print(f"{room:<12} -> {', '.join(sorted(allowed))}")
    try:
        tuple(graphlib.TopologicalSorter(below).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def foreign(package: Path, room: str) -> Iterator[tuple[Path, int, str, str]]:
    """File, line, package and name below it of each import of ours that leaves a room."""
    for path in files_of(package, room):
        for line, name in imports_of(path):
            top, _, rest = name.removeprefix("megatron.").partition(".")
            if top in ("dpp", "dpp_train") and rest:
                own = top == package.name and rest.split(".")[0] == room
                if not own:
                    yield path.relative_to(ROOT), line, top, rest


@pytest.mark.parametrize("room", ENGINE_ROOMS)
def test_a_room_of_the_engine_imports_only_what_the_table_allows(room: str) -> None:
    allowed = ENGINE_ROOMS[room]
    wrong = [
        f"{path}:{line} imports {top}.{name}"
        for path, line, top, name in foreign(ENGINE, room)
        if top != "dpp" or name.split(".")[0] in set(ENGINE_ROOMS) - allowed
    ]
    assert not wrong


@pytest.mark.parametrize("room", TRAINER_ROOMS)
def test_a_room_of_the_trainer_imports_only_what_the_table_allows(room: str) -> None:
    wrong = []
    for path, line, top, name in foreign(TRAINER, room):
        if top == "dpp_train":
            good = name.split(".")[0] in TRAINER_ROOMS[room]
        else:
            doors = {".".join(name.split(".")[:n]) for n in (1, 2, 3)}
            good = bool(doors & OPEN_TO_THE_TRAINER) or name in PUBLIC
        if not good:
            wrong.append(f"{path}:{line} imports {top}.{name}")
    assert not wrong


@pytest.mark.parametrize("room", WITHOUT_MEGATRON)
def test_the_engine_stands_without_megatron_core(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files_of(ENGINE, room)
        for line, name in imports_of(path)
        if name.startswith("megatron.core")
    ]
    assert not wrong


def test_stages_of_torch_need_no_megatron_core() -> None:
    """The adapter to PyTorch's pipelining and all that it imports, directly or by others."""
    below, waiting = arrows(), {name for name in arrows() if name.startswith("megatron.dpp.torch")}
    reached: set[str] = set()
    while waiting:
        reached.add(name := waiting.pop())
        waiting |= below[name] - reached
    assert "megatron.dpp.runtime.executor" in reached
    assert not [name for name in reached if name.startswith("megatron.dpp.core")]


def test_what_answers_at_once_does_without_torch() -> None:
    code = (
        f"import importlib, sys\nfor name in {WITHOUT_TORCH!r}:\n    importlib.import_module(name)"
        "\n    heavy = {'torch', 'megatron.core'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} loads {heavy}'"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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


def test_only_one_table_knows_megatron_cores_private_names() -> None:
    """Also within ``core`` they are reached through ``core.compat`` only."""
    folders = (ENGINE, TRAINER, ROOT / "profiling", ROOT / "tools", ROOT / "examples")
    wrong = [
        f"{path.relative_to(ROOT)}:{line} uses {name}"
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        for line, name in private_names_of_core(path)
    ]
    assert not wrong


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
