"""Stages that exchange three tensors give the numbers of one process, to the last bit."""

from __future__ import annotations

from pathlib import Path

from tests.runtime.cases import case, check

LATE = "delay:3ms,message-delay:4ms"


def test_equal_to_one_process_fused_and_split() -> None:
    fused, late = {"split_backward": "off", "inject": LATE}, {"inject": LATE}
    check(
        2,
        case("v1", 2, 5, fused, {"transport": "shm"}),
        case("v2", 2, 4, late, fused | {"slots": 1}, v=2),
        case("uneven", 2, 4, fused, late, v=2, uneven=True),
        case("v4", 2, 6, late | {"activation_cap": "strict"}, v=4),
        worker=Path(__file__).with_name("several_worker.py"),
    )
