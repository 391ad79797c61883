"""``DppSchedule``: the dynamic pipeline in the place of megatron-core's ``forward_backward_func``.

    with DppSchedule(DppConfig()) as forward_backward:
        losses = forward_backward(
            forward_step_func=..., data_iterator=..., model=...,
            num_microbatches=..., seq_length=..., micro_batch_size=...,
        )

The first call inspects the model and the process groups and opens the links; later calls reuse
them. The objects of one iteration are built per call.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from megatron.dpp.config import GRAPHS_PAY_FROM, DppConfig
from megatron.dpp.core.boundary import Boundaries
from megatron.dpp.core.expert_trace import traced_experts
from megatron.dpp.core.graphs.pools import POOL_GROWTH
from megatron.dpp.core.graphs.slots import ChunkGraphs
from megatron.dpp.core.memory import room
from megatron.dpp.core.rng import TaskRng
from megatron.dpp.core.steps import Stage, StepCall
from megatron.dpp.core.wgrad.linear import WeightGradients
from megatron.dpp.core.wgrad.own_way import refuse_shared
from megatron.dpp.core.wgrad.te import refuse_delayed
from megatron.dpp.errors import ConfigError, core_setting, setting
from megatron.dpp.inject import Injector
from megatron.dpp.runtime.agreement import decider_for
from megatron.dpp.runtime.base import PipelineSchedule
from megatron.dpp.runtime.decisions import Decisions
from megatron.dpp.runtime.delayed import DelayedTransport
from megatron.dpp.runtime.executor import Executor
from megatron.dpp.runtime.links import Links, open_links, why_not_ahead
from megatron.dpp.runtime.stage_group import StageGroup, stage_group_of
from megatron.dpp.runtime.timer import TaskTimer, timer_for
from megatron.dpp.runtime.topology import Topology, pipeline_of
from megatron.dpp.schedule import Geometry, LastRank, Memory
from megatron.dpp.schedule.reference import num_warmup
from megatron.dpp.transport.base import Transport

_GROWTH = 2
"""Factor of the length that links have room for when they are opened anew for a longer one."""


@dataclasses.dataclass(kw_only=True)
class _Session:
    """State that is kept from call to call."""

    topology: Topology
    group: StageGroup
    links: Links
    boundaries: Boundaries
    timer: TaskTimer
    injector: Injector | None
    rng: TaskRng
    launch_ahead: bool


class DppSchedule(PipelineSchedule):
    """The dynamic pipeline.

    Arguments and use are those of :class:`~megatron.dpp.runtime.base.PipelineSchedule`.
    """

    _always_links = True
    peak_held = 0.0
    """Largest number of chunk activations that this rank has held so far."""
    num_out_of_order = 0
    """Forwards and backwards of the last call that deviated from Megatron's order."""
    host_us_per_task = 0.0
    """Host microseconds per task of the last call, without PyTorch's launches."""
    policy: str | None = None
    """Policy of the next call, in the place of the configuration's."""
    _announced: Sequence[int] | None = None
    _session: _Session | None = None
    _length = 0
    """The sequence length that the links have room for."""
    _decisions: Decisions | None = None
    _injected_before = 0.0
    _weight_gradients: WeightGradients | None = None
    _graphs: ChunkGraphs | None = None
    _prepared_model: Sequence[torch.nn.Module] = ()
    _prepared_parameters: Sequence[torch.nn.Parameter] = ()
    _prepared_trained: Sequence[bool] = ()

    def __call__(self, **keywords: Any) -> list[Any]:
        """Run all forwards and backwards of one step; keywords and result are megatron-core's.

        Returns:
            The loss function's reduced values, one entry per microbatch, on the last stage; an
            empty list elsewhere.

        Raises:
            ConfigError: an argument or a model setting that cannot be honoured, by name.
            TransportError: a peer died, or a message did not arrive in time.
        """
        call = self._checked(**keywords)
        session = self._open_session(call)
        split = not call.forward_only and self._prepare(call)
        topology, iteration = session.topology, self.iteration
        self.iteration += 1
        if self._wants_rng(call.model, topology.num_ranks, forward_only=call.forward_only):
            function = session.rng.wrap(call.forward_step_func, call.model, iteration)
            call = dataclasses.replace(call, forward_step_func=function)
        weights = self._weight_gradients if split else None
        geometry = topology.geometry(call, weights.num_pieces if weights else None)
        window = num_warmup(geometry) + 1
        stage = Stage(call, topology.rank, topology.num_ranks, window, weights)
        assert self._decisions is not None
        measure = self._decisions.wants_measuring and not call.forward_only
        if measure:
            stage.measure()
        with contextlib.closing(stage):
            stage.open()
            with self._bound(call):
                largest, first = self._execute(
                    session, self._decisions, stage, geometry, split, iteration
                )
            if not call.forward_only:
                self._account(call, largest / first, self._decisions, stage if measure else None)
            with self.recorder.span("grad-sync"):
                return stage.finish()

    def check(self, **keywords: Any) -> None:
        """Check that a call with these keywords can run; no collective.

        Raises:
            ConfigError: as the call itself.
        """
        call = self._checked(**keywords)
        call.boundaries(call.length)
        self._check_chunks(call)
        if not call.forward_only:
            self._prepare(call)

    def announce(self, sizes: Sequence[int]) -> None:
        """Tell the tokens of each microbatch of the next call, on all ranks alike.

        Without this a rank learns a size when the microbatch's first forward begins there.
        """
        self._announced = list(sizes)

    def _checked(self, **keywords: Any) -> StepCall:
        call = StepCall.checked(**keywords)
        call.refuse_ordered()
        call.check_length(call.longest(self.config.max_tokens))
        return call

    def own_work_seconds(self, num_microbatches: int) -> float:
        """Seconds of this rank's own tasks in one step, by the durations measured so far."""
        if self._session is None:
            return 0.0
        durations = self._session.timer.durations
        pieces = self._weight_gradients.num_pieces if self._weight_gradients else ()
        once = sum(took for (kind, _), took in durations.items() if kind != "W")
        weights = sum(n * durations.get(("W", chunk), 0.0) for chunk, n in enumerate(pieces))
        return num_microbatches * (once + weights)

    @property
    def injected_seconds(self) -> float:
        now = self._session.timer.injected_seconds if self._session else 0.0
        return self._injected_before + now

    def _execute(
        self,
        session: _Session,
        decisions: Decisions,
        stage: Stage,
        geometry: Geometry,
        split: bool,
        iteration: int,
    ) -> tuple[int, int]:
        """Run the tasks; returns the tokens of the longest microbatch and of the first."""
        links, most = session.links, self.config.max_tokens
        tokens = stage.call.tokens(stage.call.longest(most), most)
        sizes, self._announced = self._announced, None
        known = tokens.of_rank(sizes) if sizes and session.group.one_replica else None
        scheduler = decisions.scheduler(
            geometry,
            split=split,
            largest=tokens.largest,
            sizes=known,
            policy=self._policy_of(stage.call),
        )
        decider = decider_for(scheduler, links.channels.receiving, links.transport.board)
        decider.start(links.consumed)
        executor = Executor(
            runner=stage,
            decider=decider,
            links=links,
            recorder=self.recorder,
            timer=session.timer,
            injector=session.injector,
            split_backward=split,
            iteration=iteration,
            timeout=self.config.timeout,
            launch_ahead=session.launch_ahead,
            count_tokens=tokens.count,
            sizes_agree=session.group.one_replica,
        )
        executor.run()
        links.consume(geometry)
        decisions.ran(scheduler, executor.actions, split=split)
        self.peak_held = max(self.peak_held, scheduler.peak_held)
        self.num_out_of_order = scheduler.num_out_of_order
        self.host_us_per_task = executor.overhead_ns / 1e3 / max(len(executor.actions), 1)
        return tokens.largest, executor.first_size or tokens.largest

    def _policy_of(self, call: StepCall) -> str | None:
        """The policy of a call in the place of the configuration's, if there is one."""
        if not call.forward_only:
            return self.policy
        order = self.config.forward_only_order
        keeps = order == "megatron" or (order == "auto" and call.replays_routing)
        return "megatron" if keeps else "depth-first"

    def _account(
        self, call: StepCall, longest: float, decisions: Decisions, measured: Stage | None
    ) -> None:
        """Pass on the measured memory of an activation: the eager one first, a graph's slot later.
        The ranks of a stage use their largest, as one of them decides for all. Microbatch 0 is
        measured, and the cap counts in activations of the longest, which is ``longest`` times as
        long.
        """
        if measured is not None:
            last = self._last_rank(measured)
            activation, deferred, head, layers = self._stage_max(
                call,
                longest * last.activation_bytes,
                longest * max(measured.deferred_bytes.values(), default=0),
                last.head_room,
                last.layers,
            )
            decisions.measured(
                Memory(
                    activation_bytes=activation,
                    deferred_bytes=deferred,
                    head_room=head,
                    last_layers=layers,
                )
            )
        graphs = self._graphs
        if graphs is None or not graphs.awaits_size:
            return
        (slot_bytes,) = self._stage_max(call, graphs.slot_bytes(decisions.activation_bytes))
        if slot_bytes:
            graphs.keep_size(slot_bytes)
            decisions.measured_slots(slot_bytes)

    def _stage_max(self, call: StepCall, *values: float) -> list[float]:
        """The largest of each value over the ranks that run the same tasks; a collective."""
        assert self._session is not None
        return self._session.group.largest(*values, device=call.boundary_example().device)

    def _last_rank(self, measured: Stage) -> LastRank:
        """The measured activations, with the LM head apart on the last rank."""
        found = measured.activation_bytes
        sizes = [found[chunk] for chunk in range(len(found))]
        if self._weight_gradients is None or not measured.is_last(len(sizes) - 1):
            return LastRank(max(sizes, default=0))
        return LastRank.of(sizes, self._weight_gradients.num_pieces)

    def _prepare(self, call: StepCall) -> bool:
        """Prepare this model's backwards, and anew when a host has frozen weights since, or trains
        frozen ones; True if they are split.
        """
        refuse_shared(call.model)
        trained = [parameter.requires_grad for parameter in self._prepared_parameters]
        if self._prepared_model != call.model or trained != self._prepared_trained:
            if self._prepared_model and self._decisions is not None:
                self._decisions.renew()
            self._forget_model()
            if self.config.split_backward:
                self._weight_gradients = WeightGradients(call.model, self._say_once)
                self._log_if_fused(self._weight_gradients)
            else:
                why = f"{setting('split_backward', False)} runs no W tasks"
                refuse_delayed(call.model, why)
            if self.config.cuda_graphs != "off" and self._captures():
                self._graphs = self._make_graphs(call)
            self._prepared_model = list(call.model)
            self._prepared_parameters = [p for chunk in call.model for p in chunk.parameters()]
            self._prepared_trained = [p.requires_grad for p in self._prepared_parameters]
        else:
            self._look_again(call)
        return any(self._weight_gradients.num_pieces) if self._weight_gradients else False

    def _look_again(self, call: StepCall) -> None:
        """Prepare what a host has changed in the model since the last step."""
        if self._weight_gradients is not None:
            self._weight_gradients.inspect()
        if self._graphs is not None and not self._graphs.inspect():
            self._graphs.close()
            self._graphs = self._make_graphs(call)

    def _log_if_fused(self, weights: WeightGradients) -> None:
        chunks = [chunk for chunk, pieces in enumerate(weights.num_pieces) if not pieces]
        if chunks:
            self._say_once(
                f"dynamic pipeline: the backward of chunks {chunks} is fused: their transformer "
                "layers have no linear layer whose weight gradient can be deferred"
            )

    def _make_graphs(self, call: StepCall) -> ChunkGraphs | None:
        found = call.boundaries(call.length)
        if found.several:
            self._log(
                "CUDA graphs: not used, as a stage boundary carries several tensors "
                f"({len(found.receives)} received, {len(found.sends)} sent)"
            )
            return None
        pays = partial(self._graphs_pay, call)
        return ChunkGraphs(
            call.model,
            self._weight_gradients,
            self._log,
            pays,
            self._capture,
            rows=call.captured_rows(self.config),
            most=lambda: self._decisions.cap if self._decisions is not None else 0.0,
        )

    def _graphs_pay(self, call: StepCall, chunks: Sequence[int]) -> bool:
        """True if ``chunks`` should be captured, by the launch times of the first steps; equal on
        all ranks that share this stage.
        """
        assert self._session is not None
        share, filled = self._stage_max(
            call, self._session.timer.launch_share(chunks), self._filled_by_graphs()
        )
        recomputes = call.config.recompute_granularity == "full"
        reason = why_no_graphs(self.config.cuda_graphs, share, filled, recomputes_all=recomputes)
        if reason:
            self._log(f"CUDA graphs: not used, {reason}")
        return not reason

    def _filled_by_graphs(self) -> float:
        """The share of the memory left beside model and optimizer that graphs' pools may need."""
        left = room()
        if left is None or self._decisions is None:
            return 0.0
        return POOL_GROWTH * self.peak_held * self._decisions.activation_bytes / max(left, 1)

    @contextlib.contextmanager
    def _bound(self, call: StepCall) -> Iterator[None]:
        """Bind deferred weight gradients and graphs to the model for one call."""
        with contextlib.ExitStack() as around:
            if not call.forward_only:
                if self._weight_gradients is not None:
                    around.enter_context(self._weight_gradients.bound())
                if self._graphs is not None:
                    around.enter_context(self._graphs.bound(call.boundary_example(self.config)))
                around.enter_context(traced_experts(call.model, self.recorder))
            yield

    def _forget_model(self) -> None:
        graphs, self._graphs = self._graphs, None
        self._weight_gradients, self._prepared_model = None, ()
        self._prepared_parameters = self._prepared_trained = ()
        if graphs is not None:
            graphs.close()

    def _open_session(self, call: StepCall) -> _Session:
        longest = call.longest(self.config.max_tokens)
        wanted = call.boundaries(longest)  # a call's own length may be nominal
        topology = pipeline_of(call.model, call.pg_collection)
        self._check_chunks(call)
        if self._session is not None:
            opened = self._session.boundaries
            same = topology == self._session.topology
            if same and wanted.usual_bytes <= opened.usual_bytes:
                wanted.check_fits(opened)
                return self._session
            if same and longest > self._length:  # lengths that grow in many steps open links in few
                longest = max(longest, _GROWTH * self._length)
            self._close_links()  # longer sequences or another model, on all ranks alike
        self._length = longest
        self._session = self._connect(call, topology, call.boundaries(longest))
        return self._session

    def _connect(self, call: StepCall, topology: Topology, boundaries: Boundaries) -> _Session:
        ranks, rank = topology.ranks, topology.rank
        injector = None
        if self.config.inject:
            injector = Injector(
                self.config.inject,
                rank,
                topology.num_ranks,
                self._seed,
                num_chunks=topology.num_chunks,
            )
        group = stage_group_of(call)
        links = _open_links(topology, boundaries, group.ranks, self.config, injector)
        for link in links.transport.links():
            self._log(
                f"dynamic pipeline: rank {ranks[rank]} -> {link.peer}: {link.kind} ({link.reason})"
            )
        reason = why_not_ahead(self.config, links.transport)
        if reason is not None:
            self._warn(f"dynamic pipeline: no task is launched ahead of its input: {reason}")
        board = links.transport.board
        follow = board is not None and board.index > 0
        if self._decisions is None:  # recordings and replays go on when links are opened anew
            self._decisions = Decisions(
                self.config, self._log, _replica_of(call), decides=not follow
            )
        return _Session(
            topology=topology,
            group=group,
            links=links,
            boundaries=boundaries,
            timer=timer_for(self.config, follow=follow),
            injector=injector,
            rng=TaskRng(self._seed, topology.num_ranks, rank),
            launch_ahead=self.config.launch_ahead and reason is None,
        )

    @staticmethod
    def _check_chunks(call: StepCall) -> None:
        expected = call.config.virtual_pipeline_model_parallel_size or 1
        if len(call.model) != expected:
            raise ConfigError(
                f"model: {len(call.model)} chunks were given, but "
                "virtual_pipeline_model_parallel_size "
                f"is {expected}"
            )

    def _close_links(self) -> None:
        if self._session is not None:
            if self._decisions is not None:
                self._decisions.renew()
            self._injected_before += self._session.timer.injected_seconds
            self._session.links.transport.close()
            self._session = None

    def close(self) -> None:
        self._close_links()
        if self._decisions is not None:
            self._decisions.close()
            self._decisions = None
        self._forget_model()

    def _links(self) -> Transport | None:
        return self._session.links.transport if self._session else None


