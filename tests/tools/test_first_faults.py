"""Faults that a newcomer meets: each ends with, or begins with, one line that names it."""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import psutil
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.dpp import errors
from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp.trace import TraceLayout, open_recorder
from megatron.dpp_train.launch.main import plan
from megatron.dpp_train.options.arguments import parse_args, warnings_of
from megatron.dpp_train.options.environment import check_visible_gpus
from megatron.dpp_train.preflight import check as preflight
from megatron.dpp_train.preflight.files import check_outputs, warnings_of_data
from tests.checkpoint.test_full_disk import FLAGS
from tests.checkpoint.test_full_disk import run as train
from tests.conftest import REPOSITORY
from tests.data.test_sequences import write_chats
from tests.loop.several import corpus
from tests.tools.test_launch_scripts import run

PATH = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])


def command(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": PATH, **more}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=150, env=environment
    )


def test_a_killed_launcher_takes_its_rank_along(tmp_path: Path) -> None:
    """One rank: several also end because they lose each other."""
    words = f"{FLAGS} {corpus()} --train-iters 1000000 --metrics-file {tmp_path}/m".split()
    torchrun = subprocess.Popen(
        [
            *(sys.executable, "-m", "megatron.dpp_train.launch.torchrun", "--standalone"),
            *("--nproc_per_node", "1", str(REPOSITORY / "pretrain_gpt.py"), *words),
        ],
        env={**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "m").is_file():
            assert time.monotonic() < deadline and torchrun.poll() is None
            time.sleep(0.1)
        ranks = psutil.Process(torchrun.pid).children(recursive=True)
        assert ranks
        torchrun.kill()
        torchrun.wait()
        _, alive = psutil.wait_procs(ranks, timeout=60)
        assert not alive
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(torchrun.pid, signal.SIGKILL)


def test_a_misspelt_setting_is_named_with_its_nearest() -> None:
    result = run("run_single_gpt.sh", PIPELINE_PARALEL="4", DRY_RUN="1")
    line = "warning: PIPELINE_PARALEL is no setting (did you mean PIPELINE_PARALLEL?)\n"
    assert (result.returncode, result.stderr) == (0, line)


def test_a_setting_that_is_no_number_is_refused() -> None:
    result = run("run_single_gpt.sh", PIPELINE_PARALLEL="two")
    line = "run_single_gpt.sh: error: PIPELINE_PARALLEL=two: must be a whole number, at least 1\n"
    assert (result.returncode, result.stderr) == (2, line)


@pytest.mark.skipif(
    any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has the GPUs that are named"
)
def test_gpus_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=0,1: this machine has no GPU"):
        check_visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"})
    check_visible_gpus({"CUDA_VISIBLE_DEVICES": ""})
    result = run("run_single_gpt.sh", CUDA_VISIBLE_DEVICES="0")
    assert result.returncode == 2
    why = "error: CUDA_VISIBLE_DEVICES=0: this machine has no GPU"
    assert result.stderr.startswith(f"run_single_gpt.sh: {why}")
    result = command(str(REPOSITORY / "train"), "--max-steps", "5", CUDA_VISIBLE_DEVICES="0")
    assert result.returncode == 2
    assert result.stderr.startswith(f"train: {why}")


@pytest.mark.parametrize("flag", ["--trace-dir", "--metrics-file"])
def test_an_output_that_cannot_be_written_is_found_before_the_start(
    tmp_path: Path, flag: str
) -> None:
    file = tmp_path / "file"
    file.touch()
    args = parse_args(["--trace", flag, str(file / "below")])
    with pytest.raises(DataError, match=rf"{flag} .*: {file} is a file, a directory is expected"):
        check_outputs(args)


@pytest.mark.parametrize("flag", ["--trace-dir", "--metrics-file", "--save", "--tensorboard-dir"])
def test_an_output_is_tried_and_not_only_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flag: str
) -> None:
    """Permissions say yes to root, on file systems that then refuse."""

    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    trace = ["--trace"] if flag == "--trace-dir" else []
    args = parse_args([*trace, flag, str(tmp_path / "below")])
    line = rf"{flag} .*below: {tmp_path} is not writable \(Read-only file system\)"
    with pytest.raises(DataError, match=line):
        check_outputs(args)


def test_a_name_that_tensorboard_cannot_write_is_found_before_the_start(tmp_path: Path) -> None:
    args = parse_args(["--tensorboard-dir", os.fsdecode(os.fsencode(tmp_path) + b"/\xff")])
    with pytest.raises(
        DataError, match=r"--tensorboard-dir .*: TensorBoard writes to names in UTF"
    ):
        check_outputs(args)


