"""The links of a pipeline of stages, and what the ranks agree on at the beginning of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from megatron.dpp.config import DppConfig
from megatron.dpp.direction import Direction
from megatron.dpp.errors import ConfigError, ProtocolError
from megatron.dpp.runtime.decisions import Decisions
from megatron.dpp.runtime.failure import leave
from megatron.dpp.runtime.links import Links, await_message, injector_of, links_of
from megatron.dpp.runtime.timer import DeviceTimer, TaskTimer
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.schedule import Memory
from megatron.dpp.torch.microbatches import Microbatches
from megatron.dpp.torch.shapes import Probe, Shapes

_GROWTH = 2
"""Factor of the room that links have when they are opened anew for a longer microbatch."""
_LEAST_BYTES = 1 << 16
"""Of a slot, which also has to hold the sizes of a step's microbatches."""


class Session:
    """A pipeline's links, kept from step to step.

    Args:
        stages: of this rank, in the order of its chunks.
        config: transport, cap, policy, recordings.
        together: the ranks that share collectives inside of their tasks; None for those that
            parameters tell.
        log: called with each line about links and caps.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        config: DppConfig,
        together: dist.ProcessGroup | None,
        log: Callable[[str], None],
    ) -> None:
        self._together = together = _together(communicating(stages), together)
        self._config, self._log = config, log
        self._members = list(_ranks(together)) if together is not None else []
        first = stages[0]
        ranks = _ranks(first.group or dist.distributed_c10d._get_default_group())
        self.topology = Topology(ranks, first.group_rank, len(stages))
        self.device = torch.device(first.device)
        self.injector = injector_of(config, self.topology, torch.initial_seed())
        follow = dist.get_rank() not in self._members[:1] and bool(self._members)
        self.decisions = Decisions(config, log, replica_of(ranks)[0], decides=not follow)
        on_gpu = self.device.type == "cuda"
        self.timer: TaskTimer = DeviceTimer() if on_gpu else TaskTimer()
        self.links: Links | None = None
        self.shapes = Shapes(1, ())
        self.longest = 0
        """Size of the longest microbatch so far, or of the longest that the configuration names."""
        self._room = 0
        self._probe = Probe(stages, ranks, config.timeout)

    def begin(self, given: Microbatches, number: int, iteration: int, *, trains: bool) -> list[int]:
        """Agree on the sizes of a step's microbatches, and open links that have room for them.

        The sizes pass from rank to rank in front of the first microbatch, for which a rank waits
        anyway.

        Args:
            number: of microbatches of a whole batch.

        Raises:
            ConfigError: ranks were given different steps.
            TransportError: a peer died, or does not begin the step in time.
        """
        own = given.sizes() or [1] * number
        room = max(self._config.max_tokens, *own)
        if self._room < room and self.links is not None:
            room = max(room, _GROWTH * self._room)
        room, first, *sizes = self._agree([room, int(trains), *own], iteration)
        if bool(first) != trains:
            kinds = ("evaluates", "trains")
            raise ConfigError(
                f"rank {self.topology.ranks[0]} {kinds[first]}, and rank {dist.get_rank()} "
                f"{kinds[trains]}: all ranks of a pipeline have to call step() or eval() alike"
            )
        each = {"arguments": given.args, "keywords": given.kwargs, "targets": given.targets}
        for name, mine in each.items():
            if mine and len(mine) != len(sizes):
                raise ConfigError(
                    f"rank {dist.get_rank()} was given {name} of {len(mine)} microbatches, and "
                    f"rank {self.topology.ranks[0]} runs {len(sizes)}"
                )
        longest = max(self.longest, self._config.max_tokens, *sizes)
        if longest > self.longest:  # which caps count in
            self.longest = longest
            self.decisions.renew()
        if self.links is None:
            self.shapes = self._probe.run(given, sizes.index(max(sizes)), max(sizes))
            self._probe.tell(f"ready {self.topology.rank}", True)
            for place in range(self.topology.num_ranks):  # one that failed opens no links
                self._probe.told(f"ready {place}", place)
        if room > self._room:
            self._open(room)
        return sizes

    def _agree(self, numbers: list[int], iteration: int) -> list[int]:
        """Numbers of the first rank, which pass along the links once these are open."""
        links = self.links
        if links is None:
            if self.topology.rank == 0:
                self._probe.tell("sizes", numbers)
            return list(self._probe.told("sizes", 0))
        on_gpu = self.device.type == "cuda"  # where nothing waits for what is queued
        aside: Any = torch.cuda.Stream(self.device) if on_gpu else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(aside):
            if self.topology.rank > 0:
                numbers = self._take(links, iteration)
            if self.topology.rank < self.topology.num_ranks - 1:
                self._put(links, numbers, iteration)
        return numbers

    def _open(self, room: int) -> None:
        if self.links is not None:
            self.links.transport.flush(self._config.timeout)
        self.close()
        slot = max(_LEAST_BYTES, self.shapes.slot_bytes(room))
        slots = [slot] * self.shapes.num_tensors
        self.links = links_of(
            self.topology,
            slots,
            slots,
            self._config,
            self._log,
            stage_ranks=self._members,
            injector=self.injector,
            device=self.device,
        )
        self._room = room

    def _put(self, links: Links, numbers: list[int], iteration: int) -> None:
        channel = links.outgoing(Direction.FORWARD, 0)
        assert channel is not None
        message = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        parts = links.tensors_out[channel]
        more = {"iteration": iteration, "microbatch": 0, "num_parts": parts}
        for part in range(parts):
            links.transport.put(channel, message if part == 0 else message[:0], part=part, **more)

    def _take(self, links: Links, iteration: int) -> list[int]:
        channel = links.incoming(Direction.FORWARD, 0)
        assert channel is not None
        parts = links.tensors_in[channel]
        before, labels = (links.consumed[channel] + 1) * parts - 1, (iteration, 0)
        await_message(links.transport, channel, before, self._config.timeout, *labels)
        message, *_ = [links.transport.take(channel) for _ in range(parts)]
        links.consumed[channel] += 1
        if message.iteration != iteration or message.tensor.dtype != torch.int64:
            raise ProtocolError(
                f"{links.transport.incoming[channel]}: expected the sizes of step {iteration}, got "
                f"a message of step {message.iteration}; do all ranks run the same step?"
            )
        return list(message.tensor.tolist())

    def account(self, activation: int, deferred: int, size: int) -> None:
        """Take over measured memory, for caps: bytes that the forward of a microbatch of ``size``
        keeps, and that its backward defers; of ranks that run one order the largest.
        """
        found = torch.tensor([activation, deferred], dtype=torch.float64, device=self.device)
        if self._together is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, self._together)
        longest = [each * self.longest / size for each in found.tolist()]
        self.decisions.measured(Memory(activation_bytes=longest[0], deferred_bytes=longest[1]))

    def leave(self, error: BaseException) -> BaseException:
        """Tell the other ranks why a step ends; returns what explains ``error``."""
        if self.links is None:
            self._probe.fail(error)
        return leave(error, self.links.transport if self.links else None)

    def close(self) -> None:
        """Close the links. May be called twice."""
        links, self.links = self.links, None
        if links is not None:
            links.transport.close()


def communicating(stages: Sequence[PipelineStage]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """The groups within which these stages communicate in a forward or backward, by their ranks,
    as far as parameters tell: those of ``DTensor`` meshes, but for replicas under FSDP2 that gather
    once per step.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    replicas, gather = set(), set()
    for root in (stage.submod for stage in stages):
        for module in (each for each in root.modules() if isinstance(each, FSDPModule)):
            state: Any = module._get_fsdp_state()
            first_only = module is root and state._auto_reshard_after_forward
            for sharded in state._fsdp_param_groups:
                found = {_ranks(group) for group in sharded.mesh_info.mesh.get_all_groups()}
                replicas |= found
                gather |= found if sharded._reshard_after_forward and not first_only else set()
        for parameter in root.parameters():
            if isinstance(parameter, DTensor):
                groups |= {_ranks(group): group for group in parameter.device_mesh.get_all_groups()}
    kept = groups.keys() - (replicas - gather)
    return {ranks: groups[ranks] for ranks in kept if len(ranks) > 1}


def _together(
    groups: dict[tuple[int, ...], dist.ProcessGroup], given: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """The group whose ranks run one order of tasks; None if this rank decides alone."""
    ranks = set().union(*groups)
    if given is None and len(groups) == 1:
        (given,) = groups.values()
    if not ranks <= set(_ranks(given) if given is not None else ()):
        raise ConfigError(
            f"stages communicate within their tasks with the ranks {sorted(ranks)}, as DTensor "
            "parameters tell: give a process group of all of them as together="
        )
    return given if given is not None and given.size() > 1 else None


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def replica_of(ranks: Sequence[int]) -> tuple[int, int]:
    """The number of a pipeline among those of the job, and how many there are, where the ranks of
    each have the same distance.
    """
    size, world = len(ranks), dist.get_world_size()
    stride = ranks[1] - ranks[0] if size > 1 else 1
    return ranks[0] // (stride * size) * stride + ranks[0] % stride, max(1, world // size)
