"""The ranks that must run the same tasks in the same order: those that share a stage's collectives.

Tensor and context parallelism, the experts' groups and ``global_aux_loss`` communicate inside a
forward or backward. Groups that overlap are joined, as a rank waits for all members of each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup, get_process_group_ranks

from megatron.dpp.core.call import StepCall
from megatron.dpp.core.compat import group_of
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.schedule import Geometry


@dataclass(frozen=True)
class StageGroup:
    """The ranks that follow one leader.

    Args:
        ranks: their global ranks, leader first; empty if this rank decides alone.
        group: a process group of all of them, perhaps with further ranks of the stage.
        one_replica: they are of one data-parallel replica, so their microbatches are the same.
    """

    ranks: tuple[int, ...] = ()
    group: ProcessGroup | None = None
    one_replica: bool = True

    def largest(self, *values: float, device: torch.device) -> list[float]:
        """The largest of each value over the group; a collective."""
        if self.group is None:
            return list(values)
        most = torch.tensor(values, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=self.group)
        return [float(value) for value in most]


def stage_group_of(call: StepCall) -> StageGroup:
    """Find the ranks that follow one leader; with experts a collective of the stage's replicas."""
    own = torch.distributed.get_rank()
    collection, groups = call.pg_collection, []
    if collection.tp.size() * collection.cp.size() > 1:
        groups.append(group_of(collection, "tp_cp"))
    crossing = _crossing(call)
    if not crossing:
        ranks = [sorted(get_process_group_ranks(group)) for group in groups]
        return StageGroup(tuple(ranks[0]), groups[0]) if groups else StageGroup()
    everyone = group_of(call.pg_collection, "tp_dp_cp")
    found: list[Any] = [None] * everyone.size()
    mine = [get_process_group_ranks(group) for group in (*groups, *crossing)]
    torch.distributed.all_gather_object(found, mine, group=everyone)
    ranks_of = joined((ranks for theirs in found for ranks in theirs), own)
    one_replica = len(ranks_of) <= collection.tp.size() * collection.cp.size()
    return StageGroup(ranks_of if len(ranks_of) > 1 else (), everyone, one_replica)


def joined(groups: Iterable[Collection[int]], rank: int) -> tuple[int, ...]:
    """The ranks that overlapping groups connect with ``rank``, in ascending order."""
    members, rest = {rank}, [set(group) for group in groups]
    touching = [group for group in rest if group & members]
    while touching:
        members.update(*touching)
        rest = [group for group in rest if not group <= members]
        touching = [group for group in rest if group & members]
    return tuple(sorted(members))


def _crossing(call: StepCall) -> list[ProcessGroup]:
    """The groups inside of tasks that may hold several data-parallel replicas."""
    config = call.config
    if not getattr(config, "num_moe_experts", None):
        return []
    groups = []
    expert_tensor = config.expert_tensor_parallel_size or config.tensor_model_parallel_size
    if config.expert_model_parallel_size > 1 or config.tensor_model_parallel_size % expert_tensor:
        groups.append(group_of(call.pg_collection, "tp_ep"))
    if call.has_global_aux_loss and call.pg_collection.dp_cp.size() > call.pg_collection.cp.size():
        groups.append(group_of(call.pg_collection, "tp_dp_cp"))
    return groups


def pipeline_of(chunks: list[torch.nn.Module], pg_collection: Any = None) -> Topology:
    """The place of this rank, by the given process groups or else megatron-core's own."""
    group = group_of(pg_collection, "pp")
    ranks = torch.distributed.get_process_group_ranks(group)
    return Topology(tuple(ranks), torch.distributed.get_rank(group), len(chunks))


def geometry_of(
    topology: Topology, call: StepCall, w_pieces: tuple[int, ...] | None = None
) -> Geometry:
    """A call as schedules see it on this rank; ``w_pieces`` as in :class:`Geometry`."""
    return topology.geometry(
        call.num_microbatches,
        forward_only=call.forward_only,
        group=call.config.microbatch_group_size_per_vp_stage or None,
        w_pieces=w_pieces,
        groups=call.cut.groups if call.cut is not None else (),
    )
