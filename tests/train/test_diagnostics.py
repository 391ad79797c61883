"""Profiles of some iterations, and warnings of losses that jump."""

from __future__ import annotations

import argparse
import contextlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.train import diagnostics
from megatron.dpp.train.diagnostics import Diagnostics, _Profile
from megatron.dpp.train.logs import StepResult


def run_of(said: list[str], **changes: Any) -> Any:
    args = {
        "profile": False, "train_iters": 20, "logging_level": None, "train_sync_interval": None,
        "log_memory_interval": None, "check_for_spiky_loss": True, "profile_ranks": [0],
        "profile_step_start": 2, "profile_step_end": 4,
    }  # fmt: skip
    return SimpleNamespace(
        args=argparse.Namespace(**args | changes), rank=0, iteration=0, is_first=False,
        is_last=True, say_last=said.append,
    )  # fmt: skip


@pytest.mark.parametrize(("ranks", "expected"), [([0], ["open 2", "closed 4"]), ([1], [])])
def test_a_profile_holds_the_asked_iterations_once(
    ranks: list[int], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    profile = _Profile(run_of([], profile_ranks=ranks))

    def start(_: Any) -> contextlib.ExitStack:
        told.append(f"open {now}")
        stack = contextlib.ExitStack()
        stack.callback(lambda: told.append(f"closed {now}"))
        return stack

    monkeypatch.setattr(_Profile, "_start", start)
    for now in (0, 1, 2, 3, 4, 5, 2, 3):
        profile.before(now)
    profile.close()
    assert told == expected


def test_a_loss_above_ten_times_all_before_it_is_told_and_a_skipped_step_has_none() -> None:
    said: list[str] = []
    run = run_of(said)
    with contextlib.closing(Diagnostics(run)) as made:
        for loss, skipped in ((2.0, False), (900.0, True), (20.0, False), (200.5, False)):
            run.iteration += 1
            losses = {"lm loss": torch.tensor(loss)}
            made.after_step(StepResult(losses=losses, skipped=skipped, grad_norm=None))
    assert len(said) == 1
    assert "iteration 4: lm loss 2.005000E+02 is more than 10 times the largest of the 2" in said[0]


def test_losses_of_the_last_100_steps_are_compared() -> None:
    """An old large one hides no new spike."""
    said: list[str] = []
    run = run_of(said)
    with contextlib.closing(Diagnostics(run)) as made:
        for loss in (50.0, *[2.0] * 100, 21.0):
            run.iteration += 1
            losses = {"lm loss": torch.tensor(loss)}
            made.after_step(StepResult(losses=losses, skipped=False, grad_norm=None))
    assert len(said) == 1 and "largest of the 100 before it (2.0" in said[0]


def test_the_largest_loss_counts_not_the_least() -> None:
    said: list[str] = []
    run = run_of(said)
    with contextlib.closing(Diagnostics(run)) as made:
        for loss in (1.0, 9.0, 20.0):
            losses = {"lm loss": torch.tensor(loss)}
            made.after_step(StepResult(losses=losses, skipped=False, grad_norm=None))
    assert not said


def test_the_device_is_waited_for_and_its_memory_told_at_intervals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By one replica of each stage."""
    waits: list[int] = []
    run = run_of([], train_sync_interval=2, log_memory_interval=3, check_for_spiky_loss=False)
    run.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(run.iteration))
    for number, name in enumerate(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 1
    ):
        monkeypatch.setattr(torch.cuda, name, lambda number=number: number << 20)
    for replica in (0, 1):
        monkeypatch.setattr(diagnostics.mpu, "get_data_parallel_rank", lambda r=replica: r)
        with contextlib.closing(Diagnostics(run)) as made:
            for run.iteration in range(1, 5):
                made.after_step(StepResult(losses={}, skipped=False, grad_norm=None))
    assert waits == [2, 4, 2, 4]
    assert capsys.readouterr().out == (
        "[Rank 0] (after 3 iterations) memory (MB) | allocated: 1.00 | max allocated: 2.00 | "
        "reserved: 3.00 | max reserved: 4.00\n"
    )


def test_a_resumed_runs_progress_line_begins_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[Any] = []

    class Line:
        def __init__(self, **options: Any) -> None:
            self.n = options["initial"]
            lines.append((options["initial"], options["total"], options["disable"]))

        def update(self, steps: int) -> None:
            self.n += steps
            lines.append(self.n)

        def close(self) -> None:
            lines.append("closed")

    monkeypatch.setattr(diagnostics, "tqdm", Line)
    run = run_of([], check_for_spiky_loss=False)
    run.iteration = 7
    with contextlib.closing(Diagnostics(run)) as made:
        for run.iteration in (8, 10):
            made.after_step(StepResult(losses={}, skipped=False, grad_norm=None))
    assert lines == [(7, 20, True), 8, 10, "closed"]


def test_the_level_of_the_log_is_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "level", root.level)
    Diagnostics(run_of([], logging_level=logging.ERROR)).close()
    assert root.level == logging.ERROR
    Diagnostics(run_of([])).close()
    assert root.level == logging.ERROR


@pytest.mark.parametrize(("board", "folder"), [("board", "board"), (None, "trace")])
def test_a_profile_lies_beside_the_values_of_tensorboard_or_the_trace(
    board: str | None, folder: str, tmp_path: Path
) -> None:
    run = run_of(
        [], tensorboard_dir=board and str(tmp_path / board), trace_dir=str(tmp_path / "trace")
    )
    exported: list[str] = []
    profiler = SimpleNamespace(export_chrome_trace=exported.append)
    _Profile(run)._export(profiler)
    assert exported == [str(tmp_path / folder / "profile-rank0.pt.trace.json")]
    assert (tmp_path / folder).is_dir()
