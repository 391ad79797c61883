"""megatron-core's own schedule, for training steps in which ours would only cost time.

On two ranks ``policy="auto"`` keeps Megatron's order. Where launching limits a step, microbatches
have one length and no CUDA graph is replayed, nothing is left to gain from it, and a host of ours
launches a task only when its neighbour has launched what comes before it. So megatron-core's own
schedule runs from then on (docs/decisions/0024-default-policy.md). It gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron.dpp.config import LAUNCH_BOUND_FROM, DppConfig
from megatron.dpp.core.steps import StepCall
from megatron.dpp.errors import Text, setting
from megatron.dpp.runtime.session import Session
from megatron.dpp.schedule.policies import chosen_policy


class OwnSchedule:
    """Chooses, once, whether a model's training steps run in megatron-core's own schedule.

    Args:
        config: leaves the choice open with ``auto`` for policy, memory cap, split backwards and
            transport, and without recordings and injected delays.
        log: called with the line of the choice.
    """

    def __init__(self, config: DppConfig, log: Callable[[str], None]) -> None:
        open_ones = (config.policy, config.split_backward, config.transport, config.activation_cap)
        self._is_open = set(open_ones) == {"auto"} and not (
            config.inject or config.record or config.replay or config.cuda_graphs == "on"
        )
        self._log = log
        self._model: Sequence[torch.nn.Module] = ()
        """The chunks whose steps it runs."""

    def choose(self, call: StepCall, session: Session, launching: float) -> None:
        """Choose after some training steps; a collective of all ranks that train the model.

        Args:
            launching: share of launching in this rank's task time; 0 if its microbatches differ in
                length or CUDA graphs are or will be replayed.
        """
        if not (self._is_open and chosen_policy("auto", session.topology.num_ranks) == "megatron"):
            return
        groups, device = call.pg_collection, call.boundary_example().device
        number = call.num_microbatches  # replicas of unlike numbers might choose unlike schedules
        found = torch.tensor([launching, number, -number], dtype=torch.float64, device=device)
        for group in (groups.tp, groups.pp, groups.dp_cp):
            if group.size() > 1:
                torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN, group=group)
        least, fewest, minus_most = map(float, found)
        alike = fewest == -minus_most
        if alike and least >= LAUNCH_BOUND_FROM and self._can_run(call):
            self._model = call.model
            ours = setting("policy", "megatron")
            line = (
                "dynamic pipeline: megatron-core's own schedule runs from now on: launching takes "
                f"{least:.0%} of the time that tasks run or more, microbatches have one "
                f"length, and no CUDA graph is replayed; {ours} keeps ours"
            )
            self._log(Text(line, ours))

    def runs(self, call: StepCall, keywords: Mapping[str, Any]) -> bool:
        """True if it runs this call, of these arguments: it takes process groups only with a
        communicator of the host's.
        """
        given = [keywords.get(name) is not None for name in ("pg_collection", "p2p_communicator")]
        takes = self._model == call.model and given[0] == given[1]
        return takes and not call.forward_only and self._can_run(call)

    @staticmethod
    def _can_run(call: StepCall) -> bool:
        """True if it can run this call, and as well as ours: of unlike lengths it exchanges each
        shape before a tensor.
        """
        config, num_ranks, chunks = call.config, call.pg_collection.pp.size(), len(call.model)
        if config.virtual_pipeline_model_parallel_size != (chunks if chunks > 1 else None):
            return False  # megatron-core would take the schedule of another number of chunks
        fixed = call.cut is None and not (
            config.variable_seq_lengths
            or config.delay_wgrad_compute
            or call.adjust_tensor_shapes_fn
        )
        if chunks == 1:
            return fixed
        grouped = config.microbatch_group_size_per_vp_stage in (None, num_ranks)
        apart = config.overlap_p2p_comm and not config.batch_p2p_comm
        return fixed and grouped and apart and call.num_microbatches % num_ranks == 0
