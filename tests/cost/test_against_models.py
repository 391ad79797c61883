"""Estimates against the models that megatron-core builds from the same flags: parameters exactly,
and what autograd saves for the backward to half a percent and a few indices per token."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from megatron.dpp_train.cost.flags import Given, shape_of
from megatron.dpp_train.cost.memory import head_bytes, layer_bytes, rank_parameters
from megatron.dpp_train.cost.shape import RunShape
from megatron.dpp_train.presets.flags import from_argv

pytest.importorskip("megatron.training")

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 500 "
    "--max-position-embeddings 48 --micro-batch-size 2 --global-batch-size 16 --hidden-dropout 0 "
    "--attention-dropout 0 "
)
TENSOR = "--tensor-model-parallel-size 2 "
SEQUENCE = f"{TENSOR}--sequence-parallel "
PIPELINE = "--pipeline-model-parallel-size 2 "
LLAMA = (
    "--swiglu --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights "
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
)
EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 96 --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall "
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_INDICES = 48
"""Bytes per token that estimates leave out: indices and masks of embeddings and loss."""
_TABLES = 4 * 4 * 32 * 16 * 4
"""Bytes that estimates leave out: cosines and sines, which kernels that are not fused keep of each
layer's queries and keys."""
CONFIGURATIONS = (
    (1, 1, ""),
    (2, 1, f"{TENSOR}--bf16"),
    (2, 1, f"{SEQUENCE}--recompute-granularity selective"),
    (2, 1, SEQUENCE + FULL),
    (2, 1, SEQUENCE + LLAMA),
    (2, 2, f"{TENSOR}{PIPELINE}--num-virtual-stages-per-pipeline-rank 2"),
    (1, 2, f"{PIPELINE}--pipeline-model-parallel-layout Ettt|tL"),
    (1, 1, "--position-embedding-type rope --kv-channels 32 --add-qkv-bias --swiglu"),
    (1, 1, f"{EXPERTS}--moe-shared-expert-intermediate-size 32 --moe-layer-freq [0,1,0,1]"),
    (2, 1, f"{EXPERTS}{SEQUENCE}--bf16 --swiglu"),
    (2, 1, f"{EXPERTS}{SEQUENCE}{LLAMA}--qk-layernorm --expert-model-parallel-size 2 "
     "--expert-tensor-parallel-size 1"),
)  # fmt: skip


def shape(tensor: int, pipeline: int, flags: str) -> RunShape:
    given = Given(from_argv((MODEL + flags + " --transformer-impl local").split()))
    return shape_of(given, tensor * pipeline, tensor * pipeline, on_gpu=False, arch="gpt")


def test_parameters_and_saved_bytes_are_those_of_the_models() -> None:
    words = {f"{t} {p} {MODEL}{flags}": shape(t, p, flags) for t, p, flags in CONFIGURATIONS}
    command = [sys.executable, "-m", "tests.cost.models_worker", *words]
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    output = result.stdout.splitlines()
    rows = [json.loads(line[9:]) for line in output if line.startswith("measured ")]
    assert len(rows) == sum(pipeline for _, pipeline, _ in CONFIGURATIONS)
    for row in rows:
        run, name = words[row["name"]], row["name"]
        assert row["parameters"] == rank_parameters(run, row["stage"]), name
        # On a CPU PyTorch's RMSNorm and grouped attention keep what their GPU kernels do not.
        if "saved" in row and LLAMA not in name:
            kept = run.num_layers * layer_bytes(run) + head_bytes(run)
            left_out = _INDICES * 64 * (2 if EXPERTS in name else 1)  # a router has some, too
            left_out += 2 * _TABLES if "rope" in name else 0
            assert kept == pytest.approx(row["saved"], rel=0.005, abs=left_out), name
