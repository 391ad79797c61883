"""The sample runs on GPUs, with the layers that are there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.launcher import REPOSITORY


@pytest.mark.gpu
@pytest.mark.parametrize("script", ["run_single_gpt.sh", "run_single_bert.sh"])
@pytest.mark.parametrize("dynamic", ["1", "0"])
def test_a_sample_trains(script: str, dynamic: str, tmp_path: Path) -> None:
    settings = {"USE_DPP": dynamic, "TRAIN_ITERS": "3", "EVAL_ITERS": "1", "RUN_DIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=200,
        env=os.environ | settings | {"PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "iteration        3/       3" in done.stdout
