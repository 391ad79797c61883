"""slime's Megatron actor: log-probabilities of a rollout, then its training steps.

Run by ``run.py``, one process per rank, with slime and Megatron-LM on PYTHONPATH.
"""

from __future__ import annotations

import os
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from tests.plugin.real import kit
from tests.plugin.real.rollout import FLAGS, logged, parsed, samples

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


def main() -> None:
    record, args = kit.Record(), parsed(parse_args, FLAGS)
    if not kit.ON_GPU:
        kit.replace(CUDAAccelerator, "current_device", lambda _: torch.device("cpu"))
        kit.replace(CUDAAccelerator, "device_name", lambda *given: "cpu")
    kit.replace(ray, "put", lambda value, **_: value)
    kit.replace(ray, "get", lambda value, **_: value)
    kit.replace(train_actor, "get_local_gpu_id", lambda: int(os.environ["LOCAL_RANK"]))
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
    record.timed(actors, "train", "update")
    record.timed(actor, "compute_log_prob", "log-probabilities")
    record.returned(actor, "compute_log_prob")
    manager = SimpleNamespace(args=args, train_parallel_config=actor.train_parallel_config)
    split = getattr(rollout.RolloutManager, "__ray_actor_class__", rollout.RolloutManager)
    for number in range(args.num_rollout):
        refs = split._split_train_data_by_dp(manager, samples(args, number))
        actor.train(number, refs)
        record.weights(f"{number}", actor.model)
    record.write()


if __name__ == "__main__":
    main()
