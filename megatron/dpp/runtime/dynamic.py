"""``DppSchedule``: the dynamic pipeline in the place of megatron-core's ``forward_backward_func``.

    with DppSchedule(DppConfig()) as forward_backward:
        losses = forward_backward(
            forward_step_func=..., data_iterator=..., model=...,
            num_microbatches=..., seq_length=..., micro_batch_size=...,
        )

The first call inspects the model and the process groups and opens the links
(:mod:`~megatron.dpp.runtime.session`); later calls reuse them.
:mod:`~megatron.dpp.runtime.prepared` has what a model needs. The objects of one iteration are
built per call.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from megatron.dpp.config import Backward
from megatron.dpp.core.call import StepCall
from megatron.dpp.core.head import Head, why_not_in_forward
from megatron.dpp.core.model import replays_routing
from megatron.dpp.core.rng import Draws, TaskRng, line
from megatron.dpp.core.steps import Stage
from megatron.dpp.errors import ConfigError, Text, setting
from megatron.dpp.memory import allocator_retries
from megatron.dpp.runtime.base import PipelineSchedule
from megatron.dpp.runtime.executor import Executor, Iteration
from megatron.dpp.runtime.prepared import Prepared
from megatron.dpp.runtime.race import FUSED, Race
from megatron.dpp.runtime.session import Session, check_chunks
from megatron.dpp.runtime.slicing import Slicing
from megatron.dpp.runtime.stage_group import geometry_of, pipeline_of
from megatron.dpp.runtime.static import StaticSchedule
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.schedule import HOLDS_ALL, Geometry
from megatron.dpp.schedule.reference import num_warmup
from megatron.dpp.transport.base import Transport

_TOLD_AFTER = 5
"""Training steps after which a full memory is logged, once."""


class DppSchedule(PipelineSchedule):
    """The dynamic pipeline.

    Arguments and use are those of :class:`~megatron.dpp.runtime.base.PipelineSchedule`.
    """

    _always_links = True
    num_out_of_order = 0
    """Forwards and backwards of the last call that deviated from Megatron's order."""
    _num_trained = 0
    _retries = 0
    policy: str | None = None
    """Policy of the next training step, in the place of the configuration's."""
    _announced: Sequence[int] | None = None
    _static: StaticSchedule | None = None
    """megatron-core's own schedule, once a step has run in it."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._session = Session(self.config, self._seed, self._log, self._warn)
        self._draws = Draws()
        self._slicing = Slicing(self.config, self._say_once)
        self._prepared = Prepared(
            self.config, self._session, self._log, self._say_once, self._capture
        )
        self._race = Race(self.config, self._log, self._prepared, self._free)

    def __call__(self, **keywords: Any) -> list[Any]:
        """Run all forwards and backwards of one step; keywords and result are megatron-core's.

        Returns:
            The loss function's reduced values, one entry per microbatch, on the last stage; an
            empty list elsewhere.

        Raises:
            ConfigError: an argument or a model setting that cannot be honoured, by name.
            TransportError: a peer died, or a message did not arrive in time.
        """
        call = self._checked(take=True, **keywords)
        topology = pipeline_of(call.model, call.pg_collection)
        with self._race.step(call, keywords) as way:
            call = self._seeded(self._race.counted(call), topology)
            run = partial(self._run_own, keywords) if way is None else partial(self._run, way)
            self.iteration += 1
            losses: list[Any] = run(call)
        if not call.forward_only:
            for name, value in self._race.record.items():
                self.recorder.counter(name, value)
        return losses

    def _run(self, backward: Backward, call: StepCall) -> list[Any]:
        """Run a call in the dynamic pipeline."""
        iteration, session = self.iteration - 1, self._session
        session.open(call)
        weights = None if call.forward_only else self._prepared.prepare(call)
        if self.config.replay is not None and weights is not None:
            backward = session.recorded_backward(call)
        backward = backward if weights is not None else FUSED
        weights = weights if backward.split else None
        topology = session.topology
        geometry = geometry_of(topology, call, weights.num_pieces if weights else None)
        window = num_warmup(geometry) + 1
        stage = Stage(
            call,
            topology.rank,
            topology.num_ranks,
            window,
            weights,
            head=self._head_of(call),
            slices=self._slicing.slices_of(call),
        )
        measures = session.decisions.wants_measuring and not call.forward_only
        if measures:
            stage.measure()
        with contextlib.closing(stage):
            stage.open()
            bound = self._prepared.bound(
                call, self.recorder, backward, graphs=self._race.binds_graphs
            )
            with bound, self._slicing.bound(call):
                longest = self._execute(stage, geometry, backward, iteration)
            if not call.forward_only:
                self._prepared.account(call, longest, stage if measures else None)
            with self.recorder.span("grad-sync"):
                return stage.finish()

    def _run_own(self, keywords: dict[str, Any], call: StepCall) -> list[Any]:
        """Run a call in megatron-core's own schedule, with the forward step of ``call``."""
        own = self._static = self._static or StaticSchedule(
            dataclasses.replace(self.config, task_rng=False), seed=self._seed, log=self._log
        )
        own.recorder = self.recorder
        self._announced, self.num_out_of_order = None, 0
        return own(**keywords | {"forward_step_func": call.forward_step_func})

    def _free(self) -> None:
        """Free what the dynamic pipeline holds, until it runs again."""
        self._prepared.forget()
        self._session.close_links()
        torch.cuda.empty_cache()

    def check(self, **keywords: Any) -> None:
        """Check that a call with these keywords can run; no collective.

        Raises:
            ConfigError: as the call itself.
        """
        call = self._checked(**keywords)
        call.boundaries(call.length)
        check_chunks(call)
        if not call.forward_only and not self._race.leaves(call):
            self._prepared.prepare(call)

    def announce(self, sizes: Sequence[int], *, rows: Sequence[Sequence[int]] = ()) -> None:
        """Tell the tokens of each microbatch of the next call, on all ranks alike.

        Without this a rank learns a size when the microbatch's first forward begins there.

        Args:
            sizes: tokens with padding.
            rows: tokens of the sequences that are packed into each microbatch, in order, which
                ``slice_tokens`` cuts.
        """
        self._announced = list(sizes)
        self._slicing.announce(rows)

    def _checked(self, *, take: bool = False, **keywords: Any) -> StepCall:
        call = StepCall.checked(**keywords)
        call.refuse_ordered()
        call = self._slicing.cut(call, take=take)
        call.check_length(call.longest(self.config.max_tokens))
        self._head_of(call)
        return call

    def _head_of(self, call: StepCall) -> Callable[[torch.nn.Module], Head] | None:
        """The head of a call whose backward runs in F; None if B runs it.

        Raises:
            ConfigError: it should run in F, and the model does not allow it.
        """
        asked = self.config.head_in_forward
        holds_all = (self.policy or self.config.policy) in HOLDS_ALL
        wanted = holds_all or self._slicing.slices_of(call) is not None
        if asked == "off" or call.forward_only or (asked == "auto" and not wanted):
            return None
        reason = why_not_in_forward(call.model, call.pg_collection.pp.size())
        if reason is None:
            return partial(Head, refuse=self._refuse_head)
        self._refuse_head(reason)
        return None

    def _refuse_head(self, reason: str) -> None:
        """Refuse to run a head's backward in F, or say why B runs it where none was asked for."""
        if self.config.head_in_forward == "on":
            on = setting("head_in_forward", "on")
            off = setting("head_in_forward", "off")
            raise ConfigError(f"{on}: {reason}: use {off}", on, off)
        self._say_once(f"dynamic pipeline: B runs the backward of the LM head, too: {reason}")

    def _seeded(self, call: StepCall, topology: Topology) -> StepCall:
        """The call with random states of its tasks, where they need some. Of one chunk the forwards
        keep Megatron's order, and so do draws that its config does not name.
        """
        ranks = topology.num_ranks
        named = self._wants_rng(call.model, ranks, forward_only=call.forward_only)
        if not named and (ranks == 1 or len(call.model) == 1):
            return call
        self._draws.begin()
        wanted = (lambda: True) if named else self._look_at_draws
        rng = TaskRng(self._seed, ranks, topology.rank)
        function = rng.wrap(call.forward_step_func, call.model, self.iteration, wanted)
        return dataclasses.replace(call, forward_step_func=function)

    def _look_at_draws(self) -> bool:
        """True if tasks have drawn numbers that the config does not name, and get states."""
        seeds = self.config.task_rng
        if self._draws.look():
            self._alert(line(seeds=seeds, named=False))
        return self._draws.found and seeds

    @property
    def injected_seconds(self) -> float:
        return self._session.injected_seconds

    def _execute(
        self, stage: Stage, geometry: Geometry, backward: Backward, iteration: int
    ) -> float:
        """Run the tasks; returns the tokens of the longest microbatch in those of the first."""
        session, most = self._session, self.config.max_tokens
        decisions = session.decisions
        tokens = stage.call.tokens(stage.call.longest(most), most)
        sizes, self._announced = self._announced, None
        if self._prepared.pads(stage.call):
            sizes = None  # rows are longer than they were announced
        cut, largest = stage.call.cut, tokens.largest
        if cut is not None:
            sizes = cut.sizes
            largest = max([largest, *(tokens.of_rank([cut.longest]) or ())])
        tells = session.group.one_replica or bool(geometry.groups)
        known = tokens.of_rank(sizes) if sizes and tells else None
        scheduler = decisions.scheduler(
            geometry,
            backward=backward,
            largest=largest,
            sizes=known,
            kappa=self._slicing.kappa(stage.call, decisions.activation_bytes),
            policy=self._policy_of(stage.call),
        )
        executor = Executor(
            runner=stage,
            scheduler=scheduler,
            links=session.links,
            recorder=self.recorder,
            timer=session.timer,
            injector=session.injector,
            iteration=Iteration(
                number=iteration,
                timeout=self.config.timeout,
                count_tokens=tokens.count,
                sizes_agree=tells,
                longer=self._slicing.longer(stage.call),
            ),
        )
        executor.run()
        decisions.ran(scheduler, executor.actions, backward=backward)
        self.num_out_of_order = scheduler.num_out_of_order
        if self.recorder.enabled:
            overhead_us = executor.overhead_ns / 1e3 / max(len(executor.actions), 1)
            self.recorder.counter("host", overhead_us)
            launching = session.timer.launch_share(range(geometry.num_chunks))
            self.recorder.counter("launching", launching)
        if not geometry.forward_only:
            self._tell_if_full()
        slices = self._slicing.slices_of(stage.call)
        if slices is not None:
            self.recorder.counter("keys", slices.keys.peak_bytes)
        return largest / (executor.first_size or largest)

    def _tell_if_full(self) -> None:
        """Log once that the allocator ran out of memory in the steps after the first."""
        self._num_trained += 1
        if self._num_trained == 1:
            self._retries = allocator_retries()
            return
        told = self._num_trained == _TOLD_AFTER
        retries = allocator_retries() - self._retries if told else 0
        if line := full_line(retries, _TOLD_AFTER - 1):
            self._log(line)

    def _policy_of(self, call: StepCall) -> str | None:
        """The policy of a call in the place of the configuration's, if there is one."""
        if not call.forward_only:
            return self.policy
        order = self.config.call_order
        keeps = order == "megatron" or (order != "dynamic" and replays_routing(call.config))
        return "megatron" if keeps else "depth-first"

    def close(self) -> None:
        self._session.close()
        self._prepared.forget()
        self._slicing.forget()

    def _links(self) -> Transport | None:
        return self._session.links.transport if self._session.is_open else None


def full_line(retries: int, steps: int) -> Text | None:
    """The line of a rank whose allocator ran out of memory ``retries`` times in so many steps, gave
    its cached memory back and asked for it again; None if it did not.
    """
    if not retries:
        return None
    given = ("activation_cap", "static"), ("slice_tokens", "N"), ("cuda_graphs", "off")
    cap, tokens, off = (setting(name, value) for name, value in given)
    return Text(
        "dynamic pipeline: the device's memory is full: PyTorch gave memory back and asked for it "
        f"again {retries} times in {steps} steps, which waits for all work; less memory: {cap} or "
        f"less, {tokens}, {off}",
        cap,
        tokens,
        off,
    )
