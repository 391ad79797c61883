"""``train --sft --data chats.jsonl`` from the file to a report, on two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import make_sample_data
import pytest

from megatron.dpp.report import report_command as report
from tests.conftest import REPOSITORY


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_chats_train_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = list(make_sample_data.make_chats(60, 3, median=20))
    make_sample_data.write_jsonl(tmp_path / "chats.jsonl", chats)
    words = (
        f"train --sft --data {tmp_path}/chats.jsonl --tokenizer sample --mode 3d --procs 2 --pp 2 "
        "--chunks 2 --model sample --num-layers 4 --hidden-size 32 --seq-length 256 --overlong cut "
        "--batch-size 8 --micro-batch-size 1 --max-steps 4 --order planned --eval-iters 0 --trace "
        f"--run-dir {tmp_path}/run --trace-dir {tmp_path}/trace "
        f"--metrics-file {tmp_path}/metrics.jsonl"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "megatron.dpp", *words.split()]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=350
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "lm loss" in row]
    assert len(rows) == 4 and rows[-1]["lm loss"] < rows[0]["lm loss"]
    assert all(0 < row["tokens"] < 8 * 256 and row["padding"] == 0 for row in rows)
    capsys.readouterr()
    assert report.main(["--benchmark_dir", str(tmp_path / "trace")]) == 0
    out = capsys.readouterr().out
    assert "us per token" in out and "dynamic" in out
