"""The flags that ``train`` resolves a layout to, on GPUs that this machine need not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.dpp.errors import ConfigError
from megatron.dpp_train.launch.job import hardware_queues
from megatron.dpp_train.launch.main import main, plan

ARTIFICIAL = "--mock-data --tokenizer-type NullTokenizer --vocab-size 50303"


@pytest.mark.parametrize(("micro_batch", "spread"), [(4, False), (64, True)])
def test_sequence_parallelism_is_taken_where_memory_is_short(
    micro_batch: int, spread: bool
) -> None:
    """Sequence parallelism makes layers of these sizes 5 to 12 % slower on H200s."""
    words = f"--mode 3d --tp 2 --model large --gpus 2 --gpu h200 --dry-run {ARTIFICIAL}"
    found = plan(f"{words} --micro-batch-size {micro_batch}".split())
    assert ("--sequence-parallel" in found.resolved.flags) == spread
    asked = plan(f"{words} --sequence-parallel".split())
    assert "--sequence-parallel" in asked.resolved.flags


def test_a_length_that_cannot_be_spread_runs_without() -> None:
    words = f"--mode 3d --tp 2 --gpus 2 --gpu h200 --dry-run --seq-length 1023 {ARTIFICIAL}"
    assert "--sequence-parallel" not in plan(words.split()).resolved.flags
    with pytest.raises(ConfigError, match="1023 is not divisible"):
        plan([*words.split(), "--sequence-parallel"])


@pytest.mark.parametrize(
    ("words", "queues"),
    [
        ("3d --pp 4", "8"),
        ("3d --tp 2 --pp 2", "1"),
        ("3d --tp 2", "1"),
        ("3d --pp 4 --no-dpp", "8"),
        ("simple", "8"),
        ("megatron --tensor-model-parallel-size 2", "1"),
        ("megatron --pipeline-model-parallel-size 2", "8"),
        ("zero --zero-stage 2", "8"),
    ],
)
def test_without_tensor_parallelism_there_are_several_queues(words: str, queues: str) -> None:
    """With one hardware queue a rank sends nothing while its GPU waits for an input, and gradients
    are reduced only after a replayed backward.
    """
    found = plan(f"--mode {words} --gpus 4 --gpu h200 --dry-run {ARTIFICIAL}".split())
    assert hardware_queues(found.resolved.parsed) == queues


@pytest.mark.parametrize("said", ["bf16", "fp16"])
@pytest.mark.parametrize("asked", ["--fp32", "--bf16", "--fp16"])
def test_a_precision_that_is_asked_for_wins_over_a_files(
    said: str, asked: str, tmp_path: Path
) -> None:
    """``--fp32`` wins too, although Megatron has no such flag."""
    path = tmp_path / "mine.yaml"
    path.write_text(f"{said}: true\n")
    for more in ("--procs 1", "--gpus 1 --gpu h200"):
        words = f"--mode simple {more} --dry-run --config {path} {ARTIFICIAL}".split()
        flags = plan([*words, asked]).resolved.flags
        assert {"--fp16", "--bf16"} & set(flags) == {asked} - {"--fp32"}
        assert f"--{said}" in plan(words).resolved.flags


@pytest.mark.parametrize("mode", ["simple", "megatron", "auto"])
def test_a_file_that_is_no_text_is_an_error_of_one_line(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"lr: 0.1\nsave: \xe9t\xe9\n")
    assert main(["--mode", mode, "--procs", "1", "--config", str(path), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert (
        error == f"megatron-dpp train: error: {path}: not UTF-8 text (invalid continuation byte at "
        "byte 14)\n"
    )


def test_a_precision_that_a_file_of_megatrons_own_forbids_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "megatron.yaml"
    path.write_text("bf16: true\nmicro_batch_size: 1\n")
    for asked in ("--fp32", "--fp16"):
        with pytest.raises(ConfigError, match=f"^{asked}: {path} says bf16, "):
            plan(f"--mode megatron --procs 1 --config {path} {asked}".split())


@pytest.mark.parametrize(
    ("words", "flag", "value"),
    [
        ("simple --lr 0.5", "--min-lr", 0.05),
        ("simple --arch bert --model sample", "--seq-length", 128),
        ("3d --pp 4 --batch-size 8 --model sample", "--micro-batch-size", 2),
        ("3d --pp 4 --batch-size 16 --model sample", "--micro-batch-size", 4),
        ("3d --pp 2 --chunks 2 --batch-size 12 --model sample --no-dpp", "--micro-batch-size", 1),
    ],
)
def test_values_that_are_not_given_follow_from_others(words: str, flag: str, value: object) -> None:
    found = plan(f"--mode {words} --procs 4 --dry-run --mock-data".split()).resolved.flags
    assert found[flag] == value


def test_a_static_pipeline_of_chunks_takes_whole_groups_of_microbatches() -> None:
    words = "--mode 3d --procs 2 --pp 2 --chunks 2 --micro-batch-size 1 --batch-size 3 --dry-run"
    with pytest.raises(ConfigError, match=r"1 replicas x 2 stages = 2; nearest possible: 4"):
        plan([*words.split(), "--no-dpp"])
    assert plan(words.split()).resolved.flags["--global-batch-size"] == 3
