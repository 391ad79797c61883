"""Estimates against what runs on GPUs measured: docs/benchmarks/scaling-h200.md."""

from __future__ import annotations

import pytest

from megatron.dpp.estimate import RunShape, estimate, gpu_device, shape_of
from megatron.dpp.train.arguments import parse_args
from megatron.dpp.train.validate import validate

H200 = gpu_device("NVIDIA H200", 140 * 2**30)
MODEL = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --bf16 "
    "--max-position-embeddings 1024 --transformer-impl local --micro-batch-size 8 "
    "--hidden-dropout 0 --attention-dropout 0 --padded-vocab-size 50304 --mock-data "
    "--train-iters 9 --lr 1e-4 --eval-iters 0 "
)
TP2 = "--tensor-model-parallel-size 2 --global-batch-size 64 "
PP2 = "--pipeline-model-parallel-size 2 --global-batch-size 64 "
V2 = "--num-virtual-stages-per-pipeline-rank 2 "


def gpt_345m(flags: str) -> RunShape:
    """The model of that page on two GPUs, 8 microbatches of 8 samples on each replica."""
    args = parse_args((MODEL + flags).split())
    validate(args, 2)
    shape = shape_of(args, on_gpu=True)
    assert shape.num_microbatches == 8
    return shape


@pytest.mark.parametrize(
    ("flags", "measured_mib"),
    [
        ("--global-batch-size 128", 8613.9),
        (TP2, 5130.4),
        (f"{TP2} --sequence-parallel", 4360.9),
        (f"{TP2} --sequence-parallel --recompute-activations", 4354.8),
        (f"{PP2} --use-dpp --dpp-cuda-graphs off", 10142.9),
        (f"{PP2} --use-dpp --dpp-cuda-graphs off {V2}", 10145.7),
    ],
)
def test_activations_and_workspace_of_the_fullest_stage(flags: str, measured_mib: float) -> None:
    found = estimate(gpt_345m(flags), H200)
    fullest = max(rank.activations + rank.workspace for rank in found.ranks)
    assert fullest / 2**20 == pytest.approx(measured_mib, rel=0.025)
