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

from megatron.dpp_train.loop import diagnostics
from megatron.dpp_train.loop.diagnostics import Diagnostics, _Profile
from megatron.dpp_train.loop.logs import StepResult
from megatron.dpp_train.state import note_progress


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


@pytest.mark.parametrize("wrong", ["inf", "nan"])
def test_a_loss_that_is_no_number_hides_no_later_spike(wrong: str) -> None:
    """The largest of the losses before would be infinite, or nothing would be above it."""
    said: list[str] = []
    run = run_of(said)
    with contextlib.closing(Diagnostics(run)) as made:
        for loss in (float(wrong), 2.0, 3.0, 31.0):
            run.iteration += 1
            losses = {"lm loss": torch.tensor(loss)}
            made.after_step(StepResult(losses=losses, skipped=False, grad_norm=None))
    assert len(said) == 1 and "iteration 4: " in said[0] and "of the 2 before it" in said[0]


def test_a_spike_counts_among_the_losses_of_those_after_it() -> None:
    """The way back down from it is no spike."""
    said: list[str] = []
    run = run_of(said)
    with contextlib.closing(Diagnostics(run)) as made:
        for loss in (1.0, 50.0, 45.0):
            run.iteration += 1
            losses = {"lm loss": torch.tensor(loss)}
            made.after_step(StepResult(losses=losses, skipped=False, grad_norm=None))
    assert len(said) == 1 and "iteration 2: " in said[0]


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


def test_a_run_without_a_gpu_has_no_memory_of_one_to_tell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diagnostics.mpu, "get_data_parallel_rank", lambda: 0)
    run = run_of([], log_memory_interval=1, check_for_spiky_loss=False)
    run.device = torch.device("cpu")
    with contextlib.closing(Diagnostics(run)) as made:
        made.after_step(StepResult(losses={}, skipped=False, grad_norm=None))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("first", "terminal", "drawn"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_only_rank_0_draws_the_progress_line_and_only_on_a_terminal(
    first: bool, terminal: bool, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden: list[bool] = []
    line = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(
        diagnostics, "tqdm", lambda **options: hidden.append(options["disable"]) or line
    )
    monkeypatch.setattr(diagnostics.sys.stdout, "isatty", lambda: terminal)
    run = run_of([])
    run.is_first = first
    Diagnostics(run).close()
    assert hidden == [not drawn]


def test_the_level_of_the_log_is_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "level", root.level)
    Diagnostics(run_of([], logging_level=logging.ERROR)).close()
    assert root.level == logging.ERROR
    Diagnostics(run_of([])).close()
    assert root.level == logging.ERROR
    Diagnostics(run_of([], logging_level=logging.NOTSET)).close()
    assert root.level == logging.NOTSET


def test_a_profile_begins_before_the_step_that_it_is_asked_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked by the number of iterations before it, as Megatron-LM counts them."""
    asked: list[int] = []
    monkeypatch.setattr(_Profile, "before", lambda _, iteration: asked.append(iteration))
    run = run_of([], profile=True)
    with contextlib.closing(Diagnostics(run)) as made:
        for run.iteration in (0, 7):
            made.before_step()
    assert asked == [0, 7]


@pytest.mark.parametrize("asked", [True, False])
def test_a_profile_that_is_open_at_the_end_of_the_run_ends_with_it(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may end before the last iteration that the flag names."""
    told: list[str] = []

    def start(_: Any) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.callback(told.append, "closed")
        return stack

    monkeypatch.setattr(_Profile, "_start", start)
    run = run_of([], profile=asked)
    made = Diagnostics(run)
    run.iteration = 2
    made.before_step()
    assert told == []
    for _ in range(2):
        made.close()
    assert told == ["closed"] * asked


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_profile_for_nsight_is_cudas_with_the_names_of_operators(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU it is none."""
    told: list[str] = []

    @contextlib.contextmanager
    def part(name: str) -> Any:
        told.append(name)
        yield
        told.append(f"end of {name}")

    monkeypatch.setattr(torch.profiler, "profile", lambda: part("PyTorch's"))
    monkeypatch.setattr(torch.cuda.profiler, "profile", lambda: part("CUDA's"))
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", lambda: part("names"))
    run = run_of([], use_pytorch_profiler=False)
    run.device = torch.device(device)
    profile = _Profile(run)
    profile.before(2)
    profile.close()
    expected = ["CUDA's", "names", "end of names", "end of CUDA's"]
    assert told == (expected if device == "cuda" else [])


def test_a_profile_is_written_after_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has no events before."""
    told: list[str] = []

    @contextlib.contextmanager
    def profiler() -> Any:
        yield
        told.append("ended")

    monkeypatch.setattr(torch.profiler, "profile", profiler)
    monkeypatch.setattr(_Profile, "_export", lambda *_: told.append("written"))
    profile = _Profile(run_of([], use_pytorch_profiler=True))
    profile.before(2)
    assert told == []
    for _ in range(2):
        profile.close()
    assert told == ["ended", "written"]


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


def test_progress_is_noted_by_the_first_rank_line_after_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restarted runs go on with the file."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    run = run_of([], log_progress=True, save=str(tmp_path / "save"), world_size=8)
    note_progress(run, "not by this rank")
    assert not (tmp_path / "save").exists()
    run.is_first = True
    for text in ("Starting job", "Saved checkpoint"):
        note_progress(run, text)
    run.args.log_progress = False
    note_progress(run, "not asked for")
    lines = (tmp_path / "save" / "progress.txt").read_text().splitlines()
    assert [line.split("\t")[1:] for line in lines] == [
        ["Job ID: 17", "# GPUs: 8", "Starting job"],
        ["Job ID: 17", "# GPUs: 8", "Saved checkpoint"],
    ]


def test_a_line_of_progress_that_cannot_be_written_is_told_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    run = run_of([], log_progress=True, save=str(tmp_path), world_size=8)
    run.is_first, run.say = True, said.append
    (tmp_path / "progress.txt").mkdir()
    note_progress(run, "Starting job")
    (line,) = said
    assert line.startswith(f"warning: {tmp_path / 'progress.txt'}: is a directory")
