"""Output of a training run: memory of every pipeline rank, timers, and no files left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launcher import REPOSITORY, run_ranks
from tests.train.several import corpus

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
