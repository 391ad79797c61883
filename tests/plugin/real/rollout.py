"""Rollouts as slime's and miles' actors take them, and the flags of both."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.plugin.real import kit
from tests.plugin.real.kit import SIZE

FLAGS = f"""
    --train-backend megatron --debug-train-only --num-rollout {SIZE.rollouts}
    --rollout-batch-size {SIZE.samples // 2} --n-samples-per-prompt 2
    --global-batch-size {SIZE.samples // 2} --advantage-estimator grpo
    --use-dynamic-batch-size --actor-num-nodes 1 --seed 1234
    --num-layers {SIZE.layers} --hidden-size {SIZE.hidden} --ffn-hidden-size {SIZE.ffn}
    --num-attention-heads {SIZE.heads} --group-query-attention --num-query-groups {SIZE.groups}
    --normalization RMSNorm --swiglu
    --disable-bias-linear --use-rotary-position-embeddings --position-embedding-type rope
    --rotary-base 10000 --norm-epsilon 1e-6 --untie-embeddings-and-output-weights
    --vocab-size {SIZE.vocabulary} --make-vocab-size-divisible-by 1
    --attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --lr-decay-style constant --optimizer adam
    --micro-batch-size 1 --tokenizer-type NullTokenizer --data-pad-size-multiplier 1
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion
"""
_LAYERS = (
    "--transformer-impl transformer_engine --distributed-backend nccl "
    "--spec tests.plugin.real.kit packed_spec"
    if kit.ON_GPU
    else "--transformer-impl local --spec tests.plugin.real.kit packed_spec "
    "--distributed-backend gloo --no-rope-fusion --no-persist-layer-norm --no-bias-swiglu-fusion "
    "--no-bias-dropout-fusion"
)


def parsed(parse_args: Callable[[], Any], flags: str) -> Any:
    """The host's arguments for a pipeline of all ranks."""
    num_ranks, chunks = os.environ["WORLD_SIZE"], int(os.environ.get("CHUNKS", "1"))
    more = f"--hf-checkpoint {os.environ['MODEL']} --ref-load {os.environ['MODEL']} "
    more += f"--actor-num-gpus-per-node {num_ranks} --pipeline-model-parallel-size {num_ranks} "
    more += f"--max-tokens-per-gpu {SIZE.most} {_LAYERS} {os.environ.get('FLAGS', '')}"
    if chunks > 1:
        more += (
            f" --num-layers-per-virtual-pipeline-stage {SIZE.layers // chunks // int(num_ranks)}"
        )
    sys.argv = ["train.py", *f"{flags} {more}".split()]
    return parse_args()


def samples(args: Any, seed: int) -> dict[str, Any]:
    """Samples of unlike lengths with rewards, as a rollout gives them."""
    draw = torch.Generator().manual_seed(seed)
    prompts, responses = SIZE.lengths(seed)
    totals = [sum(pair) for pair in zip(prompts, responses, strict=True)]
    rewards = torch.randn(SIZE.samples, generator=draw).tolist()
    return {
        "tokens": [
            torch.randint(1, SIZE.vocabulary, (n,), generator=draw).tolist() for n in totals
        ],
        "response_lengths": responses, "rewards": rewards, "raw_reward": rewards,
        "truncated": [0] * SIZE.samples, "loss_masks": [[1] * n for n in responses],
        "sample_indices": list(range(SIZE.samples)), "rollout_ids": list(range(SIZE.samples)),
        "rollout_mask_sums": [float(n) for n in responses],
    }  # fmt: skip


def logged(record: kit.Record, args: Any, values: dict[str, Any], **more: Any) -> None:
    """Add what the host logs, but for the times."""
    kept = {name: value for name, value in values.items() if not name.startswith("perf/")}
    record.add("log", kept)
