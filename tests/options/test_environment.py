"""The table of environment variables holds all that the code reads, and its page is current."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.dpp_train.launch import scripts
from megatron.dpp_train.options import env_command as env
from megatron.dpp_train.options import environment

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
TABLE = ROOT / "megatron" / "dpp_train" / "options" / "environment.py"
OF_BENCHMARKS = "BENCH_"  # a benchmark sets them for its own processes
SHELL_ITSELF = {"BASH_SOURCE", "SECONDS", "PATH", "PWD", "HOME", "EPOCHREALTIME"}


def python_files() -> list[Path]:
    folders = ("megatron", "profiling", "tools")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted([*found, *ROOT.glob("*.py"), ROOT / "train"])


def shell_files() -> list[Path]:
    patterns = ("*.sh", "examples/**/*.sh", "examples/slurm/*.sbatch", "tools/*.sh")
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def read_by_python(path: Path) -> Iterator[str]:
    """Names behind ``os.environ``, ``getenv``, ``environment.value`` and an ``env`` parameter."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Subscript):
            where, what = node.value, [node.slice]
        elif isinstance(node, ast.Call):
            where, what = node.func, node.args
        elif isinstance(node, ast.Compare):
            where, what = node.comparators[0], [node.left]
        else:
            continue
        if re.search(r"\b(environ|getenv|env|environment|_number)\b", ast.unparse(where)):
            constants = (each for part in what for each in ast.walk(part))
            for each in constants:
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    yield each.value


def read_by_shell(path: Path) -> set[str]:
    """Names that a script uses and does not make itself."""
    text = path.read_text(encoding="utf-8")
    used = set(re.findall(r"\$\{?!?([A-Z][A-Z0-9_]*)", text))
    return used - SHELL_ITSELF


def test_every_variable_that_is_read_is_in_the_table() -> None:
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in python_files()
        for name in read_by_python(path)
        if NAME.fullmatch(name) and not name.startswith(OF_BENCHMARKS)
        if name not in environment.VARIABLES
    } | {
        f"{path.relative_to(ROOT)}: {name}"
        for path in shell_files()
        for name in read_by_shell(path)
        if name not in environment.VARIABLES
    }
    assert not missing
    assert set(read_by_python(ROOT / "megatron/dpp_train/launch/nodes.py")) >= {
        "NUM_NODES",
        "SLURM_NODEID",
    }  # what this test would find


def test_every_variable_of_the_table_is_known_elsewhere() -> None:
    texts = [path.read_text() for path in (*python_files(), *shell_files()) if path != TABLE]
    texts += [path.read_text() for path in (ROOT / "docs").glob("*.md") if path.stem != TABLE.stem]
    assert not set(environment.VARIABLES) - set(re.findall(r"\w+", "\n".join(texts)))


def test_every_setting_of_a_recipe_is_in_the_table() -> None:
    for values in (*scripts.RECIPES.values(), *scripts.SAMPLES.values()):
        assert set(values) <= set(environment.VARIABLES)
    by_recipe = {name for name, each in environment.VARIABLES.items() if "recipe" in each.default}
    assert by_recipe == set(scripts.RECIPES["gpt"])


def test_the_page_is_current() -> None:
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert page == environment.markdown(), "megatron-dpp env --markdown > docs/environment.md"


def test_the_command_shows_what_is_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WAIT_SECONDS", "17")
    assert env.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.strip().startswith("WAIT_SECONDS"))
    assert "300" in line and "[set to '17']" in line
    assert env.main(["--markdown"]) == 0
    assert capsys.readouterr().out == environment.markdown()


@pytest.mark.parametrize(
    ("shown", "count"), [("", 0), ("-1", 0), ("0", 1), ("0,1, 3", 3), ("GPU-1a,GPU-2b", 2)]
)
def test_gpus_are_those_that_are_shown(shown: str, count: int) -> None:
    assert environment.count_gpus({**os.environ, "CUDA_VISIBLE_DEVICES": shown}) == count
