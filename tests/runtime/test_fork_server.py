"""Ranks are forks, end as processes of their own do, and say nothing of what they inherited."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launcher import start, wait

_RANK = """
import atexit, threading

class Ends:
    def __del__(self):
        raise ValueError("while the interpreter ends")

kept = Ends()
kept.itself = kept
atexit.register(print, "registered", flush=True)

def wait():
    threading.main_thread().join()
    print("awaited", flush=True)

threading.Thread(target=wait).start()
raise RuntimeError("the rank's own")
"""


def test_an_end_is_that_of_a_process_without_what_it_has_inherited(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    (finished,) = wait(start(script, 1, []), timeout=100)
    assert finished.returncode == 1
    said = finished.output
    places = [
        said.index(each)
        for each in (
            "RuntimeError: the rank's own",
            "awaited",
            "registered",
            "ValueError: while the interpreter ends",
        )
    ]
    assert places == sorted(places)
    assert "leaked" not in said


def test_a_rank_is_a_fork_unless_a_variable_of_pythons_start_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that a test had left made every later rank import PyTorch, without a word."""
    script = tmp_path / "rank.py"
    script.write_text("import os, sys; print('torch' in sys.modules, os.environ.get('CUDA_TEST'))")
    (forked,) = wait(start(script, 1, []), timeout=100)
    assert forked.output.split() == ["True", "None"]
    monkeypatch.setenv("CUDA_TEST", "1")
    with pytest.raises(AssertionError, match=r"fresh=True lets ranks read .*CUDA_TEST"):
        start(script, 1, [])
    (fresh,) = wait(start(script, 1, [], fresh=True), timeout=100)
    assert fresh.output.split() == ["False", "1"]
