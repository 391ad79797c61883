"""The Python that ``train`` and ``megatron-dpp train`` go on with."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from megatron.dpp import __version__

ROOT = Path(__file__).resolve().parents[2]
STUBS = {
    "tools/setup_environment.py": """
import pathlib, sys
root = pathlib.Path(__file__).parents[1]
print(*sys.argv[1:], file=(root / "asked").open("a"))
print((root / "made").read_text())
""",
    "megatron/dpp/processes.py": "def begin_program(): pass\n",
    "megatron/dpp_train/launch/main.py": """
import os, sys
def refused(): return 0
def main(prog): print(sys.executable, os.environ.get("DPP_TRAIN_PYTHON")); return 0
""",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One whose set-up prints what the file ``made`` names, with an environment of no packages
    in ``bare`` and one of all in ``.venv``."""
    for name, text in STUBS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(ROOT / "train", tmp_path)
    shutil.copy(ROOT / "tools" / "setup.sh", tmp_path / "tools")
    for name in ("bare", ".venv"):
        venv.create(tmp_path / name, symlinks=True)
    (packages,) = (tmp_path / ".venv" / "lib").glob("*/site-packages")
    for name in ("yaml", "numpy", "tokenizers"):
        (packages / f"{name}.py").touch()
    return tmp_path


def train(repository: Path, made: str) -> subprocess.CompletedProcess[str]:
    """Started with PYTHON, which names ``bare``; set-up prints the Python of ``made``."""
    bare = str(repository / "bare" / "bin" / "python")
    (repository / "made").write_text(str(repository / made / "bin" / "python"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [bare, str(repository / "train")], env={**environment, "PYTHON": bare},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_a_named_python_without_packages_leads_to_the_one_that_was_set_up(repository: Path) -> None:
    ran = train(repository, ".venv")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == f"{repository / '.venv' / 'bin' / 'python'} None\n"
    assert (repository / "asked").read_text() == "--keep\n"


def test_a_set_up_that_leaves_packages_out_is_not_asked_again(repository: Path) -> None:
    ran = train(repository, "bare")
    assert ran.returncode == 2 and len(ran.stderr.splitlines()) == 1
    assert "bare/bin/python was set up, and cannot import all of yaml numpy" in ran.stderr
    assert (repository / "asked").read_text() == "--keep\n"


def test_two_interpreters_of_one_directory_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_own = runpy.run_path(str(ROOT / "train"), run_name="train")["is_own"]
    one, other, link = (tmp_path / name for name in ("python3.98", "python3.99", "python3"))
    one.touch()
    other.touch()
    link.symlink_to(other.name)
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / one.name).symlink_to(one)
    monkeypatch.setattr(sys, "executable", str(one))
    monkeypatch.setenv("PYTHON", str(other))
    assert [is_own(str(each)) for each in (one, other, link)] == [True, False, False]
    assert not is_own(str(tmp_path / "venv" / one.name))
    monkeypatch.setenv("PYTHON", "")
    assert is_own(str(link)) and is_own(str(other))  # which no one named
    monkeypatch.setattr(sys, "executable", str(link))
    monkeypatch.setenv("PYTHON", str(other))
    assert is_own(str(other))


def test_pythons_older_than_3_9_read_it() -> None:
    """They know no ``list[str]``, and an error about it would hide the line about their version."""
    old = type("list", (), {})
    assert runpy.run_path(str(ROOT / "train"), {"list": old}, "train")["printed"]


@pytest.mark.parametrize("old", [True, False])
def test_an_old_python3_of_path_does_not_start_training(old: bool, tmp_path: Path) -> None:
    for name in ("bash", "dirname", "readlink"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    if old:
        (tmp_path / "python3").write_text(f"#!{shutil.which('bash')}\nexit 1\n")
        (tmp_path / "python3").chmod(0o755)
    ran = subprocess.run(
        [str(shutil.which("bash")), str(ROOT / "megatron-dpp"), "train", "--version"],
        env={"PATH": str(tmp_path), "PYTHON": sys.executable},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, f"megatron-dpp {__version__}\n"), ran.stderr
