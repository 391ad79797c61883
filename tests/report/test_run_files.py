"""The files of a run: metrics, command and state, whole, half written or broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.dpp.errors import ConfigError
from megatron.dpp.report.run_files import read_metrics, read_state, read_training, write_state


def _write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"iterat')
    return path


def test_a_resumed_run_replaces_what_it_repeats(tmp_path: Path) -> None:
    one, two, three = ({"iteration": i, "loss": 9.0 - i} for i in (1, 2, 3))
    tried, again = {"iteration": 2, "validation_loss": 8.0}, {"iteration": 2, "loss": 6.5}
    path = _write(
        tmp_path / "metrics.jsonl", one, two, tried, three, ["iteration"], {"loss": 0}, again, tried
    )
    assert read_metrics(path) == [one, again, tried]
    assert read_metrics(tmp_path / "none") == []
    training = read_training(tmp_path)
    assert (training.metrics, training.evaluations) == ([one, again], [(2, 8.0)])


@settings(max_examples=30)
@given(st.lists(st.integers(1, 6), max_size=12))
def test_iterations_are_read_once_and_in_order(tmp_path_factory: Any, written: list[int]) -> None:
    """Those that count are the last of their number, and not beyond the last line's."""
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    _write(path, *({"iteration": each, "loss": i} for i, each in enumerate(written)))
    found = {each["iteration"]: each["loss"] for each in read_metrics(path)}
    expected: dict[int, int] = {}
    for place, each in enumerate(written):
        expected = {number: at for number, at in expected.items() if number < each}
        expected[each] = place
    assert found == expected and list(found) == sorted(found)


def test_the_command_names_flags_and_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "ck" / "iter_0000012").mkdir(parents=True)
    (tmp_path / "ck" / "iter_\u00b2").mkdir()
    _write(tmp_path / "metrics.jsonl", {"iteration": 1, "loss": 2.0, "train_iters": 10, "ms": 1e3})
    (tmp_path / "command").write_text(
        f"torchrun x.py --num-layers 2 --sft --lr=1 --save '{tmp_path}/ck'"
    )
    found = read_training(tmp_path)
    assert found.flags == {
        "--num-layers": "2", "--sft": "", "--lr": "1", "--save": f"{tmp_path}/ck",
    }  # fmt: skip
    assert found.checkpoint == 12
    assert (found.state, found.runs, found.seconds_left) == ("running", True, 9.0)
    write_state(tmp_path, "stopped", by="Ctrl-C")
    found = read_training(tmp_path)
    assert (found.state, found.runs, found.seconds_left) == ("stopped by Ctrl-C", False, None)


def test_numbers_that_no_run_writes_are_left_out(tmp_path: Path) -> None:
    """The report ended in a TypeError, OverflowError or ValueError."""
    rows = [
        {"iteration": 1, "loss": 1, "x": 10**400},
        {"iteration": "2", "loss": 1},
        {"iteration": [1], "loss": 1},
        {"iteration": 3, "loss": None},
    ]
    _write(tmp_path / "metrics.jsonl", *rows)
    (tmp_path / "command").write_text("a 'b")
    found = read_training(tmp_path)
    assert found.metrics == [{"iteration": 1, "loss": 1}, {"iteration": 3, "loss": None}]
    assert (found.last("loss"), found.total, found.flags) == (1.0, None, {})


def test_a_run_tells_its_state_and_when_it_came_into_it(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    write_state(tmp_path, "starting")
    write_state(tmp_path, "running")
    running = read_state(tmp_path)
    assert running is not None and not running.ended and str(running) == "running"
    assert running.times["starting"] <= running.times["running"]
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


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": "running"}', '{"state": 3}', "null"])
def test_a_broken_state_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text, encoding="utf-8")
    assert read_state(tmp_path) is None
