"""The links of a schedule, and what else is kept from call to call."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.dpp.config import Backward, DppConfig
from megatron.dpp.core.boundary import Boundaries
from megatron.dpp.core.call import StepCall
from megatron.dpp.errors import ConfigError
from megatron.dpp.inject import Injector
from megatron.dpp.runtime.decisions import Decisions
from megatron.dpp.runtime.links import Links, injector_of, links_of
from megatron.dpp.runtime.stage_group import StageGroup, pipeline_of, stage_group_of
from megatron.dpp.runtime.timer import TaskTimer, timer_for
from megatron.dpp.runtime.topology import Topology

_GROWTH = 2
"""Factor of the length that links have room for when they are opened anew for a longer one."""


class Session:
    """Opens the links of a call. They are kept until another pipeline or a longer sequence comes.

    Args:
        config: transport, delays, recordings.
        seed: of the delays that are injected.
        log: called with each line about links and caps.
        warn: called with each line about a setting that costs time.
    """

    topology: Topology
    group: StageGroup
    links: Links
    boundaries: Boundaries
    timer: TaskTimer
    injector: Injector | None
    decisions: Decisions
    """Kept when links are opened anew, so that recordings and replays go on."""

    def __init__(
        self,
        config: DppConfig,
        seed: int,
        log: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._config, self._seed, self._log, self._warn = config, seed, log, warn
        self.is_open = False
        """Links are open; what is told above is known then."""
        self._length = 0
        self._has_decisions = False
        self._injected_before = 0.0

    @property
    def injected_seconds(self) -> float:
        """Seconds by which tasks were prolonged so far."""
        return self._injected_before + (self.timer.injected_seconds if self.is_open else 0.0)

    def largest(self, call: StepCall, *values: float) -> list[float]:
        """The largest of each value over the ranks that run the same tasks; a collective."""
        return self.group.largest(*values, device=call.boundary_example().device)

    def recorded_backward(self, call: StepCall) -> Backward:
        """The way of the next call's backwards in the leader's recording, which the other ranks do
        not have; a collective.
        """
        own = self.decisions.recorded_backward(self.topology.rank)
        stock = -2.0 if own is None else own.stock if own.split else -1.0
        (stock,) = self.largest(call, stock)
        return Backward(stock=stock) if stock >= 0.0 else Backward(split=False)

    def open(self, call: StepCall) -> None:
        """Open what a call needs.

        Raises:
            ConfigError: the call's tensors do not fit the open links.
        """
        longest = call.longest(self._config.max_tokens)
        wanted = call.boundaries(longest)  # a call's own length may be nominal
        topology = pipeline_of(call.model, call.pg_collection)
        check_chunks(call)
        if self.is_open:
            same = topology == self.topology
            if same and wanted.usual_bytes <= self.boundaries.usual_bytes:
                wanted.check_fits(self.boundaries)
                return
            if same and longest > self._length:  # lengths that grow in many steps open links in few
                longest = max(longest, _GROWTH * self._length)
            self.close_links()  # longer sequences or another model, on all ranks alike
        self._length = longest
        self._connect(call, topology, call.boundaries(longest))

    def _connect(self, call: StepCall, topology: Topology, boundaries: Boundaries) -> None:
        config, self.topology, self.boundaries = self._config, topology, boundaries
        self.injector = injector_of(config, topology, self._seed)
        self.group = stage_group_of(call)
        self.links = links_of(
            topology,
            boundaries.receives,
            boundaries.sends,
            config,
            self._log,
            stage_ranks=self.group.ranks,
            injector=self.injector,
        )
        if reason := self.links.why_not_ahead:
            self._warn(f"dynamic pipeline: no task is launched ahead of its input: {reason}")
        board = self.links.transport.board
        follow = board is not None and board.index > 0
        if not self._has_decisions:
            self.decisions = Decisions(config, self._log, replica_of(call), decides=not follow)
        self.timer = timer_for()
        self._has_decisions = self.is_open = True

    def close_links(self) -> None:
        """Close the links, until the next call opens them. May be called twice."""
        if self.is_open:
            self.decisions.renew()
            self._injected_before += self.timer.injected_seconds
            self.links.transport.close()
            self.is_open = False

    def close(self) -> None:
        """Close links and recordings. May be called twice."""
        self.close_links()
        if self._has_decisions:
            self.decisions.close()
            self._has_decisions = False


def check_chunks(call: StepCall) -> None:
    """Refuse a model of another number of chunks than its configuration has.

    Raises:
        ConfigError: names both.
    """
    expected = call.config.virtual_pipeline_model_parallel_size or 1
    if len(call.model) != expected:
        raise ConfigError(
            f"model: {len(call.model)} chunks were given, but "
            f"virtual_pipeline_model_parallel_size={expected!r} asks for {expected}"
        )


def replica_of(call: StepCall) -> int:
    """The number of this rank's data-parallel replica. The leader's names a recording, so one file
    serves all replicas that follow it.
    """
    index: int = torch.distributed.get_rank(call.pg_collection.dp_cp)
    return index // int(call.pg_collection.cp.size())
