"""The scripts that the documentation tells to run start from a clone, without an installation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = "\n".join(json.dumps({"loss": loss, "lr": 1}) for loss in (5, 4))
FAKE_PYTHON = f"""#!/usr/bin/env bash
case "$*" in
  -\\ *) exec {sys.executable} "$@" ;;
  *" simple "*) for i in 1 2 3 4 5 6 7 8 9; do echo "$i"; sleep 0.5; done ;;
  *" --tp "*) exec sleep 60 ;;
esac
metrics=${{@: -1}}
[[ $metrics != *.jsonl ]] || echo '{ROWS}' >"$metrics"
"""
"""Prints for longer than the patience in mode simple, nothing with --tp, and is done elsewhere."""
SCRIPTS = [
    path
    for folder in ("profiling", "tools")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "__main__" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_finds_the_package_beside_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    imported = re.search(r"^(from|import) megatron", text, re.MULTILINE)
    found = re.search(
        r"^(sys\.path\.insert\(0, |sys\.path\[:0\] = |import harness)", text, re.MULTILINE
    )
    assert imported is None or (found is not None and found.start() < imported.start())


@pytest.mark.slow
def test_a_slow_run_that_makes_progress_is_no_failure(tmp_path: Path) -> None:
    """The quick test ends a run that prints nothing, and waits for one that does. A run that opened
    its log late, as on a busy machine, was ended at once."""
    (tmp_path / "tools").mkdir()
    text = (ROOT / "tools" / "quick_test.sh").read_text(encoding="utf-8")
    quick = tmp_path / "tools" / "quick_test.sh"
    late = '>"$(sleep 0.5 && echo "$log")" 2>&1 &'
    for old, new in (("patience=300", "patience=3"), ('>"$log" 2>&1 &', late)):
        assert text.count(old) == 1
        text = text.replace(old, new)
    quick.write_text(text)
    (tmp_path / "tools" / "setup.sh").write_text(f"echo {tmp_path}/python")
    (tmp_path / "python").write_text(FAKE_PYTHON)
    (tmp_path / "python").chmod(0o755)
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    ran = subprocess.run(["bash", str(quick)], env=env, capture_output=True, text=True, timeout=60)
    verdicts = {line.split()[1]: line.split()[0] for line in ran.stdout.splitlines()}
    assert (verdicts["simple"], verdicts["tensor"]) == ("ok", "FAILED"), ran.stdout
    assert ran.returncode == 1 and "no new line for 3 s" in ran.stdout


def test_a_set_up_without_pybind11_says_so_in_one_line() -> None:
    ran = subprocess.run(
        [sys.executable, "-S", str(ROOT / "setup.py"), "install"], capture_output=True, text=True
    )
    assert ran.returncode == 1 and len(ran.stderr.splitlines()) == 1, ran.stderr
    assert "pip install pybind11" in ran.stderr
