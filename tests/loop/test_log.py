"""Output of a training run: memory of every pipeline rank, timers, and no files left behind."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.sim.batches import BatchTokens
from megatron.dpp_train.loop import logs
from megatron.dpp_train.loop.logs import StepResult, TrainingLog
from megatron.dpp_train.options.run_config import Settings
from megatron.dpp_train.state import Progress
from tests.loop.several import corpus
from tests.runtime.launcher import REPOSITORY, run_ranks

DATA = REPOSITORY / "datasets_gpt"
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 "
    "--train-iters 2 --eval-iters 1 --transformer-impl local --device cpu "
    "--pipeline-model-parallel-size 2 --use-dpp --num-workers 1 --dpp-activation-cap 1GiB "
    "--eval-interval 1 --timing-log-level 1 --log-timers-to-tensorboard --log-interval 1 "
    f"--vocab-file {DATA / 'vocab.json'} --merge-file {DATA / 'merges.txt'}"
)


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("board")


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("t")


@pytest.fixture(scope="module")
def output(board: Path, temporary: Path) -> str:
    words = [*f"{FLAGS} {corpus()}".split(), "--tensorboard-dir", str(board)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        return run_ranks(Path(REPOSITORY / "pretrain_gpt.py"), 2, words)


def test_the_loaders_workers_leave_no_folder(output: str, temporary: Path) -> None:
    assert "validation loss" in output
    assert not list(temporary.glob("pymp-*"))
    assert "Traceback" not in output


def test_the_log_says_what_each_rank_may_hold_and_held(output: str) -> None:
    lines = output.splitlines()
    for start in (
        "dynamic pipeline: pipeline rank 0",
        "[rank 1] dynamic pipeline: pipeline rank 1",
    ):
        may = [line for line in lines if line.startswith(f"{start} may hold")]
        assert "1GiB takes its place once" in may[0] and "1GiB at" in may[1], output
    (held,) = (line for line in lines if "most chunk activations held" in line)
    peaks = [float(word.split()[-1]) for word in held.partition("held: ")[2].split(", ")]
    assert len(peaks) == 2 and all(0 < peak <= 4 for peak in peaks), held


def test_timers_are_printed_and_written_for_ranks_with_different_ones(
    output: str, board: Path
) -> None:
    from tensorboard.backend.event_processing import (  # type: ignore[import-untyped]
        event_accumulator,
    )

    assert output.count("(min, max) time across ranks (ms):") == 2
    assert output.count("    forward-backward ....") == output.count("    optimizer ....") == 2
    assert "forward-compute" not in output  # level 2
    written = event_accumulator.EventAccumulator(str(board))
    written.Reload()
    times = [event.value for event in written.Scalars("forward-backward-time")]
    assert len(times) == 2 and min(times) > 0.0


# One rank's log, without a run --------------------------------------------------------------------


class Log:
    """Its lines, the values that it writes, and whether each line reset its timer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.lines: list[str] = []
        self.resets: list[bool] = []
        self.written: list[tuple[int, str, Any]] = []
        values = {
            "log_interval": 3, "tensorboard_log_interval": 2, "log_throughput": True,
            "world_size": 4, "train_iters": 9, "log_timers_to_tensorboard": False,
            "timing_log_level": 0, "log_loss_scale_to_tensorboard": False, "seq_length": 8,
            "log_world_size_to_tensorboard": False, "log_memory_to_tensorboard": False,
        }  # fmt: skip
        self.run: Any = SimpleNamespace(
            args=Settings.of(values | changes), iteration=0, **vars(Progress()),
            recorder=SimpleNamespace(scalars=dict),
            device=torch.device("cpu"), say_ends=self.lines.append,
            timers=lambda name: SimpleNamespace(elapsed=self._elapsed),
        )  # fmt: skip
        writers: Any = SimpleNamespace(
            add=lambda name, value, **_: self.written.append((self.run.iteration, name, value)),
            flush=lambda: None,
        )
        self.made = TrainingLog(self.run, writers)
        monkeypatch.setattr(logs, "flops_of_lengths", lambda args, real, squares: real * 6e12)

    def _elapsed(self, *, barrier: bool, reset: bool) -> float:
        self.resets.append(reset)
        return 6.0

    def add(self, *losses: float, skipped: bool = False) -> None:
        for loss in losses:
            self.run.iteration += 1
            tokens = BatchTokens(real=20, padded=25, squares=100)
            step = StepResult(
                losses={"lm loss": torch.tensor(loss)}, skipped=skipped, grad_norm=1.0,
                tokens=tokens,
            )  # fmt: skip
            self.made.add(step)


def test_a_line_tells_of_the_iterations_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line stands alone; an interval that it falls into keeps its totals."""
    log = Log(monkeypatch)
    log.add(3.0)
    log.add(torch.nan, skipped=True)
    log.add(5.0, 1.0, 1.0, 4.0)
    assert log.resets == [False, True, True]
    for line, loss, skipped in zip(log.lines, (3.0, 4.0, 2.0), (0, 1, 0), strict=True):
        assert f"lm loss: {loss:.6E} |" in line
        assert re.search(rf"skipped iterations: +{skipped} .* nan iterations: +{skipped} ", line)
        count = 1 if line is log.lines[0] else 3
        assert f"iteration (ms): {6000 / count:.1f} | tokens: 20 | padding: 20.0%" in line
        assert f"tokens/s: {round(20 * count / 6)} |" in line
        assert f"(TFLOP/s/GPU): {20 * count / 4:.1f} |" in line
    rates = [(at, value) for at, name, value in log.written if name == "learning-rate"]
    assert [at for at, _ in rates] == [2, 4, 6]
    log = Log(monkeypatch, log_interval=1)
    log.add(3.0, 5.0)
    assert ["lm loss: 5.0" in line for line in log.lines] == [False, True]


def test_the_perplexity_of_a_large_loss_is_bounded() -> None:
    lines: list[str] = []
    run: Any = SimpleNamespace(args=Settings(), say_last=lines.append)
    writers: Any = SimpleNamespace(add=lambda *_, **__: None, flush=lambda: None)
    losses = {"lm loss": torch.tensor(1000.0), "mtp loss": torch.tensor(0.0)}
    logs.print_evaluation(run, "the end", losses, writers)
    assert (
        "lm loss PPL: 4.851652E+08 | mtp loss value: 0.000000E+00 | mtp loss PPL: 1.0" in lines[1]
    )
    assert len(lines[0]) == len(lines[2]) == len(lines[1]) + 1


def test_a_loss_that_is_no_number_is_counted_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line without a loss said "number of nan iterations: 0"."""
    log = Log(monkeypatch)
    log.add(3.0)
    log.add(1.0, torch.nan, 2.0, 3.0, torch.inf)
    assert "lm loss: NAN |" in log.lines[1] and "nan iterations:   1 " in log.lines[1]
    assert "lm loss: INF |" in log.lines[2] and "nan iterations:   1 " in log.lines[2]
    lines: list[str] = []
    run: Any = SimpleNamespace(args=Settings(), say_last=lines.append)
    logs.print_evaluation(run, "the end", {"lm loss": torch.tensor(torch.nan)}, log.made.writers)
    assert "lm loss value: NAN | lm loss PPL: NAN" in lines[1]
