"""Sessions: the links of a schedule, and what else is kept from call to call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.dpp.config import Backward, DppConfig
from megatron.dpp.core.boundary import Boundaries
from megatron.dpp.core.steps import StepCall
from megatron.dpp.errors import ConfigError
from megatron.dpp.inject import Injector
from megatron.dpp.runtime.decisions import Decisions
from megatron.dpp.runtime.links import Links, injector_of, links_of, why_not_ahead
from megatron.dpp.runtime.stage_group import StageGroup, pipeline_of, stage_group_of
from megatron.dpp.runtime.timer import TaskTimer, timer_for
from megatron.dpp.runtime.topology import Topology

_GROWTH = 2
"""Factor of the length that links have room for when they are opened anew for a longer one."""


@dataclass(kw_only=True)
class Session:
    """State of one pipeline while its links are open."""

    topology: Topology
    group: StageGroup
    links: Links
    boundaries: Boundaries
    timer: TaskTimer
    injector: Injector | None
    decisions: Decisions
    """Shared by all sessions of a schedule, so that recordings and replays go on."""
    launch_ahead: bool

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


class Sessions:
    """Opens the session of a call. It is kept until another pipeline or a longer sequence comes.

    Args:
        config: transport, delays, recordings.
        seed: of the delays that are injected.
        log: called with each line about links and caps.
        warn: called with each line about a setting that costs time.
    """

    def __init__(
        self,
        config: DppConfig,
        seed: int,
        log: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._config, self._seed, self._log, self._warn = config, seed, log, warn
        self.current: Session | None = None
        """The open session, if there is one."""
        self._length = 0
        self._decisions: Decisions | None = None
        self._injected_before = 0.0

    @property
    def injected_seconds(self) -> float:
        """Seconds by which tasks of all sessions were prolonged so far."""
        now = self.current.timer.injected_seconds if self.current else 0.0
        return self._injected_before + now

    def open(self, call: StepCall) -> Session:
        """The session of a call.

        Raises:
            ConfigError: the call's tensors do not fit the open links.
        """
        longest = call.longest(self._config.max_tokens)
        wanted = call.boundaries(longest)  # a call's own length may be nominal
        topology = pipeline_of(call.model, call.pg_collection)
        check_chunks(call)
        if self.current is not None:
            opened = self.current.boundaries
            same = topology == self.current.topology
            if same and wanted.usual_bytes <= opened.usual_bytes:
                wanted.check_fits(opened)
                return self.current
            if same and longest > self._length:  # lengths that grow in many steps open links in few
                longest = max(longest, _GROWTH * self._length)
            self.close_links()  # longer sequences or another model, on all ranks alike
        self._length = longest
        self.current = self._connect(call, topology, call.boundaries(longest))
        return self.current

    def _connect(self, call: StepCall, topology: Topology, boundaries: Boundaries) -> Session:
        config, own = self._config, topology.ranks[topology.rank]
        injector = injector_of(config, topology, self._seed)
        group = stage_group_of(call)
        links = links_of(
            topology,
            boundaries.receives,
            boundaries.sends,
            config,
            stage_ranks=group.ranks,
            injector=injector,
        )
        for link in links.transport.links():
            self._log(f"dynamic pipeline: rank {own} -> {link.peer}: {link.kind} ({link.reason})")
        reason = why_not_ahead(links.transport)
        if reason is not None:
            self._warn(f"dynamic pipeline: no task is launched ahead of its input: {reason}")
        board = links.transport.board
        follow = board is not None and board.index > 0
        if self._decisions is None:
            self._decisions = Decisions(config, self._log, replica_of(call), decides=not follow)
        return Session(
            topology=topology,
            group=group,
            links=links,
            boundaries=boundaries,
            timer=timer_for(follow=follow),
            injector=injector,
            decisions=self._decisions,
            launch_ahead=reason is None,
        )

    def close_links(self) -> None:
        """Close the links, until the next call opens them. May be called twice."""
        if self.current is not None:
            self.current.decisions.renew()
            self._injected_before += self.current.timer.injected_seconds
            self.current.links.transport.close()
            self.current = None

    def close(self) -> None:
        """Close links and recordings. May be called twice."""
        self.close_links()
        if self._decisions is not None:
            self._decisions.close()
            self._decisions = None


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
