"""Stages that exchange three tensors give the numbers of one process, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path

from tests.runtime.launcher import run_ranks

WORKER = Path(__file__).with_name("several_worker.py")
LATE = "delay:3ms,message-delay:4ms"


def test_equal_to_one_process_fused_and_split() -> None:
    fused, late = {"split_backward": "off", "inject": LATE}, {"inject": LATE}
    cases = [
        {"name": "v1", "p": 2, "m": 5, "runs": [fused, {"transport": "shm"}]},
        {"name": "v2", "p": 2, "v": 2, "m": 4, "runs": [late, fused | {"slots": 1}]},
        {"name": "uneven", "p": 2, "v": 2, "m": 4, "uneven": True, "runs": [fused, late]},
        {"name": "v4", "p": 2, "v": 4, "m": 6, "runs": [{**late, "activation_cap": "strict"}]},
    ]
    output = run_ranks(WORKER, 2, [json.dumps(cases)], timeout=180)
    for case in cases:
        assert f"CASE {case['name']} ok" in output
