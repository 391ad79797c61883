"""Runs whose sequences are cut over context-parallel ranks, or whose experts are grouped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loop.several import train_each

PLAIN = "--train-iters 3 --hidden-dropout 0 --attention-dropout 0 --pipeline-model-parallel-size 2"
PACKED = "--variable-length --overlong cut --packing ffd --global-batch-size 8"
EXPERTS = (
    "--use-dpp --expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 "
    "--disable-bias-linear"
)
CUT = "--context-parallel-size 2"


@pytest.mark.slow
def test_losses_are_those_of_uncut_sequences_and_of_single_experts(tmp_path: Path) -> None:
    runs = train_each(
        tmp_path,
        4,
        {
            "whole": PLAIN,
            "cut-static": f"{PLAIN} {CUT}",
            "cut": f"{PLAIN} {CUT} --use-dpp",
            "packed": f"{PLAIN} {PACKED} --use-dpp",
            "packed-cut-static": f"{PLAIN} {PACKED} {CUT} --dpp-transport shm",
            "packed-cut": f"{PLAIN} {PACKED} {CUT} --use-dpp",
            "experts": f"{PLAIN} {EXPERTS}",
            "experts-grouped": f"{PLAIN} {EXPERTS} --moe-grouped-gemm",
        },
    )
    for one, other in (("whole", "cut"), ("packed", "packed-cut")):
        assert runs[one].column("lm loss") == pytest.approx(runs[other].column("lm loss"), rel=1e-6)
    for one, other in (
        ("cut-static", "cut"),
        ("packed-cut-static", "packed-cut"),
        ("experts", "experts-grouped"),
    ):
        assert runs[one].column("lm loss") == runs[other].column("lm loss")
        assert runs[one].hashes == runs[other].hashes
