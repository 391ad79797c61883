"""The metrics and settings beside a run's traces, whole or half written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.dpp.errors import ConfigError
from megatron.dpp.report.run_files import (
    model_text,
    read_metrics,
    read_settings,
    read_state,
    read_training,
    write_state,
)


def _write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"iterat')
    return path


def test_lines_of_one_iteration_are_one_and_a_resumed_run_replaces_its_own(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "metrics.jsonl", {"iteration": 1, "loss": 9}, {"iteration": 2, "loss": 8},
        {"iteration": 2, "set": "valid", "loss": 1}, {"iteration": 3, "loss": 7}, ["iteration"],
        {"loss": 0}, {"iteration": 2, "loss": 6}, {"iteration": 2, "sum": "x"}, {"iteration": 3},
    )  # fmt: skip
    found = [{"iteration": 1, "loss": 9}, {"iteration": 2, "loss": 6, "sum": "x"}, {"iteration": 3}]
    assert read_metrics(path) == found
    assert read_metrics(tmp_path / "none") == []


@settings(max_examples=30)
@given(st.lists(st.integers(1, 6), max_size=12))
def test_iterations_are_read_once_and_in_order(tmp_path_factory: Any, written: list[int]) -> None:
    """Those that count are the last of their number, and not beyond the last line's."""
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    _write(path, *({"iteration": each, "place": i} for i, each in enumerate(written)))
    found = {each["iteration"]: each["place"] for each in read_metrics(path)}
    expected: dict[int, int] = {}
    for place, each in enumerate(written):
        expected = {number: at for number, at in expected.items() if number < each}
        expected[each] = place
    assert found == expected and list(found) == sorted(found)


def test_a_look_at_the_end_skips_the_line_that_it_begins_in(tmp_path: Path) -> None:
    """It reads the last 64 KiB."""
    path = _write(tmp_path / "metrics.jsonl", *({"iteration": i} for i in range(1000, 9000)))
    found = [each["iteration"] for each in read_metrics(path, last_only=True)]
    assert found == list(range(found[0], 9000))
    assert (1 << 16) - 60 < len(found) * len('{"iteration": 1000}\n') <= 1 << 16
    assert len(read_metrics(path)) == 8000
    few = _write(tmp_path / "few.jsonl", *({"iteration": i} for i in range(1, 9)))
    assert len(read_metrics(few, last_only=True)) == 8


def test_settings_that_were_given_stand_out_from_defaults(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "traces" / "data-1").mkdir(parents=True)
    (home / "settings.yaml").write_text(
        "num_layers: 8\n# hidden_size: 128\nnot a setting\n# words: that are no JSON\n"
        'params_dtype: "torch.bfloat16"\n# seq_length: null\n'
    )
    given_, every = read_settings(home / "settings.yaml")
    assert given_ == {"num_layers": 8, "params_dtype": "torch.bfloat16"}
    assert every == given_ | {"hidden_size": 128, "seq_length": None}
    assert model_text(every) == "8 layers of 128, bfloat16"
    assert model_text({"num_layers": 0}) == ""
    _write(home / "metrics.jsonl", {"iteration": 1})
    _write(tmp_path / "other", {"iteration": 2})
    training = read_training(home)
    assert training.metrics == [{"iteration": 1}]
    assert training.flags == {"--num-layers": 8, "--params-dtype": "torch.bfloat16"}
    training = read_training(home, str(tmp_path / "other"))
    assert training.metrics == [{"iteration": 2}]


def test_numbers_that_no_run_writes_are_left_out(tmp_path: Path) -> None:
    """The report ended in a TypeError, OverflowError or ValueError."""
    rows = [
        {"iteration": 1, "x": 10**400},
        {"iteration": "2"},
        {"iteration": [1]},
        {"iteration": 3},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "settings.yaml").write_text('train_iters: "9"\nsave: 1.5\n')
    (tmp_path / "checkpoints" / "iter_\u00b2").mkdir(parents=True)
    found = read_training(tmp_path)
    assert found.metrics == [{"iteration": 1}, {"iteration": 3}]
    assert found.total is None and found.checkpoints == []


def test_a_run_tells_its_state_and_when_it_came_into_it(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    write_state(tmp_path, "starting")
    write_state(tmp_path, "running")
    running = read_state(tmp_path)
    assert running is not None and not running.ended and str(running) == "running"
    assert running.times["starting"] <= running.times["running"] == running.since
    for state, by, text in (
        ("stopped", "Ctrl-C", "stopped by Ctrl-C"),
        ("failed", "rank 1: out of memory", "failed: rank 1: out of memory"),
        ("finished", None, "finished"),
    ):
        write_state(tmp_path, state, by)
        found = read_state(tmp_path)
        assert found is not None and found.ended and (found.by, str(found)) == (by, text)
        assert running.times.items() <= found.times.items()
    write_state(tmp_path, "starting")
    again = read_state(tmp_path)
    assert again is not None and set(again.times) == {"starting"}
    with pytest.raises(ConfigError, match="state 'over': expected one of starting, running"):
        write_state(tmp_path, "over")


def test_a_run_whose_process_is_gone_has_failed(tmp_path: Path) -> None:
    code = f"from megatron.dpp.report.run_files import *; write_state({str(tmp_path)!r}, 'running')"
    subprocess.run([sys.executable, "-c", code], check=True)
    found = read_state(tmp_path)
    assert found is not None and found.ended
    assert str(found).startswith("failed: process ") and set(found.times) == {"running", "failed"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": "running"}', '{"state": 3}', "null"])
def test_a_broken_state_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text, encoding="utf-8")
    assert read_state(tmp_path) is None