@pytest.mark.parametrize(
    "words", [["tools/preprocess_data.py"], ["-m", "megatron.dpp", "preprocess"]]
)
def test_a_python_without_the_packages_is_one_line(words: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-S", *words, "--help"],
        capture_output=True, text=True, timeout=150, cwd=REPOSITORY,
    )  # fmt: skip
    assert ran.returncode == 2 and len(ran.stderr.splitlines()) == 1
    assert re.match(r"\S+: error: \S+ has no package \w+: .*source tools/activate.sh", ran.stderr)


def test_the_short_help_has_each_setting_once_and_whole_words() -> None:
    lines = command(str(REPOSITORY / "pretrain_gpt.py"), "--help").stdout.splitlines()
    assert any(line.endswith(" breadth-first, ...") for line in lines)
    assert not any("--persistent-save-interval" in line for line in lines)


def test_a_run_that_is_already_done_says_so(tmp_path: Path) -> None:
    flags = f"--save {tmp_path} --load {tmp_path} --save-interval 9"
    flags += " --train-iters 1 --lr-decay-iters 9 --ckpt-format torch"
    assert train(flags).returncode == 0
    again = train(flags)
    assert again.returncode == 0
    assert "nothing to train: the checkpoint is at iteration 1, and --train-iters" in again.output


def test_a_run_that_is_done_with_all_its_samples_says_so(tmp_path: Path) -> None:
    """Started again, it ended with ``no samples left``."""
    flags = f"--sft --data-path {write_chats(tmp_path / 'x', [9] * 6)} --split 4,1,1 "
    flags += (
        f"--save {tmp_path / 'saved'} --load {tmp_path / 'saved'} --train-iters 2 --save-interval 2"
    )
    assert train(flags).returncode == 0
    again = train(flags)
    assert again.returncode == 0 and "nothing to train: the checkpoint is at it" in again.output


