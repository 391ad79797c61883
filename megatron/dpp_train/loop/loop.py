"""The training loop and evaluation: megatron-core's parts in Megatron-LM's order."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator as microbatches
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import check_param_hashes_across_dp_replicas

from megatron.dpp.errors import DppError
from megatron.dpp.sim.batches import BatchPlans, BatchTokens
from megatron.dpp_train.checkpoint.checkpointing import Checkpointer
from megatron.dpp_train.data.samples import Iterators
from megatron.dpp_train.data.sequences import (
    Microbatch,
    longest_microbatch,
    longest_unit,
    next_step,
    write_lengths,
)
from megatron.dpp_train.exits import ExitConditions
from megatron.dpp_train.loop.diagnostics import Diagnostics
from megatron.dpp_train.loop.logs import (
    StepResult,
    TrainingLog,
    flops_of_step,
    print_evaluation,
    tokens_of_step,
)
from megatron.dpp_train.loop.measure import Comparison
from megatron.dpp_train.loop.metrics import MetricsFile, parameters_norm, peak_memory_bytes
from megatron.dpp_train.loop.writers import Writers
from megatron.dpp_train.model.build import Trainee
from megatron.dpp_train.model.losses import (
    added_losses,
    check_norm,
    check_step,
    mean_losses,
    summed_losses,
)
from megatron.dpp_train.optimizer.fused_step import fused_step
from megatron.dpp_train.optimizer.grad_checks import GradientChecks
from megatron.dpp_train.state import Run


@dataclass
class Trainer:
    """A run that is ready to train.

    ``schedule`` takes the keywords of megatron-core's ``forward_backward_func``.
    """

    run: Run
    trainee: Trainee
    forward_step: Callable[..., Any]
    schedule: Callable[..., Any]
    iterators: Iterators
    writers: Writers
    metrics: MetricsFile
    exits: ExitConditions
    checkpointer: Checkpointer
    comparison: Comparison
    diagnostics: Diagnostics
    checks: GradientChecks = field(default_factory=GradientChecks)
    _told_slices: bool = False

    def train(self) -> bool:
        """Runs until ``--train-iters`` or an exit condition, and saves a checkpoint.

        Returns:
            True after the last iteration, False when an exit condition came before it.
        """
        run, args = self.run, self.run.args
        self._connect()
        log = TrainingLog(run, self.writers)
        run.timers("interval-time", log_level=0).start(barrier=True)
        run.say(f"[before the start of training step] {time.strftime('%Y-%m-%d %H:%M:%S')}")
        if run.iteration >= args.train_iters:
            run.say(
                f"nothing to train: the checkpoint is at iteration {run.iteration}, and "
                f"--train-iters (train: --max-steps) is {args.train_iters}"
            )
        hooks = _ForwardHooks(self.trainee, args)
        if args.manual_gc:
            gc.disable()
        while run.iteration < args.train_iters:
            self.checkpointer.poll()
            self._set_batch_size(hooks)
            if run.iteration in (args.iterations_to_skip or ()):
                self._skip_batch()
                continue
            self._iterate(hooks, log)
            if self._after_step(hooks):
                return False
        hooks.off()
        if args.save and run.iteration and self.checkpointer.last_saved != run.iteration:
            self.checkpointer.save()
        return True

    def _iterate(self, hooks: _ForwardHooks, log: TrainingLog) -> None:
        """Runs, counts and reports one iteration."""
        run = self.run
        self.diagnostics.before_step()
        start = time.perf_counter()
        run.recorder.begin_iteration(run.iteration)
        plans = self.iterators.plans
        if plans is not None:
            write_lengths(run.args, plans, run.consumed_train_samples, run.iteration)
            self._tell_slices(plans)
        step = self._step()
        run.recorder.end_iteration()
        hooks.after_step(step)
        run.iteration += 1
        run.consumed_train_samples += step.batch_size
        run.flops_so_far += flops_of_step(run.args, step)
        log.add(step)
        seconds = time.perf_counter() - start
        self._write_metrics(step, seconds)
        self.comparison.after_iteration(seconds, self.metrics)
        self.diagnostics.after_step(step)

    def _connect(self) -> None:
        """Sets the schedule's hooks as Megatron-LM does."""
        args, config, chunks = self.run.args, self.trainee.config, self.trainee.chunks
        config.grad_scale_func = self.trainee.optimizer.scale_loss
        config.timers = self.run.timers
        config.finalize_model_grads_func = finalize_model_grads

        def each(name: str) -> Any:
            functions = [getattr(chunk, name) for chunk in chunks]
            return functions[0] if len(functions) == 1 else functions

        if args.overlap_grad_reduce:
            config.no_sync_func = each("no_sync")
            # Else DDP would reduce once more at the end with several optimizer instances.
            if args.align_grad_reduce and args.num_distributed_optimizer_instances == 1:
                config.grad_sync_func = each("start_grad_sync")
        if args.overlap_param_gather and args.align_param_gather:
            config.param_sync_func = each("start_param_sync")

    def _set_batch_size(self, hooks: _ForwardHooks) -> None:
        """Follows the ramp of the batch size; saves a checkpoint before each of its steps."""
        run = self.run
        before = microbatches.get_num_microbatches()
        microbatches.update_num_microbatches(run.consumed_train_samples, consistency_check=False)
        if microbatches.get_num_microbatches() != before and run.iteration and run.args.save:
            with hooks.paused():
                self.checkpointer.save()
        microbatches.update_num_microbatches(run.consumed_train_samples, verbose=True)

    def _num_microbatches(self) -> int:
        """Microbatches of each replica in the next step."""
        plans = self.iterators.plans
        if plans is None:
            return int(microbatches.get_num_microbatches())
        return plans.num_microbatches(self.run.consumed_train_samples)

    def _batch_size(self) -> int:
        args = self.run.args
        if self.iterators.plans is not None:
            return self.iterators.plans.batch_size
        size = microbatches.get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
        return int(size)

    def _skip_batch(self) -> None:
        run = self.run
        iterators = self.iterators.train
        for iterator in iterators if isinstance(iterators, list) else [iterators]:
            if run.args.variable_lengths and run.args.slice_tokens is not None:
                next_step(iterator)
                continue
            for _ in range(self._num_microbatches() if iterator is not None else 0):
                next(iterator)
        run.iteration += 1
        run.consumed_train_samples += self._batch_size()
        run.skipped_train_samples += self._batch_size()

    def _step(self) -> StepResult:
        """Gradients, optimizer and learning rate of one iteration."""
        run, args, trainee = self.run, self.run.args, self.trainee
        for chunk in trainee.chunks:
            chunk.zero_grad_buffer()
        trainee.optimizer.zero_grad()
        with self.comparison.memory(), self.checks.late():
            reduced = self._forward_backward(
                self.iterators.train, self._num_microbatches(), forward_only=False
            )
        if args.empty_unused_memory_level >= 1 and args.device == "cuda":
            torch.cuda.empty_cache()
        losses = mean_losses(reduced)
        added = added_losses(args, self._num_microbatches())
        timed = run.timed("optimizer", level=1, barrier=args.barrier_with_L1_time)
        with timed, run.recorder.span("optimizer"), fused_step(trainee.optimizer):
            successful, grad_norm, num_zeros = trainee.optimizer.step()
        check_step(run, self.checks)  # bf16 and fp32 have not waited for the device before
        failed, grad_norm = _largest(float(not successful), grad_norm)
        check_norm(run, grad_norm)
        successful = not failed
        if successful:
            trainee.scheduler.step(increment=self._batch_size())
        return StepResult(
            losses=losses | added if losses else {},
            skipped=not successful,
            grad_norm=grad_norm,
            num_zeros=_largest(num_zeros)[0] if args.log_num_zeros_in_grad else None,
            params_norm=parameters_norm(trainee.chunks, from_main=args.bf16)
            if args.log_params_norm
            else None,
            learning_rate=self._learning_rate(),
            loss_scale=float(trainee.optimizer.get_loss_scale().item()),
            batch_size=self._batch_size(),
            tokens=self._tokens(),
        )

    def _tokens(self) -> BatchTokens | None:
        """Tokens of this step's batch, None where all samples have one length."""
        plans = self.iterators.plans
        return None if plans is None else plans.tokens(self.run.consumed_train_samples)

    def _tell_slices(self, plans: BatchPlans) -> None:
        """Say once what ``--dpp-slice-tokens auto`` has chosen, and why."""
        if self.run.args.slice_tokens != 0 or self._told_slices:
            return
        choice, self._told_slices = plans.choice(self.run.consumed_train_samples), True
        if choice is not None:
            self.run.say(f"--dpp-slice-tokens auto takes {choice.text}. Each batch is weighed anew")

    def _forward_backward(self, iterator: Any, count: int, *, forward_only: bool) -> list[Any]:
        args, more = self.run.args, {} if forward_only else self._planned()
        if args.variable_lengths and args.slice_tokens is not None:
            each = iterator if isinstance(iterator, list) else [iterator]
            steps = [next_step(one) for one in each]
            iterator, count = [iter(step) for step in steps], len(steps[0])
            more |= _units(steps[0], args)
        losses: list[Any] = self.schedule(
            forward_step_func=self.forward_step,
            data_iterator=iterator,
            model=self.trainee.chunks,
            num_microbatches=count,
            seq_length=self._longest,
            micro_batch_size=args.micro_batch_size,
            decoder_seq_length=args.decoder_seq_length,
            forward_only=forward_only,
            **more,
        )
        return losses

    @property
    def _longest(self) -> int:
        args = self.run.args
        return longest_unit(args) if args.variable_lengths else int(args.seq_length)

    def _planned(self) -> dict[str, Any]:
        """Keywords of the next training step: the planner's policy, if it chose one, and the tokens
        of each microbatch, which the cap ``static`` counts."""
        plans, args, first = self.iterators.plans, self.run.args, self.run.consumed_train_samples
        if plans is None:
            return {}
        policy = plans.policy(first)
        found: dict[str, Any] = {"policy": policy} if policy else {}
        if args.use_dpp and args.dpp_activation_cap.strip() == "static":
            found["sizes"] = plans.own_sizes(first)
        return found

    def _learning_rate(self) -> float:
        """The rate of parameters without one of their own; from other ranks where none are here."""
        rates = [
            group["lr"]
            for group in self.trainee.optimizer.param_groups
            if not group.get("is_decoupled_lr", False)
        ]
        return _largest(rates[0] if rates else None)[0] or 0.0

    def _write_metrics(self, step: StepResult, seconds: float) -> None:
        run = self.run
        if not (run.is_last and run.args.metrics_file):
            return
        self.metrics.write(
            iteration=run.iteration,
            **({} if step.skipped else step.losses),
            **{
                "grad norm": step.grad_norm,
                "params norm": step.params_norm,
                "num zeros": step.num_zeros,
                "learning rate": step.learning_rate,
                "loss scale": step.loss_scale,
                "skipped": int(step.skipped),
                "seconds": seconds,
                "tokens/s": tokens_of_step(run.args, step) / seconds,
                **({} if step.tokens is None else _described(step.tokens)),
                "peak memory": peak_memory_bytes(run),
                "consumed samples": run.consumed_train_samples,
            },
        )

    def _after_step(self, hooks: _ForwardHooks) -> bool:
        """Evaluates, collects garbage and saves where due; True when the run should end here."""
        run, args = self.run, self.run.args

        def due(interval: int | None) -> bool:
            return bool(interval and run.iteration % interval == 0)

        if due(args.check_weight_hash_across_dp_replicas_interval):
            with hooks.paused():
                _compare_replicas(self.trainee.chunks)
        iterators = self.iterators
        if iterators.eval_iters and iterators.has_valid and due(args.eval_interval):
            with self._untimed(), hooks.paused():
                if not args.manual_gc or args.manual_gc_eval:
                    gc.collect()
                self.evaluate(f"iteration {run.iteration}", iterators.valid)
        if args.manual_gc and due(args.manual_gc_interval):
            gc.collect()
        reason = self.exits.reason(run.iteration)
        if args.save and (reason or due(args.save_interval)):
            with self._untimed(), hooks.paused():
                self.checkpointer.save()
        if reason:
            run.say(f"[exiting program at iteration {run.iteration}] {reason}")
        return reason is not None

    @contextmanager
    def _untimed(self) -> Iterator[None]:
        """Leaves a block out of the time per iteration."""
        self.run.timers("interval-time").stop()
        yield
        self.run.timers("interval-time", log_level=0).start(barrier=True)

    def evaluate(self, prefix: str, iterator: Any, name: str = "validation") -> None:
        """Prints and writes the mean losses over ``iterators.eval_iters`` batches."""
        run, args, config = self.run, self.run.args, self.trainee.config
        count = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
        for chunk in self.trainee.chunks:
            chunk.eval()
        totals: dict[str, torch.Tensor] = {}
        timers, config.timers = config.timers, None
        with torch.no_grad():
            for _ in range(self.iterators.eval_iters):
                reduced = self._forward_backward(iterator, count, forward_only=True)
                for key, sums in summed_losses(reduced).items():
                    totals[key] = totals.get(key, torch.zeros_like(sums)) + sums
                run.consumed_valid_samples += args.global_batch_size
        config.timers = timers
        for chunk in self.trainee.chunks:
            chunk.train()
        losses = {key: sums[0] / sums[1] for key, sums in totals.items()}
        print_evaluation(run, prefix, losses, self.writers)
        if run.is_last:
            self.metrics.write(iteration=run.iteration, set=name, **losses)


