"""The process groups of a call: those that its host passes, or megatron-core's global ones."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core import parallel_state
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
    """The group ``pp``, ``tp_cp``, ``tp_ep`` or ``tp_dp_cp`` of megatron-core's
    ``ProcessGroupCollection``, or the global one where that is None or lacks it."""
    group: ProcessGroup | None = getattr(collection, name, None)
    if group is not None:
        return group
    if name == "tp_dp_cp":
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    else:
        group = {
            "pp": parallel_state.get_pipeline_model_parallel_group,
            "tp_cp": parallel_state.get_tensor_and_context_parallel_group,
            "tp_ep": parallel_state.get_expert_tensor_and_model_parallel_group,
        }[name]()
    assert group is not None
    return group
