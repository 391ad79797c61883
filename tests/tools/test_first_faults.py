"""Faults that a newcomer meets: each ends with, or begins with, one line that names it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron.dpp.cli.arguments import parse_args, warnings_of
from megatron.dpp.cli.environment import check_visible_gpus
from megatron.dpp.cli.files import check_outputs
from megatron.dpp.cli.run_config import RunConfig
from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp.launch.main import plan
from megatron.dpp.trace import TraceLayout, open_recorder
from tests.conftest import REPOSITORY
from tests.tools.test_launch_scripts import run
from tests.train.several import corpus
from tests.train.test_full_disk import FLAGS
from tests.train.test_full_disk import run as train


def command(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **more}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=150, env=environment
    )


def test_a_killed_launcher_takes_its_ranks_along(tmp_path: Path) -> None:
    words = f"{FLAGS} {corpus()} --train-iters 1000000 --metrics-file {tmp_path}/m".split()
    words[words.index("--global-batch-size") + 1] = "2"
    torchrun = subprocess.Popen(
        [
            *(sys.executable, "-m", "megatron.dpp.train.torchrun", "--standalone"),
            *("--nproc_per_node", "2", str(REPOSITORY / "pretrain_gpt.py"), *words),
        ],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
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
        assert len(ranks) >= 2
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
    line = "error: PIPELINE_PARALLEL=two: must be a whole number, at least 1\n"
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
    assert result.stderr.startswith("error: CUDA_VISIBLE_DEVICES=0: this machine has no GPU")


@pytest.mark.parametrize("flag", ["--trace-dir", "--metrics-file"])
def test_an_output_that_cannot_be_written_is_found_before_the_start(
    tmp_path: Path, flag: str
) -> None:
    file = tmp_path / "file"
    file.touch()
    args = parse_args(["--trace", flag, str(file / "below")])
    with pytest.raises(DataError, match=rf"{flag} .*: {file} is a file, a directory is expected"):
        check_outputs(args)


def test_a_run_that_is_already_done_says_so(tmp_path: Path) -> None:
    flags = f"--save {tmp_path} --load {tmp_path} --save-interval 9"
    flags += " --train-iters 1 --lr-decay-iters 9 --ckpt-format torch"
    assert train(flags).returncode == 0
    again = train(flags)
    assert again.returncode == 0
    assert "nothing to train: the checkpoint is at iteration 1, and --train-iters" in again.output


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


def test_a_tenth_of_the_learning_rate_is_printed_as_one() -> None:
    flags = plan(["--procs", "2", "--lr", "6e-4", "--mock-data"]).resolved.flags
    assert str(flags["--min-lr"]) == "6e-05"


def test_a_loss_scale_that_skips_a_short_run_is_a_warning() -> None:
    def lines(**more: object) -> list[str]:
        base = vars(parse_args(["--fp16", "--train-iters", "20"])) | more
        return [each for each in warnings_of(RunConfig(base)) if "loss-scale" in each]

    (line,) = lines()
    assert "up to 17 of 20; --initial-loss-scale 65536" in line
    assert not lines(initial_loss_scale=65536) and not lines(train_iters=1000)