class _ForwardHooks:
    """The forward hooks that gather parameters (``--overlap-param-gather``).

    They are off until the first step that is not skipped, so that an error in loading does not
    spread with the first gather.
    """

    def __init__(self, trainee: Trainee, args: Any) -> None:
        self._trainee = trainee
        self._used = args.use_distributed_optimizer and args.overlap_param_gather
        self._sync = trainee.config.param_sync_func
        self._enabled = False
        if self._used:
            for chunk in trainee.chunks:
                chunk.disable_forward_pre_hook(param_sync=False)
            trainee.config.param_sync_func = None

    def after_step(self, step: StepResult) -> None:
        """Installs the hooks after the first step that was not skipped."""
        if self._used and not self._enabled and not step.skipped:
            self._enabled = True
            self._on()

    def off(self) -> None:
        """Gathers the outstanding parameters and removes the hooks."""
        if self._enabled:
            for chunk in self._trainee.chunks:
                chunk.disable_forward_pre_hook(param_sync=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Removes the hooks for a block that reads whole parameters."""
        self.off()
        yield
        self._on()

    def _on(self) -> None:
        if self._enabled:
            for chunk in self._trainee.chunks:
                chunk.enable_forward_pre_hook()
            self._trainee.config.param_sync_func = self._sync


def _units(step: list[Microbatch], args: Any) -> dict[str, Any]:
    """Keywords of a step of slices: the tokens of each unit, its place, and those of the longest
    row."""
    return {
        "sizes": [rows * width for rows, width in (each.shape for each in step)],
        "units": [each.slice for each in step],
        "longest_row": longest_microbatch(args),
    }


def _described(tokens: BatchTokens) -> dict[str, float]:
    return {"tokens": tokens.real, "padding": tokens.padding}


def _compare_replicas(chunks: list[Any]) -> None:
    if not check_param_hashes_across_dp_replicas(chunks, cross_check=True):
        raise DppError(
            "parameters differ between data-parallel replicas: a device or its memory is at fault; "
            "start again from an earlier checkpoint (--ckpt-step)"
        )


def _largest(*values: Any) -> list[float | None]:
    """The largest of each value (at least 0) over the model-parallel ranks; None where no rank has
    one, as the gradient norm of a skipped iteration. Values on the device are read together."""
    group, device = mpu.get_model_parallel_group(), torch.cuda.current_device()
    numbers = [-1.0 if value is None else value for value in values]
    if group.size() > 1 or any(isinstance(number, torch.Tensor) for number in numbers):
        whole = torch.stack([_double(number, device) for number in numbers])
        dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)
        numbers = whole.tolist()
    return [None if number == -1.0 else float(number) for number in numbers]


def _double(number: Any, device: Any) -> torch.Tensor:
    if isinstance(number, torch.Tensor):
        return number.double().view(())
    return torch.full((), float(number), dtype=torch.float64, device=device)
