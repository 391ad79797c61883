"""Mutation testing: the choice of lines, and a run that notices one fault and misses another."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import mutation_cpp
import mutation_test
import psutil
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


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
    verdicts = ["killed", "timed out", "survived", "survived", "", mutation_test.REFUSED]
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


def test_an_endless_fault_leaves_no_process_and_the_copy_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, child = tmp_path / "tree", tmp_path / "pid"
    tree.mkdir()
    (tree / "small.py").write_text("END = True\n")
    (tree / "test_small.py").write_text(
        "import pathlib, subprocess, small\n\n\ndef test_end():\n"
        "    started = subprocess.Popen(['sleep', '100'], start_new_session=True)\n"
        f"    pathlib.Path({str(child)!r}).write_text(str(started.pid))\n"
        "    while not small.END:\n        pass\n"
    )
    subprocess.run(["git", "init"], cwd=tree, check=True, capture_output=True)
    monkeypatch.setattr(mutation_test, "REPOSITORY", tree)
    monkeypatch.setattr(mutation_test, "LEAST_SECONDS", 1.0)
    monkeypatch.setattr(mutation_test, "mutated", lambda _: "END = False\n")
    monkeypatch.setenv(mutation_test.MARK, str(os.getpid()))
    monkeypatch.setenv("PYTHONPATH", ".", prepend=os.pathsep)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    copy = mutation_test.Tree(tmp_path / "copy")
    mutant = mutation_test.Mutant("small.py", 1, "op", 0, (1, 0, 1, 1))
    assert copy.verdict(mutant, ("test_small.py",)) == "timed out"
    deadline = time.monotonic() + 30
    with contextlib.suppress(psutil.NoSuchProcess):  # it ends when the system next runs it
        while psutil.Process(int(child.read_text())).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert (tmp_path / "copy" / "small.py").read_text() == "END = True\n"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_notices_faults_and_leaves_the_tree_as_it_was(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    names = ("mutation_test.sh", "mutation_test.py", "mutation_cpp.py")
    for name in (*(f"tools/{each}" for each in names), "pyproject.toml"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tree / name)
    (tree / "tools" / "setup.sh").write_text(f"echo {sys.executable}\n")
    module = tree / "megatron" / "dpp" / "small.py"
    module.parent.mkdir(parents=True)
    source = "def larger(a, b):\n    return a > b\n\n\ndef unseen(a):\n    return a + 1\n"
    module.write_text(source)
    (tree / "tests" / "dpp").mkdir(parents=True)
    (tree / "tests" / "dpp" / "test_small.py").write_text(
        "import subprocess, sys\n\n\ndef test_larger():\n"
        "    code = 'from megatron.dpp.small import larger as f; '\n"
        "    code += 'assert f(2, 1) and not f(1, 1) and not f(1, 2)'\n"
        "    subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    commit = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "tree"]
    for words in (["init", "-b", "main"], ["add", "."], commit):
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
    assert "-    return a + 1" in done.stdout and "-    return a > b" not in done.stdout
