"""``DynamicSchedule``: the dynamic pipeline with the arguments of PyTorch's own schedules."""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import merge_chunks
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from megatron.dpp.config import Backward, DppConfig, missing_part
from megatron.dpp.errors import ConfigError, setting
from megatron.dpp.runtime.executor import Executor, Iteration
from megatron.dpp.torch.linear import WeightGradients
from megatron.dpp.torch.microbatches import Microbatches
from megatron.dpp.torch.session import Session, replica_of
from megatron.dpp.torch.stages import StageRunner
from megatron.dpp.trace import NullRecorder, Recorder, TraceLayout, open_recorder

logger = logging.getLogger("megatron.dpp")

_OTHERS = ("slice_tokens", "cuda_graphs", "length_buckets", "head_in_forward", "call_order")
"""Fields of the configuration that only megatron-core's models know."""


class DynamicSchedule(PipelineScheduleMulti):
    """The dynamic pipeline for stages of ``torch.distributed.pipelining``.

    Losses, gradients and outputs are those of PyTorch's schedules, bit by bit.

    Args:
        words, named: the further arguments of PyTorch's ``PipelineScheduleMulti``: ``loss_fn``,
            ``args_chunk_spec``, ``kwargs_chunk_spec``, ``output_merge_spec``, ``scale_grads``.
        stages: this rank's ``PipelineStage``, or a list of them: of p ranks, rank r has the stages
            r, r + p, r + 2p and so on.
        n_microbatches: of a whole batch. A step that is given lists has as many as their items.
        config: policy, memory cap, transport and the rest. A size is the number of elements of a
            microbatch's first tensor, such as tokens.
        together: ranks whose stages communicate within a forward or backward, by tensor or context
            parallelism: they run one order of tasks. None takes the group of parameters that are
            ``DTensor``, as ``parallelize_module`` makes them.
        trace: directory of a trace, which ``megatron-dpp report`` reads; None records nothing.
        log: called with each line about links and caps; None uses the ``megatron.dpp`` logger.

    Call :meth:`close` to free the links before the process ends.

    Raises:
        ConfigError: stages that are not as described, a setting of megatron-core's models, or the
            transport's C++ extension is not built.
    """

    def __init__(
        self,
        stages: PipelineStage | list[PipelineStage],
        n_microbatches: int,
        *words: Any,
        config: DppConfig | None = None,
        together: dist.ProcessGroup | None = None,
        trace: str | None = None,
        log: Callable[[str], None] | None = None,
        **named: Any,
    ) -> None:
        found = _checked(stages)
        if not isinstance(n_microbatches, int) or n_microbatches < 1:
            raise ConfigError(f"n_microbatches is {n_microbatches!r}: at least 1 is needed")
        super().__init__([*found], n_microbatches, *words, **named)
        self.config = config or DppConfig()
        for name in _OTHERS:
            if getattr(self.config, name) != getattr(DppConfig(), name):
                given = setting(name, getattr(self.config, name))
                raise ConfigError(f"{given}: only models of megatron-core have this", given)
        if missing := missing_part(self.config.transport):
            raise ConfigError(missing)
        self._own = found
        self.session = Session(found, self.config, together, log or logger.info)
        self._backward = Backward.of(self.config.split_backward) or Backward()
        self.iteration = 0
        """Number of the next step."""
        self._recorder = NullRecorder() if trace is None else self._open_trace(trace)
        self._failed: BaseException | None = None
        self._end = weakref.finalize(self, _close, self.session)

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one step; arguments and result are those of PyTorch's schedules.

        A list in the place of an argument, of the target or of a keyword's value has an item per
        microbatch, of any length: then the result is a list, too. So have ``arg_mbs``,
        ``kwarg_mbs`` and ``target_mbs``, which torchtitan's trainer gives in the place of all.

        Raises:
            ConfigError: inputs that do not fit together, or stages that return something else than
                tensors.
            TransportError: a peer died, or a message did not arrive in time.
        """
        if self._failed is not None:
            raise ConfigError(f"this schedule runs no more steps: {self._failed}")
        trains = self._has_backward
        if trains and self._backward_requires_autograd and not torch.is_grad_enabled():
            raise ConfigError("step() needs gradients, and torch.no_grad() is on: call eval()")
        if losses is not None and not isinstance(losses, list):
            raise ConfigError(f"losses is of type {type(losses).__name__}: a list is needed")
        try:
            if arg_mbs or kwarg_mbs or target_mbs:
                given = Microbatches(arg_mbs or (), kwarg_mbs or (), target_mbs, listed=True)
            else:
                specs = self._args_chunk_spec, self._kwargs_chunk_spec
                given = Microbatches.of(args, kwargs, target, self._n_microbatches, *specs)
            runner = self._run(given, return_outputs, loss_kwargs or {}, trains=trains)
        except BaseException as error:
            self._failed = cause = self.session.leave(error)
            if cause is error:
                raise
            raise cause from error
        if not self._stages[-1].is_last:
            return None
        if losses is not None:
            losses[:] = runner.losses
        if not return_outputs:
            return None
        outputs = runner.outputs
        return outputs if given.listed else merge_chunks(outputs, self._output_merge_spec)

    def _run(
        self,
        given: Microbatches,
        return_outputs: bool,
        loss_kwargs: dict[str, Any],
        *,
        trains: bool,
    ) -> StageRunner:
        iteration = self.iteration
        self.iteration += 1
        for stage in self._stages:
            stage.has_backward = trains
        if self._stages[-1].is_last and trains and given.targets is None:
            raise ConfigError("target: the rank of the last stage has to be given one")
        session = self.session
        sizes = session.begin(given, self._n_microbatches, iteration, trains=trains)
        number = len(sizes)
        weights = None
        if trains and self._backward.split:
            weights = WeightGradients([stage.submod for stage in self._own])
            weights = weights if any(weights.num_pieces) else None
        draws = self.config.task_rng and trains and len(self._own) > 1
        runner = StageRunner(
            stages=self._own,
            shapes=session.shapes,
            microbatches=given,
            number=number,
            loss_fn=self._loss_fn,
            loss_kwargs=loss_kwargs,
            trains=trains,
            grad_scale=number if self.scale_grads else 1,
            return_outputs=return_outputs,
            weights=weights,
            iteration=iteration,
            seed=torch.initial_seed() if draws else None,
            measures=trains and session.decisions.wants_measuring,
        )
        recorder = self._recorder if trains else NullRecorder()
        recorder.begin_iteration(iteration)
        with weights.bound() if weights else contextlib.nullcontext():
            self._execute(runner, sizes, recorder)
        recorder.end_iteration()
        if runner.measures:
            session.account(runner.activation_bytes, runner.deferred_bytes, sizes[0])
        return runner

    def _execute(self, runner: StageRunner, sizes: list[int], recorder: Recorder) -> None:
        session, links, weights = self.session, self.session.links, runner.weights
        assert links is not None
        backward = self._backward if weights else Backward(split=False)
        pieces = weights.num_pieces if weights else None
        geometry = session.topology.geometry(
            runner.number, forward_only=not runner.trains, w_pieces=pieces
        )
        scheduler = session.decisions.scheduler(
            geometry, backward=backward, largest=session.longest, sizes=sizes
        )
        executor = Executor(
            runner=runner,
            scheduler=scheduler,
            links=links,
            recorder=recorder,
            timer=session.timer,
            injector=session.injector,
            iteration=Iteration(
                number=runner.iteration,
                timeout=self.config.timeout,
            ),
        )
        executor.run()
        session.decisions.ran(scheduler, executor.actions, backward=backward)

    def _open_trace(self, folder: str) -> Recorder:
        topology = self.session.topology
        data, data_size = replica_of(topology.ranks)
        layout = TraceLayout(
            data=data,
            pipeline=topology.rank,
            tensor=0,
            data_size=data_size,
            pipeline_size=topology.num_ranks,
            tensor_size=1,
            num_chunks=topology.num_chunks,
        )
        device = self.session.device
        return open_recorder(folder, rank=dist.get_rank(), layout=layout, device=device)

    def close(self) -> None:
        """Close links and trace. May be called twice."""
        self._end.detach()
        self._failed = self._failed or ConfigError("it was closed")
        self.session.close()
        self._recorder.close()


def _checked(stages: Any) -> list[PipelineStage]:
    """The stages in order.

    Raises:
        ConfigError: others than :class:`DynamicSchedule` describes.
    """
    found = list(stages) if isinstance(stages, list | tuple) else [stages]
    wrong = [type(each).__name__ for each in found if not isinstance(each, PipelineStage)]
    if wrong or not found:
        raise ConfigError(
            f"stages: got {', '.join(wrong) or 'nothing'}, expected "
            "torch.distributed.pipelining.PipelineStage, one or a list of them"
        )
    found.sort(key=lambda stage: stage.stage_index)
    first = found[0]
    wanted = list(range(first.group_rank, first.num_stages, first.group_size))
    indices = [stage.stage_index for stage in found]
    if indices != wanted or first.num_stages % first.group_size:
        raise ConfigError(
            f"pipeline rank {first.group_rank} of {first.group_size} has the stages {indices} of "
            f"{first.num_stages}: as many stages for each rank are needed, here {wanted}"
        )
    return found


def _close(session: Session) -> None:
    """Close the links at the end of the process, and tell other ranks of what ended it."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if session.links is None:
        error = error or RuntimeError("its process ends, or drops the schedule, without a step")
    if isinstance(error, BaseException):
        session.leave(error)
    session.close()
