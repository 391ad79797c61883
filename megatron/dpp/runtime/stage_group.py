"""The ranks that must run the same tasks in the same order: those that share a stage's collectives.

Tensor and context parallelism, the experts' groups and ``global_aux_loss`` communicate inside a
forward or backward. Groups that overlap are joined, as a rank waits for all members of each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from torch.distributed import ProcessGroup, get_process_group_ranks

from megatron.dpp.errors import ConfigError
from megatron.dpp.mcore.steps import StepCall
from megatron.dpp.transport.rendezvous import host_identity


@dataclass(frozen=True)
class StageGroup:
    """The ranks that follow one leader.

    Args:
        ranks: their global ranks, leader first; empty if this rank decides alone.
        group: a process group of all of them, perhaps with further ranks of the stage.
    """

    ranks: tuple[int, ...] = ()
    group: ProcessGroup | None = None

    def largest(self, *values: float, device: torch.device) -> list[float]:
        """The largest of each value over the group; a collective."""
        if self.group is None:
            return list(values)
        most = torch.tensor(values, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=self.group)
        return [float(value) for value in most]


def stage_group_of(call: StepCall, *, has_links: bool) -> StageGroup:
    """Find the ranks that follow one leader; with experts a collective of the stage's replicas.

    Args:
        has_links: the pipeline has more than one stage, so that the ranks need a board.

    Raises:
        ConfigError: the ranks of a group are on several hosts.
    """
    own = torch.distributed.get_rank()
    collection, groups = call.pg_collection, []
    if collection.tp.size() * collection.cp.size() > 1:
        groups.append(_group(call, "tp_cp", parallel_state.get_tensor_and_context_parallel_group))
    crossing = _crossing(call)
    if not crossing:
        ranks = [sorted(get_process_group_ranks(group)) for group in groups]
        return StageGroup(tuple(ranks[0]), groups[0]) if groups else StageGroup()
    everyone = _all_replicas(call)
    found: list[Any] = [None] * everyone.size()
    mine = [get_process_group_ranks(group) for group in (*groups, *crossing)]
    torch.distributed.all_gather_object(found, (own, host_identity(), mine), group=everyone)
    if has_links:
        _check_hosts(found)
    ranks_of = joined((ranks for _, _, theirs in found for ranks in theirs), own)
    return StageGroup(ranks_of if len(ranks_of) > 1 else (), everyone)


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
        groups.append(
            _group(call, "tp_ep", parallel_state.get_expert_tensor_and_model_parallel_group)
        )
    if call.has_global_aux_loss and call.pg_collection.dp_cp.size() > call.pg_collection.cp.size():
        groups.append(_all_replicas(call))
    return groups


def _all_replicas(call: StepCall) -> ProcessGroup:
    """All ranks of this place in the pipeline, over all replicas."""

    default = partial(parallel_state.get_tensor_and_data_parallel_group, with_context_parallel=True)
    return _group(call, "tp_dp_cp", default)


def _group(call: StepCall, name: str, default: Callable[[], ProcessGroup]) -> ProcessGroup:
    return getattr(call.pg_collection, name, None) or default()


def _check_hosts(found: Iterable[tuple[int, str, list[list[int]]]]) -> None:
    """Refuse a group on several hosts, on all ranks alike: the leader's decisions travel through
    shared memory.
    """
    host_of = {rank: host for rank, host, _ in found}
    for _, _, groups in found:
        for ranks in groups:
            num_hosts = len({host_of[rank] for rank in ranks})
            if num_hosts > 1:
                raise ConfigError(
                    f"ranks {sorted(ranks)} share collectives inside of tasks and are on "
                    f"{num_hosts} hosts: --use-dpp needs tensor, context and expert groups within "
                    "a host; lower --expert-model-parallel-size (or leave out global_aux_loss), "
                    "or train without --use-dpp"
                )
