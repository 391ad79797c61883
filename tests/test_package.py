"""The package as ``pip install`` sees it: metadata, wheel and source distribution."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def run(*command: str | Path, cwd: Path, **settings: str) -> str:
    """Runs a command and returns its output; fails with the output if the command fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=environment | settings, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_requires_no_upper_bound() -> None:
    """Otherwise an installation would replace the PyTorch of its user. It brings no megatron-core,
    which is the user's own."""
    required = [Requirement(line) for line in PROJECT["dependencies"]]
    assert {r.name for r in required} == {"torch", "numpy", "psutil", "packaging"}
    assert {clause.operator for r in required for clause in r.specifier} == {">="}


def test_versions_agree_and_the_console_script_exists() -> None:
    import megatron.dpp

    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    newest = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert PROJECT["version"] == cited == next(each for each in newest if each != "Unreleased")
    trainer = tomllib.loads((ROOT / "packaging/trainer/pyproject.toml").read_text())["project"]
    assert PROJECT["version"] == megatron.dpp.__version__ == trainer["version"]
    assert trainer["dependencies"] == [f"megatron-dpp[train]=={PROJECT['version']}"]
    module, _, name = PROJECT["scripts"]["megatron-dpp"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_a_commit_runs_the_checks_of_the_tests() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    text = (ROOT / "tools/check.sh").read_text()
    found = [a or b for a, b in re.findall(r'^check (?:"([^"]+)"|(\S+)) ', text, re.MULTILINE)]
    assert [hook["name"] for hook in hooks] == found and len(found) >= 7
    for hook in hooks:
        words = shlex.split(hook["entry"])
        assert words == ["bash", "tools/check.sh", "--only", hook["name"]]


def test_the_workflow_runs_what_contributors_run() -> None:
    flow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    job = flow["jobs"]["test"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci/run", os.X_OK)
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert job["strategy"]["matrix"]["python"][0] == oldest


def test_the_launcher_of_the_source_tree_runs_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(ROOT / "megatron-dpp")
    shown = run(tmp_path / "link", "--version", cwd=tmp_path, PYTHON=sys.executable)
    assert shown == f"megatron-dpp {PROJECT['version']}\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the source distribution of the tracked files."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    files = run("git", "ls-files", cwd=ROOT).splitlines()
    for name in files:
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    build = "import setuptools.build_meta as b; print(b.build_sdist('dist'))"
    source = run(sys.executable, "-c", build, cwd=tree).splitlines()[-1]
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", folder, tree / "dist" / source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def fresh_environment(folder: Path) -> Path:
    """The Python of an environment that also sees the packages of the tests' environment."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    # An old setuptools of its own would hide the one that the installed torch requires.
    run(python, "-m", "pip", "uninstall", "--yes", "setuptools", cwd=folder)
    purelib = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
    )
    (Path(purelib.strip()) / "tests.pth").write_text(sysconfig.get_path("purelib"))
    return python


def versions(python: Path) -> dict[str, str]:
    """Name and version of each package that ``python`` finds."""
    listed = run(python, "-m", "pip", "list", "--format", "json", cwd=python.parent)
    return {each["name"]: each["version"] for each in json.loads(listed)}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_installing_the_wheel_changes_no_installed_version(wheel: Path, tmp_path: Path) -> None:
    python = fresh_environment(tmp_path / "fresh")
    before = versions(python)
    assert {"megatron-core", "torch"} <= before.keys()
    said = run(python, "-m", "pip", "install", "--no-index", wheel, cwd=tmp_path)
    assert "Uninstalling" not in said
    own = PROJECT["name"]
    assert versions(python) == {**before, own: PROJECT["version"]}
    where = "import megatron.dpp as d, megatron.core as c, torch; print(d.__file__, c.__file__)"
    ours, theirs = run(python, "-c", where, cwd=tmp_path).split()
    assert ours.startswith(str(tmp_path)) and not theirs.startswith(str(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wheel_of_the_source_distribution_runs_from_any_directory(
    wheel: Path, tmp_path: Path
) -> None:
    # What the wheel requires comes from the environment of the tests.
    python = fresh_environment(tmp_path / "fresh")
    run(python, "-m", "pip", "install", "--no-deps", wheel, cwd=tmp_path)

    command = tmp_path / "fresh" / "bin" / "megatron-dpp"
    assert "usage: megatron-dpp" in run(command, "--help", cwd=tmp_path)
    assert "rank 0" in run(command, "sim", "--pp", "2", "--microbatches", "4", cwd=tmp_path)
    run(command, "doctor", cwd=tmp_path)
    both = "import megatron.core, megatron.dpp.transport._native as built; print(built.__file__)"
    where = run(python, "-c", both, cwd=tmp_path)
    assert where.startswith(str(tmp_path))


EXCHANGE = """
import sys, torch
from megatron.dpp.transport import ChannelSpec, Direction, open_transport
rank, tensor = int(sys.argv[1]), torch.arange(4.0)
channel = ChannelSpec(0, 1, chunk=0, direction=Direction.FORWARD, slot_bytes=64)
store = torch.distributed.FileStore("store", 2)
transport = open_transport([channel], rank=rank, store=store)
if rank == 0:
    transport.put(0, tensor, iteration=0, microbatch=0)
    transport.flush(60.0)
else:
    while not transport.poll()[0]:
        transport.wait(60.0)
    print([link.kind for link in transport.links()], transport.take(0).tensor.tolist())
transport.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_engine_installs_alone_without_a_compiler_and_the_trainer_beside_it(
    tmp_path: Path,
) -> None:
    """Two ranks of the engine exchange a tensor, over shared memory."""
    script = ROOT / "tools" / "build_wheel.sh"
    words = ("--output-dir", tmp_path, sys.executable)
    built, trainer = run("bash", script, *words, cwd=tmp_path).splitlines()
    assert "manylinux" in built and Path(built).parent == tmp_path
    python = fresh_environment(tmp_path / "fresh")
    bare = {"PATH": str(python.parent), "CXX": "no-compiler"}
    run(python, "-m", "pip", "install", "--no-index", "--no-deps", built, cwd=tmp_path, **bare)
    command = [python, "-c", EXCHANGE]
    with subprocess.Popen([*command, "0"], cwd=tmp_path) as first:
        said = run(*command, "1", cwd=tmp_path, **bare)
        assert first.wait(60) == 0
    assert said == "['shm'] [0.0, 1.0, 2.0, 3.0]\n"
    command = python.parent / "megatron-dpp"
    shown = subprocess.run(
        [command, "train", "--help"], capture_output=True, text=True, cwd=tmp_path
    )
    assert shown.returncode == 2 and "install megatron-dpp-train" in shown.stderr
    for words in ("doctor", "sim --pp 2 --microbatches 4", "run --help", "report --help"):
        run(command, *words.split(), cwd=tmp_path)
    run(python, "-m", "pip", "install", "--no-index", "--no-deps", trainer, cwd=tmp_path)
    assert "--mode simple" in run(command, "train", "--help", cwd=tmp_path)
