"""Packed rows that a host's batches tell before a step.

Megatron-LM (``sft``, ``dataloader_inter_document_masking``) and Megatron-Bridge pack in their data
loaders, whose batches all stages get. So a step's rows can be read before it: :func:`read_ahead`.
Another host announces them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from megatron.dpp.core import compat
from megatron.dpp.core.compat import default_groups
from megatron.dpp.core.cut import sequences_between
from megatron.dpp.errors import ConfigError

_MEGATRON_LM = ("sft", "dataloader_inter_document_masking")
"""Settings under which Megatron-LM's batches have ``cu_seqlens``."""
_BRIDGE = ("enable_in_batch_packing", "enable_offline_packing")
"""Likewise, of Megatron-Bridge's data sets."""
_TO_MIDDLE_STAGES = (0, 17)
"""The first version of Megatron-LM that gives ``cu_seqlens`` to stages in the middle."""
_ENDS = ("cu_seqlens_q_padded", "cu_seqlens_padded", "cu_seqlens_q", "cu_seqlens")
"""Entries of a batch, of which the first that is there counts: sequences have their padding."""


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
    iterators = list(given) if isinstance(given, list) else [given]
    rows: list[Any] = [None]
    read = next((n for n, each in enumerate(iterators) if each is not None), None)
    if read is not None:
        coming = [next(iterators[read]) for _ in range(step["num_microbatches"])]
        iterators[read] = itertools.chain(coming, iterators[read])
        step["data_iterator"] = iterators if isinstance(given, list) else iterators[0]
        rows = [[_sequences_of(batch) for batch in coming]]
    group = (step.get("pg_collection") or default_groups()).tp
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
    model = step["model"]
    chunks = len(model) if isinstance(model, list) else 1
    version = tuple(int(part) for part in compat.VERSION.split(".")[:2])
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
