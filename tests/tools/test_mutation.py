"""Mutation testing: the choice of lines, and a run that notices one fault and misses another."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import mutation_cpp
import mutation_test
import psutil
import pytest

from tests.nodes import running

REPOSITORY = Path(__file__).resolve().parents[2]

SOURCE = """\
def first(a, b):
    if (
        a
        and b
    ):
        return 1
    return [
        2,
        3,
    ]
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [(1, {1}), (4, {2, 3, 4, 5}), (6, {6}), (8, {7, 8, 9, 10}), (99, {99})],
)
def test_a_fault_belongs_to_its_statement_and_in_a_compound_one_to_the_head(
    line: int, expected: set[int]
) -> None:
    assert mutation_test.statement_lines(SOURCE, line) == expected


def test_changed_lines_are_those_of_the_new_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "megatron" / "dpp" / "module.py"
    module.parent.mkdir(parents=True)
    monkeypatch.setattr(mutation_test, "REPOSITORY", tmp_path)

    def git(*words: str) -> None:
        named = ("-c", "user.name=a", "-c", "user.email=a@b", *words)
        subprocess.run(["git", *named], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "main")
    module.write_text("a = 1\nb = 2\nc = 3\nd = 4\n")
    git("add", ".")
    git("commit", "-m", "first")
    module.write_text("a = 1\nb = 5\nnew = 6\nc = 3\n")
    assert mutation_test.changed_lines("main") == {"megatron/dpp/module.py": {2, 3}}
    with pytest.raises(SystemExit, match="git merge-base HEAD elsewhere"):
        mutation_test.changed_lines("elsewhere")


CPP = """\
#include "a.h"  // 1 < 2
bool fits(size_t bytes) {
  if (const Room room = find("a < b"); room.left < bytes) return false;
  if (bytes == 0) return true;
  ring(bell_);
  count_ += 2;
  return bytes <= std::min(kMost, limit());
}
"""


def test_faults_of_cpp_spare_comments_strings_and_declarations() -> None:
    text, found = CPP, []
    for name, start, end, instead in mutation_cpp.faults_of(text):
        found.append((name, text.count("\n", 0, start) + 1, text[start:end], instead))
    assert sorted(found, key=lambda each: each[1]) == [
        ("operator", 3, "<", "<="),
        ("truth", 3, "false", "true"),
        ("operator", 4, "==", "!="),
        ("truth", 4, "true", "false"),
        ("number", 4, "0", "1"),
        ("condition", 4, "(bytes == 0)", "(!(bytes == 0))"),
        ("statement", 5, "ring(bell_)", ""),
        ("operator", 6, "+=", "-="),
        ("number", 6, "2", "3"),
        ("statement", 6, "count_ += 2", ""),
        ("operator", 7, "<=", "<"),
        ("bound", 7, "std::min", "std::max"),
    ]


def test_the_table_counts_verdicts_and_shows_what_survived() -> None:
    verdicts = ["killed", "timed out", "survived", "survived (no test executes it)", ""]
    verdicts += [mutation_test.REFUSED]
    mutants = [
        mutation_test.Mutant(f"m{i % 2}.py", i, "op", 0, (i, 0, i, 1), f"difference {i}", verdict)
        for i, verdict in enumerate(verdicts)
    ]
    text = mutation_test.report(mutants)
    assert [line.split() for line in text.splitlines()[1:4]] == [
        ["m0.py", "3", "1", "0", "1", "1"],
        ["m1.py", "2", "0", "1", "1", "0"],
        ["all", "5", "1", "1", "2", "1"],
    ]
    assert "difference 2" in text and "difference 3" in text and "difference 1" not in text


ENDLESS = """\
import os, signal, sys
from pathlib import Path

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored behind a shell's "&"

import mutation_test as tool

tool.REPOSITORY = Path.cwd()
tool.STATE = Path.cwd() / "build"
tool.PRELOADED = ()
os.environ[tool.MARK] = str(os.getpid())
mutants = [tool.Mutant("small.py", 1, "op", 0, (1, 0, 1, 1), "difference")]
tool.load = lambda *_: mutants
tool.mutated = lambda mutant: "END = False\\n"


class Choice:
    def __init__(self, *_):
        pass

    def measure(self, limit):
        pass

    def tests_of(self, mutant, deadline):
        return ["test_small.py"], (float(sys.argv[1]) - 30) / 4  # for this limit


tool.Choice = Choice
sys.exit(tool.main(["--again"]))
"""
"""The tool's run of one fault, by which a test that starts a process never ends."""


