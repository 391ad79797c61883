"""miles' Megatron actor: log-probabilities of a rollout, then its training steps.

Run by ``run.py``, one process per rank, with miles and its own Megatron-LM on PYTHONPATH.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from tests.plugin.real import kit
from tests.plugin.real.rollout import FLAGS, logged, parsed, samples

kit.begin(available="miles", counted="miles", connect=False)
kit.stub("transformer_engine", "sglang", "sglang_router", "sgl_kernel", "torch_memory_saver",
         "nvidia_resiliency_ext", "memray", "openai", "qwen_vl_utils", "mooncake",
         "polars")  # fmt: skip

import ray  # type: ignore[import-not-found]  # noqa: E402
from miles.backends.megatron_utils import (  # type: ignore[import-not-found]  # noqa: E402
    actor as actors,
)
from miles.backends.megatron_utils import model as models  # noqa: E402
from miles.ray import train_actor  # type: ignore[import-not-found]  # noqa: E402
from miles.ray.rollout.train_data_conversion import (  # type: ignore[import-not-found]  # noqa: E402
    split_train_data_by_dp,
)
from miles.utils.arguments import parse_args  # type: ignore[import-not-found]  # noqa: E402
from miles.utils.ft_utils.indep_dp import (  # type: ignore[import-not-found]  # noqa: E402
    IndepDPInfo,
)
from miles.utils.tracking_utils import tracking  # type: ignore[import-not-found]  # noqa: E402
from sglang.srt.debug_utils.dumper import (  # type: ignore[import-not-found]  # noqa: E402
    DumperConfig,
)
from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found]  # noqa: E402
from sglang_router.launch_router import (  # type: ignore[import-not-found]  # noqa: E402
    RouterArgs,
)


def server_flags(parser: Any) -> None:
    """The flags of the rollout engine that miles asks for, although none runs."""
    parser.add_argument("--dp-size", type=int, default=1)
    parser.add_argument("--enable-dp-attention", action="store_true")


kit.replace(ServerArgs, "add_cli_args", server_flags)
kit.replace(RouterArgs, "add_cli_args", lambda *given, **_: None)
kit.replace(DumperConfig, "_kv_pairs_to_dict", lambda pairs: {})


def main() -> None:
    record, args = kit.Record(), parsed(parse_args, FLAGS)
    kit.replace(ray, "put", lambda value, **_: value)
    kit.replace(ray, "get", lambda value, **_: value)
    kit.replace(train_actor, "get_local_gpu_id", lambda: int(os.environ["LOCAL_RANK"]))
    kit.replace(models, "load_checkpoint", lambda *given, **_: (0, 0))
    kit.replace(actors, "init_tracking", lambda *given, **_: None)
    kit.replace(tracking, "log", partial(logged, record))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    actor = actors.MegatronTrainRayActor(
        args, size, rank, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], "", "actor", 0
    )
    args.num_gpus_per_node = size
    actor.init(args, "actor", indep_dp_info=IndepDPInfo.create_trivial())
    record.watch(actor.model)
    record.timed(actors, "train", "update")
    record.timed(actor, "compute_log_prob", "log-probabilities")
    record.returned(actor, "compute_log_prob")
    for number in range(args.num_rollout):
        refs = split_train_data_by_dp(args, samples(args, number), actor.train_parallel_config)
        actor.train(number, refs)
        record.weights(f"{number}", actor.model)
    record.write()


if __name__ == "__main__":
    main()
