"""The process groups of a call: those that its host passes, or megatron-core's global ones."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

_NAMES = (
    *("tp", "cp", "pp", "embd", "pos_embd", "dp", "dp_cp"),
    *("tp_dp_cp", "gtp_remat", "expt_gtp_remat", "dp_cp_gtp_remat"),  # some versions
)
"""Process groups that a schedule and the finalisation of gradients ask for."""


def default_groups() -> ProcessGroupCollection:
    """megatron-core's global groups, those of ``_NAMES`` that this version has."""
    known = {field.name for field in dataclasses.fields(ProcessGroupCollection)}
    groups: ProcessGroupCollection = ProcessGroupCollection.use_mpu_process_groups(
        [name for name in _NAMES if name in known]
    )
    return groups


def group_of(collection: Any, name: str) -> ProcessGroup:
    """A group of megatron-core's ``ProcessGroupCollection``, or the global one where that is None
    or lacks it."""
    group: ProcessGroup | None = getattr(collection, name, None)
    if group is None:
        group = getattr(ProcessGroupCollection.use_mpu_process_groups([name]), name)
    assert group is not None
    return group