def why_no_graphs(
    asked: str, launch_share: float, filled: float = 0.0, *, recomputes_all: bool = False
) -> str | None:
    """The reason why no CUDA graphs are captured; None if they are.

    Args:
        asked: ``DppConfig.cuda_graphs``, ``auto`` or ``on``.
        launch_share: the share of launching in the task time of the most launch-bound chunk that
            has layers.
        filled: the share of the memory left for activations that graphs may need.
        recomputes_all: whole layers are recomputed, so memory is short.
    """
    if asked == "on":
        return None
    if recomputes_all:
        reason = f"as {core_setting('recompute_granularity', 'full')} asks for little memory"
    elif launch_share < GRAPHS_PAY_FROM:
        reason = f"as launching takes {launch_share:.0%} of the time that tasks run"
    elif filled > 1.0:
        reason = f"as they may need {filled:.1f} times the memory that is left for activations"
    else:
        return None
    graphs = setting("cuda_graphs", "on")
    return f"{reason} ({graphs} uses them all the same, for more memory)"


def _replica_of(call: StepCall) -> int:
    """The number of this rank's data-parallel replica. The leader's names a recording, so one file
    serves all replicas that follow it.
    """
    index: int = torch.distributed.get_rank(call.pg_collection.dp_cp)
    return index // int(call.pg_collection.cp.size())


def _open_links(
    topology: Topology,
    boundaries: Boundaries,
    stage_ranks: Sequence[int],
    config: DppConfig,
    injector: Injector | None,
) -> Links:
    channels = topology.channels(boundaries.receives, boundaries.sends, config.slots)
    transport = open_links(channels.specs, config, stage_ranks)
    if injector is not None and injector.delays_messages:
        transport = DelayedTransport(transport, injector, topology.ranks)
    return Links(transport, channels)
