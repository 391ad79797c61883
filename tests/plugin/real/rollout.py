"""Rollouts as slime's and miles' actors take them, and the flags of both."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.plugin.real import kit

SAMPLES, MOST, PROMPT, RESPONSE = 16, 96, 16, 48
FLAGS = """
    --train-backend megatron --debug-train-only --num-rollout 2 --rollout-batch-size 8
    --n-samples-per-prompt 2 --global-batch-size 8 --advantage-estimator grpo
    --use-dynamic-batch-size --actor-num-nodes 1 --seed 1234
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --normalization RMSNorm --swiglu
    --disable-bias-linear --use-rotary-position-embeddings --position-embedding-type rope
    --rotary-base 10000 --norm-epsilon 1e-6
    --untie-embeddings-and-output-weights --vocab-size 128 --make-vocab-size-divisible-by 1
    --attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --lr-decay-style constant --optimizer adam
    --micro-batch-size 1 --tokenizer-type NullTokenizer --distributed-backend gloo
    --transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-rope-fusion --no-persist-layer-norm --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --data-pad-size-multiplier 1 --spec tests.plugin.real.kit packed_spec
"""


def parsed(parse_args: Callable[[], Any], flags: str) -> Any:
    """The host's arguments for a pipeline of all ranks."""
    num_ranks, chunks = os.environ["WORLD_SIZE"], int(os.environ.get("CHUNKS", "1"))
    more = f"--hf-checkpoint {os.environ['MODEL']} --ref-load {os.environ['MODEL']} "
    more += f"--actor-num-gpus-per-node {num_ranks} --pipeline-model-parallel-size {num_ranks} "
    more += f"--max-tokens-per-gpu {MOST} " + os.environ.get("FLAGS", "")
    if chunks > 1:
        more += f" --num-layers-per-virtual-pipeline-stage {4 // chunks // int(num_ranks)}"
    sys.argv = ["train.py", *f"{flags} {more}".split()]
    return parse_args()


def samples(args: Any, seed: int) -> dict[str, Any]:
    """Samples of unlike lengths with rewards, as a rollout gives them."""
    draw = torch.Generator().manual_seed(seed)
    prompts = torch.randint(2, PROMPT + 1, (SAMPLES,), generator=draw).tolist()
    responses = torch.randint(2, RESPONSE + 1, (SAMPLES,), generator=draw).tolist()
    pairs = list(zip(prompts, responses, strict=True))
    rewards = torch.randn(SAMPLES, generator=draw).tolist()
    return {
        "tokens": [torch.randint(1, 128, (sum(p),), generator=draw).tolist() for p in pairs],
        "response_lengths": responses, "rewards": rewards, "raw_reward": rewards,
        "truncated": [0] * SAMPLES, "loss_masks": [[1] * n for n in responses],
        "sample_indices": list(range(SAMPLES)), "rollout_ids": list(range(SAMPLES)),
        "rollout_mask_sums": [float(n) for n in responses],
    }  # fmt: skip


def logged(record: kit.Record, args: Any, values: dict[str, Any], **more: Any) -> None:
    """Add what the host logs, but for the times."""
    kept = {name: value for name, value in values.items() if not name.startswith("perf/")}
    record.add("log", kept)
