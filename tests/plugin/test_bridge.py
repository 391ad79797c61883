"""Megatron-Bridge calls the plugin's schedule from its ``train`` and ``evaluate``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.launcher import REPOSITORY

BRIDGE = os.environ.get("DPP_MEGATRON_BRIDGE", "")
"""The folder of an unpacked wheel of Megatron-Bridge."""


@pytest.mark.slow
def test_bridge_calls_the_dynamic_schedule_with_its_own_arguments() -> None:
    if not (Path(BRIDGE) / "megatron" / "bridge").is_dir():
        pytest.skip("no unpacked wheel of Megatron-Bridge (DPP_MEGATRON_BRIDGE)")
    path = os.pathsep.join((BRIDGE, str(REPOSITORY)))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("bridge_worker.py"))],
        env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
        capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    calls = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    others = ["data_iterator", "forward_step_func", "model", "p2p_communicator", "pg_collection"]
    common = {"num_microbatches": 2, "micro_batch_size": 1, "others": others}
    training = {"forward_only": False, "adjust_tensor_shapes_fn": None, **common}
    assert calls == [
        {"seq_length": 24, "decoder_seq_length": 24, **training},
        {"seq_length": 40, "decoder_seq_length": 40, **training},
        {"seq_length": 32, "forward_only": True, **common},
    ]
    assert done.stderr.count("p2p_communicator is not used") == 1
