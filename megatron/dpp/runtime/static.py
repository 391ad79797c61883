"""megatron-core's own 1F1B and interleaved schedules behind the interface of ``DppSchedule``.

``get_forward_backward_func()`` runs unmodified. Around it are the tasks' random states (so that
dropout draws the same masks), injected delays, the trace, and, when ``DppConfig.transport`` names a
kind, our channels in the place of NCCL or gloo.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from megatron.dpp.core import compat
from megatron.dpp.core.call import StepCall
from megatron.dpp.core.compat import static_schedule
from megatron.dpp.core.graphs.capture import can_capture
from megatron.dpp.core.graphs.slots import ChunkGraphs
from megatron.dpp.core.rng import TaskRng
from megatron.dpp.errors import ConfigError, Text, setting
from megatron.dpp.inject import Injector, Task
from megatron.dpp.runtime.base import PipelineSchedule
from megatron.dpp.runtime.delayed import delayed
from megatron.dpp.runtime.host_trace import (
    COMMUNICATE,
    RECEIVES,
    SENDS,
    Step,
    around_steps,
    traced,
)
from megatron.dpp.runtime.links import await_message, injector_of, open_links, why_not_ahead
from megatron.dpp.runtime.stage_group import geometry_of, pipeline_of
from megatron.dpp.runtime.timer import TaskTimer, timer_for
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.schedule.caps import worst_peak
from megatron.dpp.transport.base import ChannelSpec, Direction, Transport


class StaticSchedule(PipelineSchedule):
    """megatron-core's own schedule.

    Arguments and use are those of :class:`~megatron.dpp.runtime.base.PipelineSchedule`. These
    fields of ``config`` take effect: ``transport`` (``auto`` keeps megatron-core's own exchange),
    with a kind those of links, ``cuda_graphs`` (only ``on`` captures), ``inject`` (messages are
    late with a transport of ours only), and ``task_rng``.
    """

    get_schedule: ClassVar[Callable[..., Any]] = staticmethod(compat.lookup(compat.GET_SCHEDULE))
    """megatron-core's, also where a plug-in stands in its place."""
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
        iteration = self.iteration
        self.iteration += 1
        forward_only = keywords.get("forward_only", False)
        if self._wants_rng(chunks, topology.num_ranks, forward_only=forward_only):
            rng = TaskRng(self._seed, topology.num_ranks, topology.rank)
            function = keywords["forward_step_func"]
            keywords["forward_step_func"] = rng.wrap(function, chunks, iteration)
        with contextlib.ExitStack() as around:
            self._enter(around, keywords, topology, iteration)
            around.enter_context(traced(self.recorder, chunks))
            function = static_schedule(self.get_schedule, keywords)
            return function(**keywords)  # type: ignore[no-any-return]

    @property
    def injected_seconds(self) -> float:
        return self._timer.injected_seconds

    def _enter(
        self,
        around: contextlib.ExitStack,
        keywords: dict[str, Any],
        topology: Topology,
        iteration: int,
    ) -> None:
        if injector := self._injector_of(topology):
            after = self._prolonger(injector, topology, iteration)
            around.enter_context(around_steps(lambda *_: self._timer.begin(), after))
        if self.config.transport != "auto" and topology.num_ranks > 1:
            around.enter_context(over_channels(self._open(keywords, topology)))
        graphed = self.config.cuda_graphs == "on" and can_capture(self._capture)
        if graphed and not keywords.get("forward_only"):
            call = StepCall.checked(**keywords)
            around.enter_context(self._graphs_of(call).bound(call.boundary_example(self.config)))

    @cached_property
    def _timer(self) -> TaskTimer:
        return timer_for()

    def _graphs_of(self, call: StepCall) -> ChunkGraphs:
        if self._graphs is None or self._graphed != call.model:
            self._close_graphs()
            self._graphs = ChunkGraphs(
                call.model,
                None,
                self._log,
                lambda _: True,
                self._capture,
                rows=call.captured_rows(self.config),
                most=partial(most_held, call),
            )
            self._graphed = list(call.model)
        return self._graphs

    def _prolonger(
        self, injector: Injector, topology: Topology, iteration: int
    ) -> Callable[[Step, Any], None]:
        work = [0.0]

        def after(step: Step, _: Any) -> None:
            kind, chunk, microbatch = step
            cost = (1 if kind == "F" else 2) / topology.num_chunks
            task = Task(iteration, kind, chunk, microbatch, work[0], cost)
            work[0] += cost
            self._timer.prolong((kind, chunk), injector.factor(task), injector.seconds(task))
            self._timer.launched((kind, chunk))

        return after

    def _injector_of(self, topology: Topology) -> Injector | None:
        if self._injector is None and (made := injector_of(self.config, topology, self._seed)):
            self._injector = made
            if made.delays_messages and self.config.transport == "auto":
                inject, transport = setting("inject", self.config.inject), setting("transport")
                text = "delays no messages of megatron-core's own exchange"
                line = f"static pipeline: {inject} {text}; {transport} with a kind takes ours"
                self._log(Text(line, inject, transport))
        return self._injector

    def _open(self, keywords: dict[str, Any], topology: Topology) -> ChannelExchange:
        call = StepCall.checked(**keywords)
        found = call.boundaries(call.length)
        slot_bytes = max(*found.receives, *found.sends)
        if slot_bytes > self._slot_bytes:
            self._close_links()  # longer sequences, on all ranks alike
        if self._exchange is None:
            self._slot_bytes = slot_bytes
            specs = ring_channels(topology.ranks, topology.rank, slot_bytes, self.config.slots)
            injector = self._injector_of(topology)
            transport = delayed(open_links(specs, self.config), injector, topology.ranks)
            for link in transport.links():
                self._log(f"static pipeline: link to {link.peer}: {link.kind} ({link.reason})")
            self._exchange = ChannelExchange(transport, self.config.timeout)
        return self._exchange

    def close(self) -> None:
        self._close_graphs()
        self._close_links()

    def _close_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.close()
        self._graphs, self._graphed = None, ()

    def _close_links(self) -> None:
        if self._exchange is not None:
            self._exchange.transport.close()
        self._exchange = None

    def _links(self) -> Transport | None:
        return self._exchange.transport if self._exchange is not None else None


def most_held(call: StepCall) -> int:
    """The most activations that any rank holds."""
    return worst_peak(geometry_of(pipeline_of(call.model, call.pg_collection), call))


def _refuse_several_tensors(keywords: dict[str, Any], topology: Topology) -> None:
    """Refuse several tensors per boundary, of which megatron-core's static schedules send one."""
    if keywords.get("adjust_tensor_shapes_fn") is None or topology.num_ranks == 1:
        return
    call = StepCall.checked(**keywords)
    found = call.boundaries(call.length)
    if found.several:
        raise ConfigError(
            f"adjust_tensor_shapes_fn: {len(found.receives)} tensors received and "
            f"{len(found.sends)} sent per stage boundary; megatron-core's static schedules send "
            "one. Train with the dynamic pipeline, or hand on one tensor"
        )


def ring_channels(
    ranks: tuple[int, ...], rank: int, slot_bytes: int, depth: int
) -> list[ChannelSpec]:
    """The channels of one rank of a static schedule: one per neighbour and direction.

    A static schedule sends and receives in one fixed order, so all chunks share a channel (their
    ``chunk`` is 0), and the last rank is a neighbour of the first.
    """
    specs = set()
    for here, there in zip(ranks, (*ranks[1:], ranks[0]), strict=True):
        if ranks[rank] in (here, there):
            specs.add(ChannelSpec(here, there, 0, Direction.FORWARD, slot_bytes, depth))
            specs.add(ChannelSpec(there, here, 0, Direction.BACKWARD, slot_bytes, depth))
    return sorted(specs, key=lambda spec: (spec.source, spec.destination, spec.direction))


class ChannelExchange:
    """``P2PCommunicator._communicate`` over a transport opened with :func:`ring_channels`.

    Args:
        transport: opened by the caller, and closed by it.
        timeout: seconds to wait for a message.
    """

    def __init__(self, transport: Transport, timeout: float) -> None:
        self.transport, self._timeout = transport, timeout
        self._ahead = why_not_ahead(transport) is None
        self._out = {spec.direction: i for i, spec in enumerate(transport.outgoing)}
        self._in = {spec.direction: i for i, spec in enumerate(transport.incoming)}
        self._num_sent = dict.fromkeys(Direction, 0)
        self._num_taken = dict.fromkeys(Direction, 0)

    def communicate(self, communicator: Any, **asked: Any) -> Any:
        """Run up to two sends and two receives; returns handles if asked not to wait."""
        sent = [name for name in SENDS if asked[f"tensor_{name}"] is not None]
        for name in sent:
            self._put(SENDS[name], asked[f"tensor_{name}"])
        received: dict[str, Any] = dict.fromkeys(RECEIVES)
        wanted = [name for name in RECEIVES if asked[name]]
        if asked.get("wait_on_reqs", True):
            for name in wanted:
                received[name] = self.take(RECEIVES[name]).requires_grad_()
            return *received.values(), None
        handles = {name: SimpleNamespace(wait=lambda: None) for name in sent}
        for name in wanted:
            received[name] = buffer = _empty(communicator.config.pipeline_dtype)
            handles[name] = SimpleNamespace(wait=partial(self._fill, buffer, RECEIVES[name]))
        return *received.values(), handles

    def _fill(self, buffer: torch.Tensor, way: Direction) -> None:
        buffer.data = self.take(way)

    def _put(self, way: Direction, tensor: torch.Tensor) -> None:
        number = self._num_sent[way]
        self._num_sent[way] += 1
        payload = tensor.detach().contiguous()
        self.transport.put(self._out[way], payload, iteration=0, microbatch=number)

    def take(self, way: Direction) -> torch.Tensor:
        """The next message that comes from this side, for which the device may still wait.

        Raises:
            PeerDead: its sender has left.
            TransferTimeout: it did not come in time.
        """
        channel, number = self._in[way], self._num_taken[way]
        await_message(self.transport, channel, number, self._timeout, 0, number, ahead=self._ahead)
        self._num_taken[way] += 1
        return self.transport.take(channel).tensor

    def finish(self) -> None:
        """Wait until all that was taken has come and all that was put has left; errors as there."""
        for way, channel in self._in.items():
            number = self._num_taken[way] - 1
            await_message(self.transport, channel, number, self._timeout, 0, number)
        self.transport.flush(self._timeout)


def _empty(dtype: torch.dtype) -> torch.Tensor:
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    return torch.empty(0, dtype=dtype, device=device, requires_grad=True)


@contextlib.contextmanager
def over_channels(exchange: ChannelExchange) -> Iterator[None]:
    """Send megatron-core's P2P messages over ``exchange`` while the block runs."""
    with compat.patched(COMMUNICATE, lambda original, own, **k: exchange.communicate(own, **k)):
        yield
        exchange.finish()
