"""The tokens of microbatches that known hosts have packed before a training step.

slime, miles, verl and NeMo-RL hold all microbatches of a step when they call the schedule, on every
rank alike. :func:`packed_lengths` reads their lengths there; with ``DPP_ANNOUNCE=1``
:mod:`megatron.dpp.autoload` installs the plug-in with it. They must be the sizes that the forward
steps have, so a host that may pad otherwise gives none.

Megatron-LM (``sft``, ``dataloader_inter_document_masking``) and Megatron-Bridge pack in their data
loaders, whose batches all stages get. So a step's rows can be read before it: :func:`read_ahead`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron.dpp.core import compat
from megatron.dpp.core.cut import sequences_between
from megatron.dpp.errors import ConfigError

_FP8 = ("fp8", "fp4")
_MEGATRON_LM = ("sft", "dataloader_inter_document_masking")
"""Settings under which Megatron-LM's batches have ``cu_seqlens``."""
_BRIDGE = ("enable_in_batch_packing", "enable_offline_packing")
"""Likewise, of Megatron-Bridge's data sets."""
_TO_MIDDLE_STAGES = (0, 17)
"""The first version of Megatron-LM that gives ``cu_seqlens`` to stages in the middle."""
_ENDS = ("cu_seqlens_q_padded", "cu_seqlens_padded", "cu_seqlens_q", "cu_seqlens")
"""Entries of a batch, of which the first that is there counts: sequences have their padding."""


def packed_lengths(step: Mapping[str, Any]) -> list[list[int]] | None:
    """The tokens of the sequences in each microbatch with the host's padding, where padding behind
    the last one counts as one more.

    Args:
        step: the keywords of the schedule's call.

    Returns:
        None for another host, and where this one does not know them before its forward steps.
    """
    iterator, config = compat.listed(step["data_iterator"])[0], compat.config_of(step)
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
    if not indices or grows or (compat.host_argument("qkv_format") or "thd") != "thd":
        return None
    lengths = iterator.rollout_data["total_lengths"]
    coming = indices[iterator.offset : iterator.offset + count]
    each = 2 * context if context > 1 and not compat.host_argument("allgather_cp") else 1
    rows = [[_padded(lengths[place], each) for place in row] for row in coming]
    multiple = context * tensor * int(compat.host_argument("data_pad_size_multiplier") or 1)
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


def read_ahead(step: dict[str, Any]) -> list[list[int]] | None:
    """The sequences of each packed row of a step; a collective of tensor-parallel ranks.

    Args:
        step: the keywords of the schedule's call, which get iterators that give again what was
            read.

    Returns:
        None for a host that packs no rows, or whose rows are not known.

    Raises:
        ConfigError: the host does not give them to all stages.
    """
    of_megatron = next((name for name in _MEGATRON_LM if compat.host_argument(name)), None)
    if of_megatron is None and not _packs_in_bridge(step["forward_step_func"]):
        return None
    if of_megatron is not None:
        _check_middle_stages(step, of_megatron)
    given = step["data_iterator"]
    iterators = list(compat.listed(given))
    rows: list[Any] = [None]
    read = next((n for n, each in enumerate(iterators) if each is not None), None)
    if read is not None:
        coming = [next(iterators[read]) for _ in range(step["num_microbatches"])]
        iterators[read] = itertools.chain(coming, iterators[read])
        step["data_iterator"] = iterators if isinstance(given, list) else iterators[0]
        rows = [[_sequences_of(batch) for batch in coming]]
    group = (step.get("pg_collection") or compat.default_groups()).tp
    if of_megatron is not None and group.size() > 1:  # one tensor-parallel rank reads
        source = torch.distributed.get_global_rank(group, 0)
        torch.distributed.broadcast_object_list(rows, src=source, group=group)
    return rows[0]  # type: ignore[no-any-return]


def _packs_in_bridge(forward_step: Any) -> bool:
    function = getattr(forward_step, "func", forward_step)
    if not (getattr(function, "__module__", None) or "").startswith("megatron.bridge."):
        return False
    states = (each for each in getattr(forward_step, "args", ()) if hasattr(each, "cfg"))
    data = getattr(next((state.cfg for state in states), None), "dataset", None)
    return any(getattr(data, name, False) for name in _BRIDGE)


def _check_middle_stages(step: Mapping[str, Any], name: str) -> None:
    chunks = len(compat.listed(step["model"]))
    version = compat.numbers_of(compat.VERSION)
    if chunks * compat.pipeline_size(step.get("pg_collection")) > 2 and version < _TO_MIDDLE_STAGES:
        raise ConfigError(
            f"{name}=True: Megatron-LM {compat.VERSION} does not tell stages in the middle of a "
            "pipeline where sequences end; slices of packed rows need 0.17"
        )


def _sequences_of(batch: Mapping[str, Any]) -> list[int]:
    """The sequences of a batch, whose samples follow one another in the row."""
    ends = next(batch[name] for name in _ENDS if batch.get(name) is not None)
    samples, length = batch["tokens"].shape
    each = ends.reshape(samples, -1).tolist()
    return [tokens for sample in each for tokens in sequences_between(sample, length)]
