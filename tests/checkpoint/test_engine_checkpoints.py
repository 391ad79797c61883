"""Checkpoints of DeepSpeed's engine that a run can read, and those that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp_train.checkpoint import files as files


def made(folder: Path, stage: int, replicas: int) -> files.Found:
    """The files that the engine writes, without their content."""
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(replicas)]
    if stage == 3:
        names += [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(replicas)]
    else:
        names.append("mp_rank_00_model_states.pt")
    for name in names:
        (folder / name).write_text("x")
    return files.Found(folder, 3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_of_the_same_stage_and_size_reads_it(tmp_path: Path, stage: int) -> None:
    found = made(tmp_path, stage, 2)
    assert found.is_deepspeed
    files.check_engine(found, stage, 2)


@pytest.mark.parametrize(
    ("saved", "stage", "replicas", "why"),
    [
        (2, None, 2, "add --deepspeed-zero-stage"),
        (3, 2, 2, "saved with --deepspeed-zero-stage 3, this run has 2"),
        (2, 3, 2, "saved with --deepspeed-zero-stage 1 or 2, this run has 3"),
        (1, 1, 1, "data-parallel ranks 0, 1, but this run has 1"),
        (1, 1, 3, "data-parallel ranks 0, 1, but this run has 3"),
    ],
)
def test_another_stage_or_size_is_refused(
    tmp_path: Path, saved: int, stage: int | None, replicas: int, why: str
) -> None:
    with pytest.raises(DataError, match=why):
        files.check_engine(made(tmp_path, saved, 2), stage, replicas)


def test_an_empty_share_is_named(tmp_path: Path) -> None:
    found = made(tmp_path, 1, 2)
    (tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt").write_text("")
    with pytest.raises(DataError, match=r"zero_pp_rank_1_.*\.pt: empty; the checkpoint is not"):
        files.check_engine(found, 1, 2)
