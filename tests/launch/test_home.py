"""The directory of a run: its name, the flags that fill it, and the log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.dpp.launch.home import flags_of_home, make_home
from tests.conftest import REPOSITORY

ARGV = ["--num-layers", "4", "--hidden-size", "64", "--pipeline-model-parallel-size", "2"]


def test_every_run_has_a_directory_and_latest_is_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    homes = [make_home("gpt", ARGV, 4, {}) for _ in range(3)]
    assert len(set(homes)) == 3
    assert all("-gpt-4x64-tp1-pp2-dp2" in home.name for home in homes)
    assert (tmp_path / "runs" / "latest").resolve() == homes[-1].resolve()
    named = make_home("gpt", ARGV, 4, {"RUN_DIR": "mine"})
    assert named == tmp_path / "mine" and named.is_dir()
    assert (tmp_path / "runs" / "latest").resolve() == homes[-1].resolve()


def test_flags_that_name_a_place_are_kept(tmp_path: Path) -> None:
    argv = [*ARGV, "--trace", "--trace-dir", "benchmark", "--metrics-file", "m.jsonl"]
    assert not {"--trace-dir", "--metrics-file"} & set(flags_of_home(tmp_path, argv))
    flags = flags_of_home(tmp_path, [*ARGV, "--trace"])
    assert flags[flags.index("--trace-dir") + 1] == str(tmp_path / "traces")
    assert flags[flags.index("--metrics-file") + 1] == str(tmp_path / "metrics.jsonl")


def test_the_log_holds_what_is_printed_and_streams_stay_apart(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from megatron.dpp.launch.home import copy_output\n"
        "copy_output(Path(sys.argv[1]))\n"
        "os.execvp('sh', ['sh', '-c', 'seq 20000; echo wrong >&2; exit 7'])"
    )
    log = tmp_path / "train.log"
    ran = subprocess.run(
        [sys.executable, "-c", code, str(log)],
        capture_output=True, text=True, timeout=60, cwd=REPOSITORY,
    )  # fmt: skip
    assert ran.returncode == 7
    assert ran.stdout.splitlines() == [str(number) for number in range(1, 20001)]
    assert ran.stderr == "wrong\n"
    assert sorted(log.read_text().split()) == sorted([*ran.stdout.split(), "wrong"])
