"""Profiles of some iterations, and warnings of losses that jump."""

from __future__ import annotations

import contextlib
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp_train.loop import diagnostics
from megatron.dpp_train.loop.diagnostics import Diagnostics
from megatron.dpp_train.loop.logs import StepResult
from megatron.dpp_train.options.run_config import Settings
from megatron.dpp_train.state import note_progress


def run_of(said: list[str], **changes: Any) -> Any:
    args = {
        "profile": False, "train_iters": 20, "logging_level": None, "train_sync_interval": None,
        "log_memory_interval": None, "check_for_spiky_loss": True, "profile_ranks": [0],
        "profile_step_start": 2, "profile_step_end": 4,
    }  # fmt: skip
    return SimpleNamespace(
        args=Settings.of(args | changes), rank=0, iteration=0, is_first=False,
        is_last=True, say_last=said.append,
    )  # fmt: skip


class Profilers:
    """The profilers of PyTorch and CUDA, which note when they begin and end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        self.run: Any = None
        monkeypatch.setattr(torch.profiler, "profile", lambda: self.part("PyTorch's"))
        monkeypatch.setattr(torch.cuda.profiler, "profile", lambda: self.part("CUDA's"))
        monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", lambda: self.part("names"))

    def part(self, name: str) -> Any:
        stack = contextlib.ExitStack()
        stack.callback(lambda: self.told.append(f"end of {name} {self.run.iteration}"))
        stack.export_chrome_trace = lambda path: self.told.append(f"to {path}")  # type: ignore[attr-defined]
        self.told.append(f"{name} {self.run.iteration}")
        return stack

    def train(self, *iterations: int, **changes: Any) -> list[str]:
        self.run = run_of([], **{"profile": True, "use_pytorch_profiler": True} | changes)
        self.run.device = torch.device(changes.get("device", "cpu"))
        made = Diagnostics(self.run)
        for self.run.iteration in iterations:
            made.before_step()
        for _ in range(2):
            made.close()
        return self.told


@pytest.fixture
def profilers(monkeypatch: pytest.MonkeyPatch) -> Profilers:
    return Profilers(monkeypatch)


@pytest.mark.parametrize(("board", "folder"), [("board", "board"), (None, "trace")])
@pytest.mark.parametrize(
    ("iterations", "end"),
    [((0, 1, 2, 3, 4, 5, 2, 3), 4), ((2,), 2)],
    ids=["its iterations", "the run ends before"],
)
def test_a_profile_holds_the_asked_iterations_once_and_is_written_after_its_end(
    iterations: tuple[int, ...], end: int, board: str | None, folder: str, tmp_path: Path,
    profilers: Profilers, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """It is asked by the number of iterations before it, as Megatron-LM counts them, and lies
    beside the values of TensorBoard or the trace."""
    told = profilers.train(
        *iterations, tensorboard_dir=board and str(tmp_path / board),
        trace_dir=str(tmp_path / "trace"),
    )  # fmt: skip
    path = tmp_path / folder / "profile-rank0.pt.trace.json"
    assert told == ["PyTorch's 2", f"end of PyTorch's {end}", f"to {path}"]
    assert path.parent.is_dir() and str(path) in capsys.readouterr().out


def test_only_the_asked_ranks_are_profiled(profilers: Profilers) -> None:
    assert profilers.train(2, profile_ranks=[1]) == []
    assert profilers.train(2, profile=False) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_profile_for_nsight_is_cudas_with_the_names_of_operators(
    device: str, profilers: Profilers
) -> None:
    """On a CPU it is none."""
    told = profilers.train(2, 3, 4, use_pytorch_profiler=False, device=device)
    expected = ["CUDA's 2", "names 2", "end of names 4", "end of CUDA's 4"]
    assert told == (expected if device == "cuda" else [])


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([2.0, None, 20.0, 200.5],
         "iteration 4: lm loss 2.005000E+02 is more than 10 times the largest of the 2"),
        ([50.0, *[2.0] * 100, 21.0], "largest of the 100 before it (2.0"),
        ([1.0, 9.0, 20.0], None),
        ([math.inf, 2.0, 3.0, 31.0], "largest of the 2 before it (3.0"),
        ([math.nan, 2.0, 3.0, 31.0], "largest of the 2 before it (3.0"),
        ([1.0, 50.0, 45.0], "iteration 2: "),
    ],
    ids=["a skipped step has none", "an old large one hides no new", "not the least",
         "infinite hides none", "no number hides none", "the way back is none"],
)  # fmt: skip
def test_a_loss_above_ten_times_the_last_hundred_before_it_is_told(
    losses: list[float | None], told: str | None
) -> None:
    said: list[str] = []
    run = run_of(said)
    with contextlib.closing(Diagnostics(run)) as made:
        for loss in losses:
            run.iteration += 1
            values = {"lm loss": torch.tensor(900.0 if loss is None else loss)}
            made.after_step(StepResult(losses=values, skipped=loss is None, grad_norm=None))
    assert len(said) == (told is not None)
    assert told is None or told in said[0]


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