@pytest.mark.parametrize(
    "ended_by", ["limit", "SIGINT", pytest.param("SIGTERM", marks=pytest.mark.slow)]
)
def test_an_endless_fault_leaves_neither_processes_nor_files(tmp_path: Path, ended_by: str) -> None:
    _endless(tmp_path, ended_by, 2.0 if ended_by == "limit" else 120.0)


def _endless(tmp_path: Path, ended_by: str, limit: float) -> None:
    place = tmp_path / str(limit)
    tree, scratch, child = place / "tree", place / "scratch", place / "pid"
    (tree / "build").mkdir(parents=True)
    scratch.mkdir()
    (tree / "small.py").write_text("END = True\n")
    (tree / "test_small.py").write_text(
        "import pathlib, subprocess, small\n\n\ndef test_end():\n"
        "    started = subprocess.Popen(['sleep', '100'], start_new_session=True)\n"
        f"    pathlib.Path({str(child)!r}).write_text(str(started.pid))\n"
        "    while not small.END:\n        pass\n"
    )
    subprocess.run(["git", "init"], cwd=tree, check=True, capture_output=True)
    paths = os.pathsep.join([".", str(REPOSITORY / "tools"), os.environ.get("PYTHONPATH", "")])
    run = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(limit)], cwd=tree, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": paths, "TMPDIR": str(scratch)},
    )  # fmt: skip
    with run:
        try:
            deadline = time.monotonic() + 60
            while not (child.exists() and child.read_text()):
                assert time.monotonic() < deadline
                if run.poll() is not None:
                    assert ended_by == "limit" and limit < 30
                    _endless(tmp_path, ended_by, 4 * limit)  # it had no time to begin
                    return
                time.sleep(0.02)
            started = psutil.Process(int(child.read_text()))
            if ended_by != "limit":
                run.send_signal(getattr(signal, ended_by))
            said, _ = run.communicate(timeout=60)
        finally:
            run.kill()
    assert run.returncode == (143 if ended_by == "SIGTERM" else 0)
    assert ("1/1 timed out: small.py:1" in said) == (ended_by == "limit")
    assert ("interrupted; --again goes on" in said) == (ended_by == "SIGINT")
    deadline = time.monotonic() + 30
    while running([started]):  # a killed process ends when the system next runs it
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert (tree / "small.py").read_text() == "END = True\n"
    assert not list(scratch.glob("mutation-*"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_notices_faults_and_leaves_the_tree_as_it_was(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in (
        "tools/mutation_test.sh",
        "tools/mutation_test.py",
        "tools/mutation_cpp.py",
        "pyproject.toml",
    ):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tree / name)
    (tree / "tools" / "setup.sh").write_text(f"echo {sys.executable}\n")
    module = tree / "megatron" / "dpp" / "small.py"
    module.parent.mkdir(parents=True)
    source = "def larger(a, b):\n    return a > b\n\n\ndef unseen(a):\n    return a + 1\n"
    module.write_text(source)
    (tree / "tests").mkdir()
    (tree / "tests" / "test_small.py").write_text(
        "import subprocess, sys\n\n\ndef test_larger():\n"
        "    code = 'from megatron.dpp.small import larger as f; '\n"
        "    code += 'assert f(2, 1) and not f(1, 1) and not f(1, 2)'\n"
        "    subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    for words in (["init", "-b", "main"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tree, check=True, capture_output=True)
    packages = REPOSITORY / "build" / "mutation" / "packages"
    if packages.is_dir():
        shutil.copytree(packages, tree / "build" / "mutation" / "packages")
    done = subprocess.run(
        ["bash", "tools/mutation_test.sh", "megatron/dpp/small.py"],
        cwd=tree, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "."},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert module.read_text() == source
    record = json.loads((tree / "build" / "mutation" / "results.json").read_text())["mutants"]
    verdicts = {line: {m["verdict"] for m in record if m["line"] == line} for line in (2, 6)}
    assert verdicts == {2: {"killed"}, 6: {"survived (no test executes it)"}}
    assert "-    return a + 1" in done.stdout and "-    return a > b" not in done.stdout
