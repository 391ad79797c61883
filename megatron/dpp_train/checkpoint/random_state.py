"""The random generators' states in a checkpoint, in Megatron-LM's form."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron.dpp_train.options.run_config import Settings


def collect(args: Settings, *, sharded: bool) -> Any:
    """Collects the state of every generator, as Megatron-LM stores it.

    Args:
        sharded: gives an object of ``torch_dist``, which knows its place in the layout.
    """
    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    states: list[Any] = [state]
    if args.data_parallel_random_init and mpu.get_data_parallel_world_size() > 1:
        states = [None] * mpu.get_data_parallel_world_size()
        dist.all_gather_object(states, state, group=mpu.get_data_parallel_group())
    if not sharded:
        return states
    shape: tuple[int, ...] = (
        mpu.get_pipeline_model_parallel_world_size(),
        mpu.get_tensor_model_parallel_world_size(),
    )
    place: tuple[int, ...] = (
        mpu.get_pipeline_model_parallel_rank(),
        mpu.get_tensor_model_parallel_rank(),
    )
    replica = mpu.get_data_parallel_rank(with_context_parallel=True)
    if mpu.get_expert_model_parallel_world_size() > 1:
        shape += (mpu.get_data_parallel_world_size(with_context_parallel=True),)
        place += (replica,)
        replica = 0
    return ShardedObject("rng_state", states, shape, place, replica_id=replica)


def restore(args: Settings, states: Any) -> None:
    """Continues from a state that :func:`collect` gave, not sharded."""
    state = states[mpu.get_data_parallel_rank() if args.data_parallel_random_init else 0]
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    graph_safe = tensor_parallel.is_graph_safe_cuda_rng_tracker(tracker)
    tracker.set_states(
        {
            name: tensor_parallel.convert_cuda_rng_state(each, to_graphable=graph_safe)
            for name, each in state["rng_tracker_states"].items()
        }
    )
