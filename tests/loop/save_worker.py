"""Saves a ``torch_dist`` checkpoint whose only file is a pipe that nobody reads: the save stands
still. Arguments: ``sync`` or ``async``, and the folder.
"""

import os
import sys
import time
from pathlib import Path


def save(kind: str, folder: Path) -> None:
    # Here, because the manager process of an asynchronous save imports this file.
    import torch
    import torch.distributed as dist

    from megatron.dpp.core.cpu import install

    install()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    from megatron.dpp_train.checkpoint.writers import bound_request, bound_writers

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    weight = dist_checkpointing.ShardedTensor.from_rank_offsets("weight", torch.ones(8))
    strategy = get_default_save_sharded_strategy("torch_dist")
    os.mkfifo(folder / "__0_0.distcp")
    with bound_writers(in_background=kind == "async"):
        request = dist_checkpointing.save(
            {"weight": weight}, str(folder), strategy, async_sharded_save=kind == "async"
        )
    AsyncCallsQueue().schedule_async_request(bound_request(request))
    time.sleep(3600)


if __name__ == "__main__":
    save(sys.argv[1], Path(sys.argv[2]))
