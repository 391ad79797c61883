"""megatron-core's own 1F1B and interleaved schedules, in the same clothes as ``DppSchedule``.

What is run is ``get_forward_backward_func()``, untouched. Around it are the things that a fair
comparison needs: the tasks' random states (so that dropout draws the same masks), the injected
variability, the trace, and, when ``--dpp-transport`` names a kind, our channels in the place of
NCCL or gloo.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megatron.dpp.errors import ConfigError
from megatron.dpp.mcore.graphs.slots import ChunkGraphs
from megatron.dpp.mcore.rng import TaskRng
from megatron.dpp.mcore.static import (
    ChannelExchange,
    around_steps,
    over_channels,
    ring_channels,
)
from megatron.dpp.mcore.steps import StepCall
from megatron.dpp.mcore.trace_static import instrument_static_schedule
from megatron.dpp.mcore.wgrad.te import refuse_delayed
from megatron.dpp.runtime.base import Replacement
from megatron.dpp.runtime.connections import open_links, pace_for, pipeline_of
from megatron.dpp.runtime.delayed import DelayedTransport
from megatron.dpp.runtime.inject import Injector, Task
from megatron.dpp.runtime.pace import Pace
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.transport.base import Transport


class StaticSchedule(Replacement):
    """megatron-core's own schedule.

    Arguments and use are those of :class:`~megatron.dpp.runtime.base.Replacement`. Of
    ``config``, ``transport`` (``auto`` keeps megatron-core's own exchange; with a kind, what else
    concerns links takes effect, too), ``cuda_graphs`` (only ``on`` takes graphs), ``inject``
    (messages are late where ``transport`` is given) and ``task_rng`` take effect; the rest belongs
    to the dynamic schedule.
    """

    _transport: Transport | None = None
    _exchange: ChannelExchange | None = None
    _slot_bytes = 0
    _injector: Injector | None = None
    _graphs: ChunkGraphs | None = None
    _graphed: Sequence[torch.nn.Module] = ()

    def __call__(self, **keywords: Any) -> list[Any]:
        """Run one step; keywords, result and errors are megatron-core's."""
        model = keywords["model"]
        chunks = list(model) if isinstance(model, list) else [model]
        topology = pipeline_of(chunks, keywords.get("pg_collection"))
        _refuse_several_tensors(keywords, topology)
        config = get_model_config(chunks[0])
        if config.delay_wgrad_compute and not config.overlap_moe_expert_parallel_comm:
            refuse_delayed(chunks, "a static schedule runs no W tasks")
        iteration = self.iteration
        self.iteration += 1
        if self._wants_rng(chunks, topology.num_ranks) and not keywords.get("forward_only"):
            rng = TaskRng(self._seed, topology.num_ranks, topology.rank)
            function = keywords["forward_step_func"]
            keywords["forward_step_func"] = rng.wrap(function, chunks, iteration)
        with contextlib.ExitStack() as around:
            self._enter(around, keywords, topology, iteration)
            function = get_forward_backward_func()
            return function(**keywords)  # type: ignore[no-any-return]

    @property
    def injected_seconds(self) -> float:
        return self._pace.injected_seconds

    def _enter(
        self,
        around: contextlib.ExitStack,
        keywords: dict[str, Any],
        topology: Topology,
        iteration: int,
    ) -> None:
        if self.config.inject:
            around.enter_context(
                around_steps(self._pace.begin, self._prolonger(topology, iteration))
            )
        if self.config.transport != "auto" and topology.num_ranks > 1:
            around.enter_context(over_channels(self._open(keywords, topology)))
        if self._wants_graphs() and not keywords.get("forward_only"):
            call = StepCall.checked(**keywords)
            around.enter_context(self._graphs_of(call).bound(call.boundary_example()))
        around.enter_context(instrument_static_schedule(self._recorder))

    @cached_property
    def _pace(self) -> Pace:
        return pace_for(self.config, follow=True)

    def _wants_graphs(self) -> bool:
        return self.config.cuda_graphs == "on" and self._captures()

    def _graphs_of(self, call: StepCall) -> ChunkGraphs:
        if self._graphs is None or self._graphed != call.model:
            self._close_graphs()
            self._graphs = ChunkGraphs(
                call.model,
                None,
                self._log,
                lambda _: True,
                self._capture,
            )
            self._graphed = list(call.model)
        return self._graphs

    def _prolonger(self, topology: Topology, iteration: int) -> Callable[[str, int, int], None]:
        injector, work = self._injector_of(topology), [0.0]

        def after(kind: str, chunk: int, microbatch: int) -> None:
            cost = (1 if kind == "F" else 2) / topology.num_chunks
            task = Task(iteration, kind, chunk, microbatch, work[0], cost)
            work[0] += cost
            self._pace.prolong((kind, chunk), injector.factor(task), injector.seconds(task))
            self._pace.launched((kind, chunk))

        return after

    def _injector_of(self, topology: Topology) -> Injector:
        if self._injector is None:
            text = self.config.inject or ""
            self._injector = Injector(
                text,
                topology.rank,
                topology.num_ranks,
                self._seed,
                num_chunks=topology.num_chunks,
            )
            if self._injector.delays_messages and self.config.transport == "auto":
                self._log(
                    f"static pipeline: --dpp-inject {text} delays no messages of megatron-core's "
                    "own exchange; --dpp-transport with a kind takes ours"
                )
        return self._injector

    def _open(self, keywords: dict[str, Any], topology: Topology) -> ChannelExchange:
        found = StepCall.checked(**keywords).boundaries()
        slot_bytes = max(*found.receives, *found.sends)
        if slot_bytes > self._slot_bytes:
            self._close_links()  # longer sequences, on all ranks alike
        if self._exchange is None:
            self._slot_bytes = slot_bytes
            specs = ring_channels(topology.ranks, topology.rank, slot_bytes, self.config.slots)
            self._transport = open_links(specs, self.config)
            if self.config.inject and self._injector_of(topology).delays_messages:
                injector = self._injector_of(topology)
                self._transport = DelayedTransport(self._transport, injector, topology.ranks)
            for link in self._transport.links():
                self._log(f"static pipeline: link to {link.peer}: {link.kind} ({link.reason})")
            self._exchange = ChannelExchange(self._transport, self.config.timeout)
        return self._exchange

    def close(self) -> None:
        self._close_graphs()
        self._close_links()

    def _close_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.close()
        self._graphs, self._graphed = None, ()

    def _close_links(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._transport = self._exchange = None
        self._slot_bytes = 0

    def _links(self) -> Transport | None:
        return self._transport


def _refuse_several_tensors(keywords: dict[str, Any], topology: Topology) -> None:
    """megatron-core 0.16.1's communicator would wait for tensors that no stage sends."""
    if keywords.get("adjust_tensor_shapes_fn") is None or topology.num_ranks == 1:
        return
    found = StepCall.checked(**keywords).boundaries()
    if found.several:
        raise ConfigError(
            f"adjust_tensor_shapes_fn: {len(found.receives)} tensors received and "
            f"{len(found.sends)} sent per stage boundary; megatron-core's static schedules send "
            "one. Train with --use-dpp, or hand on one tensor"
        )
