"""The tokens of microbatches that known hosts have packed before a training step.

slime, miles, verl and NeMo-RL hold all microbatches of a step when they call the schedule, on every
rank alike. :func:`packed_lengths` reads their lengths there; with ``DPP_ANNOUNCE=1``
:mod:`megatron.dpp.autoload` installs the plug-in with it. They must be the sizes that the forward
steps have, so a host that may pad otherwise gives none.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.utils import get_model_config

from megatron.dpp.core.compat import host_argument

_FP8 = ("fp8", "fp4")


def packed_lengths(step: Mapping[str, Any]) -> list[list[int]] | None:
    """The tokens of the sequences in each microbatch with the host's padding, where padding behind
    the last one counts as one more.

    Args:
        step: the keywords of the schedule's call.

    Returns:
        None for another host, and where this one does not know them before its forward steps.
    """
    iterator = step.get("data_iterator")
    iterator = iterator[0] if isinstance(iterator, list) else iterator
    model = step["model"]
    config = get_model_config(model[0] if isinstance(model, list) else model)
    tensor, context = config.tensor_model_parallel_size, config.context_parallel_size
    if type(iterator).__module__.startswith(("slime.", "miles.")):
        return _of_rollout(iterator, step["num_microbatches"], tensor, context)
    function = step["forward_step_func"]
    function = getattr(function, "func", function)
    engine = getattr(function, "__self__", None)
    if type(engine).__module__.startswith("verl."):
        return _of_verl(engine, iterator, tensor, context)
    if (getattr(function, "__module__", None) or "").startswith("nemo_rl."):
        return _of_nemo_rl(step)
    return None


def _of_rollout(iterator: Any, count: int, tensor: int, context: int) -> list[list[int]] | None:
    """slime's and miles': samples by index, each cut for context parallelism and padded to it, and
    rows padded to a multiple.
    """
    indices = getattr(iterator, "micro_batch_indices", None)
    grows = "multimodal_train_inputs" in iterator.rollout_data  # by tokens of its images
    if not indices or grows or (host_argument("qkv_format") or "thd") != "thd":
        return None
    lengths = iterator.rollout_data["total_lengths"]
    coming = indices[iterator.offset : iterator.offset + count]
    each = 2 * context if context > 1 and not host_argument("allgather_cp") else 1
    rows = [[_padded(lengths[place], each) for place in row] for row in coming]
    multiple = context * tensor * int(host_argument("data_pad_size_multiplier") or 1)
    ends = [_padded(sum(row), multiple) - sum(row) for row in rows]
    return [[*row, end] if end else row for row, end in zip(rows, ends, strict=True)]


def _of_verl(engine: Any, iterator: Any, tensor: int, context: int) -> list[list[int]] | None:
    """verl's: nested rows of documents, each padded to a multiple."""
    config, model = engine.engine_config, engine.tf_config
    padded = getattr(config, "pad_to_length", False) or not config.use_remove_padding
    moves = getattr(config, "dynamic_context_parallel", False)  # rows go to other ranks
    if padded or moves or any(getattr(model, name, None) for name in _FP8):
        return None
    batches: Sequence[Any] = list(copy.copy(iterator))  # the iterator itself stays where it is
    if not all(batch["input_ids"].is_nested for batch in batches):
        return None
    each = tensor * context * (2 if context > 1 else 1)
    return [
        [_padded(length, each) for length in batch["input_ids"].offsets().diff().tolist()]
        for batch in batches
    ]


def _of_nemo_rl(step: Mapping[str, Any]) -> list[list[int]]:
    """NeMo-RL's: with a pipeline each row is padded to the longest, which the call names. Dynamic
    batching, whose rows have several lengths, is refused there by its policy.
    """
    return [[step["seq_length"]] * step["micro_batch_size"]] * step["num_microbatches"]


def _padded(tokens: int, multiple: int) -> int:
    return -(-tokens // multiple) * multiple
