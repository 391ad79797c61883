"""slime's Megatron actor: log-probabilities of a rollout, then its training steps.

Run by ``run.py``, one process per rank, with slime and Megatron-LM on PYTHONPATH.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.plugin.real import kit

kit.begin(available="slime", counted="slime", connect=False)
kit.stub("transformer_engine", "sglang", "sglang_router", "sgl_kernel", "torch_memory_saver",
         "nvidia_resiliency_ext", "memray", "openai", "qwen_vl_utils")  # fmt: skip
np.__version__ = "1.26.4"  # slime and Megatron-LM assert 1.x
kit.STUBBED.add("numpy.__version__")

import ray  # type: ignore[import-not-found]  # noqa: E402
from slime.backends.megatron_utils import (  # type: ignore[import-not-found]  # noqa: E402
    actor as actors,
)
from slime.backends.megatron_utils import model as models  # noqa: E402
from slime.ray import rollout, train_actor  # type: ignore[import-not-found]  # noqa: E402
from slime.utils.accelerator.cuda import (  # type: ignore[import-not-found]  # noqa: E402
    CUDAAccelerator,
)
from slime.utils.arguments import parse_args  # type: ignore[import-not-found]  # noqa: E402

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


def arguments() -> Any:
    """slime's arguments for a pipeline of all ranks."""
    num_ranks, chunks = os.environ["WORLD_SIZE"], int(os.environ.get("CHUNKS", "1"))
    more = f"--hf-checkpoint {os.environ['MODEL']} --ref-load {os.environ['MODEL']} "
    more += f"--actor-num-gpus-per-node {num_ranks} --pipeline-model-parallel-size {num_ranks} "
    more += f"--max-tokens-per-gpu {MOST} " + os.environ.get("FLAGS", "")
    if chunks > 1:
        more += f" --num-layers-per-virtual-pipeline-stage {4 // chunks // int(num_ranks)}"
    sys.argv = ["train.py", *f"{FLAGS} {more}".split()]
    return parse_args()


def samples(args: Any, seed: int) -> dict[str, Any]:
    """Samples of unlike lengths with rewards, as slime's rollout gives them."""
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
    """Add what slime logs, but for the times."""
    kept = {name: value for name, value in values.items() if not name.startswith("perf/")}
    record.add("log", kept)


def main() -> None:
    record, args = kit.Record(), arguments()
    kit.replace(CUDAAccelerator, "current_device", lambda _: torch.device("cpu"))
    kit.replace(CUDAAccelerator, "device_name", lambda *given: "cpu")
    kit.replace(ray, "put", lambda value, **_: value)
    kit.replace(ray, "get", lambda value, **_: value)
    kit.replace(train_actor, "get_local_gpu_id", lambda: int(os.environ["RANK"]))
    kit.replace(models, "load_checkpoint", lambda *given, **_: (0, 0))
    kit.replace(actors, "init_tracking", lambda *given, **_: None)
    kit.replace(models.logging_utils, "log", partial(logged, record))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    actor = actors.MegatronTrainRayActor(
        size, rank, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    )
    args.num_gpus_per_node = size
    actor.init(args, "actor")
    record.watch(actor.model)
    own = actor.compute_log_prob

    def compute_log_prob(*given: Any, **more: Any) -> Any:
        found = own(*given, **more)
        for name, value in sorted(found.items()):
            record.add(name, value)
        return found

    actor.compute_log_prob = compute_log_prob
    manager = SimpleNamespace(args=args, train_parallel_config=actor.train_parallel_config)
    split = getattr(rollout.RolloutManager, "__ray_actor_class__", rollout.RolloutManager)
    for number in range(args.num_rollout):
        refs = split._split_train_data_by_dp(manager, samples(args, number))
        actor.train(number, refs)
        record.weights(f"{number}", actor.model)
    record.write()


if __name__ == "__main__":
    main()
