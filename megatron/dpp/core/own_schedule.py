"""Calls that megatron-core's own schedule can run, and the tokens of their microbatches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron.dpp.core.steps import StepCall


def can_run(call: StepCall, keywords: Mapping[str, Any]) -> bool:
    """True if megatron-core's own schedule can run a call of these keywords. It takes process
    groups only with a communicator of the host's, and one tensor per stage boundary.
    """
    given = [keywords.get(name) is not None for name in ("pg_collection", "p2p_communicator")]
    config, num_ranks, chunks = call.config, call.pg_collection.pp.size(), len(call.model)
    if given[0] != given[1] or call.cut is not None or call.adjust_tensor_shapes_fn:
        return False
    if config.virtual_pipeline_model_parallel_size != (chunks if chunks > 1 else None):
        return False  # megatron-core would take the schedule of another number of chunks
    if config.delay_wgrad_compute:
        return False
    grouped = config.microbatch_group_size_per_vp_stage in (None, num_ranks)
    apart = config.overlap_p2p_comm and not config.batch_p2p_comm  # else two ranks mix messages up
    return chunks == 1 or (grouped and apart and call.num_microbatches % num_ranks == 0)


def counted(call: StepCall, add: Callable[[int], None]) -> StepCall:
    """The call with a forward step that tells the tokens for which the last stage has losses or
    logits.
    """
    original, last, group = call.forward_step_func, call.model[-1], call.pg_collection.pp
    if group.rank() < group.size() - 1:
        return call

    def forward_step(iterator: Any, model: Any, *rest: Any, **options: Any) -> Any:
        result = original(iterator, model, *rest, **options)
        if model is last and isinstance(result[0], torch.Tensor):
            add(math.prod(result[0].shape[:2]))
        return result

    return dataclasses.replace(call, forward_step_func=forward_step)