@pytest.mark.parametrize("start", ["DRY_RUN=1 bash run_single_gpt.sh", "./train --dry-run"])
def test_a_reader_that_leaves_a_dry_run_is_no_error(start: str) -> None:
    result = subprocess.run(
        ["bash", "-c", f"{start} | head -n 1"],
        capture_output=True, text=True, timeout=150, cwd=REPOSITORY,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert result.returncode == 0 and "Traceback" not in result.stderr
    assert "BrokenPipe" not in result.stderr


def test_the_command_and_train_tell_their_version() -> None:
    whole = command("-m", "megatron.dpp", "--version")
    assert whole.returncode == 0 and whole.stdout.startswith("megatron-dpp ")
    assert command("-m", "megatron.dpp", "train", "--version").stdout == whole.stdout
    assert command(str(REPOSITORY / "train"), "--version").stdout == whole.stdout


def test_a_script_runs_with_sh_too() -> None:
    result = subprocess.run(
        ["sh", str(REPOSITORY / "run_single_gpt.sh")],
        capture_output=True, text=True, timeout=150,
        env={"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "", "DRY_RUN": "1"},
    )  # fmt: skip
    assert result.returncode == 0 and "pretrain_gpt.py" in result.stdout, result.stderr


def test_help_is_short_and_of_the_first_rank_alone() -> None:
    script = str(REPOSITORY / "pretrain_gpt.py")
    short = command(script, "--help")
    assert short.returncode == 0
    assert 20 < len(short.stdout.splitlines()) < 50 and "--use-dpp" in short.stdout
    assert len(command(script, "--help-all").stdout.splitlines()) > 1000
    assert command(script, "--help", RANK="1", WORLD_SIZE="2").stdout == ""


def test_a_monitor_of_an_ended_run_ends_and_writes_no_escape_codes(tmp_path: Path) -> None:
    layout = TraceLayout(data=0, pipeline=0, tensor=0, data_size=1, pipeline_size=1, tensor_size=1)
    open_recorder(tmp_path, rank=0, layout=layout).close()
    result = command("-m", "megatron.dpp", "monitor", "--benchmark_dir", str(tmp_path))
    assert result.returncode == 0 and "ended" in result.stdout and "\x1b" not in result.stdout


_OLD = """
import runpy, sys
sys.version_info, name = (3, 9, 18, "final", 0), sys.argv[1]
if name.startswith("megatron"):
    runpy.run_module(name, run_name="__main__")
runpy.run_path(name, run_name="__main__")
"""
DOORS = (
    *("train", "pretrain_gpt.py", "pretrain_bert.py"),
    *("tools/preprocess_data.py", "profiling/aggregate.py"),
)
MODULES = ("megatron.dpp", "megatron.dpp.run")


@pytest.mark.parametrize("door", [*DOORS, *MODULES])
def test_an_old_python_is_named_in_one_line(door: str) -> None:
    path = REPOSITORY / ("megatron/dpp/__init__.py" if door in MODULES else door)
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
    result = command("-c", _OLD, door if door in MODULES else str(path), "--help")
    name = "megatron-dpp" if door in MODULES else Path(door).name
    found = f"Python 3.9.18 at {sys.executable}"
    line = f"{name}: error: {found} is too old: Python 3.10 or newer is needed\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", line)


@pytest.mark.parametrize("script", ["megatron-dpp", "run_single_gpt.sh", "tools/activate.sh"])
def test_an_old_python_is_named_by_every_script(tmp_path: Path, script: str) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.18 && exit 0\nexit 1\n')
    old.chmod(0o755)
    result = subprocess.run(
        ["bash", str(REPOSITORY / script)], capture_output=True, text=True, timeout=60,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": str(old)},
    )  # fmt: skip
    name = script if script == "run_single_gpt.sh" else "setup.sh"
    line = f"{name}: error: Python 3.9.18 at {old} is too old: Python 3.10 or newer is needed; name"
    assert result.returncode != 0 and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(line)


def test_a_data_set_smaller_than_a_sequence_is_a_warning(tmp_path: Path) -> None:
    """It trains, as in Megatron-LM. A split that leaves a set empty is refused."""
    prefix = tmp_path / "small_text_document"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    builder.add_document(torch.tensor([5, 6, 7, 8, 9, 0]), [6])
    builder.finalize(f"{prefix}.idx")
    words = f"{FLAGS} --data-path {prefix} --train-iters 1".split()
    refused = rf"{prefix}.idx: --split 949,50,1 leaves none of its 1 documents for validation"
    with pytest.raises(DataError, match=refused):
        preflight.check("gpt", [*words, "--split", "949,50,1"], 1)
    args, _ = preflight.check("gpt", [*words, "--split", "1,0,0"], 1)
    (line,) = warnings_of_data(args, "gpt")
    assert line == (
        f"{prefix}.bin holds 6 tokens, fewer than a sample of 17 (--seq-length + 1): each sample "
        "repeats them"
    )
    assert not warnings_of_data(args, "bert")  # pads a short document
    for length, number in (("6", 1), ("5", 0)):
        args, _ = preflight.check("gpt", [*words, "--split", "1,0,0", "--seq-length", length], 1)
        assert len(warnings_of_data(args, "gpt")) == number


def test_torchruns_own_report_ends_with_our_error(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    environment = {"TORCHELASTIC_ERROR_FILE": str(path), "RANK": "1", "WORLD_SIZE": "2"}
    result = command(str(REPOSITORY / "pretrain_gpt.py"), "--no-such-flag", **environment)
    assert (result.returncode, result.stderr) == (2, "")  # rank 0 prints it
    failure = ProcessFailure(local_rank=1, pid=77, exitcode=2, error_file=str(path))
    report = str(ChildFailedError("pretrain_gpt.py", {1: failure}))
    (said,) = (line for line in report.splitlines() if "traceback :" in line)
    assert "error: unknown flag --no-such-flag" in said


@pytest.mark.parametrize("fails", ["write_text", "replace"])
def test_torchrun_never_finds_half_an_error(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent would end with a JSONDecodeError."""

    def full(path: Path, *_: object, **__: object) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, fails, full)
        errors.tell_torchrun("error: wrong", printed=True)
    assert not list(tmp_path.iterdir())
    errors.tell_torchrun("error: wrong", printed=True)
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["message"]["message"] == "error: wrong"


def test_a_tenth_of_the_learning_rate_is_printed_as_one() -> None:
    flags = plan(["--procs", "2", "--lr", "6e-4", "--mock-data"]).resolved.flags
    assert str(flags["--min-lr"]) == "6e-05"


def test_a_loss_scale_that_skips_a_short_run_is_a_warning() -> None:
    def lines(**more: object) -> list[str]:
        args = parse_args(["--fp16", "--train-iters", "20"]).frozen().with_(**more)
        return [each for each in warnings_of(args) if "loss-scale" in each]

    (line,) = lines()
    assert "up to 17 of 20; --initial-loss-scale 65536" in line
    assert not lines(initial_loss_scale=65536) and not lines(train_iters=1000)
