"""The training loop and evaluation: megatron-core's pieces in Megatron-LM's order.

:class:`Trainer` is driven by ``pretrain``. The schedule is a callable with the keywords of
megatron-core's ``forward_backward_func``; which one it is makes no difference here.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator as microbatches
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads

from megatron.dpp.mcore.training.fused_step import fused_step
from megatron.dpp.mcore.training.grad_checks import GradientChecks
from megatron.dpp.plan.flops import flops_per_iteration
from megatron.dpp.train.checkpointing import Checkpointer
from megatron.dpp.train.data import Iterators
from megatron.dpp.train.diagnostics import Diagnostics
from megatron.dpp.train.exits import ExitConditions
from megatron.dpp.train.initialize import Run
from megatron.dpp.train.logs import StepResult, TrainingLog, Writers, print_evaluation
from megatron.dpp.train.losses import added_losses, check_norm, check_step
from megatron.dpp.train.measure import Comparison
from megatron.dpp.train.metrics import MetricsFile, peak_memory_bytes
from megatron.dpp.train.model import Trainee
from megatron.dpp.train.norms import parameters_norm


@dataclass
class Trainer:
    """A run that is ready to go."""

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
    _checks: GradientChecks = field(default_factory=GradientChecks)

    def train(self) -> bool:
        """Run until ``--train-iters`` or an exit condition, and save what is not saved yet.

        Returns:
            True when the last iteration was reached, False when an exit condition came before it.
        """
        run, args = self.run, self.run.args
        self._connect()
        log = TrainingLog(run, self.writers)
        run.timers("interval-time", log_level=0).start(barrier=True)
        run.say(f"[before the start of training step] {time.strftime('%Y-%m-%d %H:%M:%S')}")
        hooks = _ForwardHooks(self.trainee, args)
        if args.manual_gc:
            gc.disable()
        while run.iteration < args.train_iters:
            self.checkpointer.poll()
            self._set_batch_size(hooks)
            if run.iteration in (args.iterations_to_skip or ()):
                self._skip_batch()
                continue
            self.diagnostics.before_step()
            start = time.perf_counter()
            run.recorder.begin_iteration(run.iteration)
            step = self._step()
            run.recorder.end_iteration()
            hooks.after_step(step.skipped)
            self._count(step)
            log.add(step)
            seconds = time.perf_counter() - start
            self._write_metrics(step, seconds)
            self.comparison.after_iteration(seconds, self.metrics)
            self.diagnostics.after_step(step)
            if self._after_step(hooks):
                return False
        hooks.off()
        if args.save and run.iteration and self.checkpointer.last_saved != run.iteration:
            self.checkpointer.save()
        return True

    def _connect(self) -> None:
        """Megatron-LM's settings of the schedule's hooks."""
        args, config, chunks = self.run.args, self.trainee.config, self.trainee.chunks
        for chunk in chunks:
            chunk.train()
        config.grad_scale_func = self.trainee.optimizer.scale_loss
        config.timers = self.run.timers
        config.finalize_model_grads_func = finalize_model_grads

        def each(name: str) -> Any:
            functions = [getattr(chunk, name) for chunk in chunks]
            return functions[0] if len(functions) == 1 else functions

        if args.overlap_grad_reduce:
            config.no_sync_func = each("no_sync")
            # With several optimizer instances DDP would reduce once more at the end.
            if args.align_grad_reduce and args.num_distributed_optimizer_instances == 1:
                config.grad_sync_func = each("start_grad_sync")
        if args.overlap_param_gather and args.align_param_gather:
            config.param_sync_func = each("start_param_sync")

    def _set_batch_size(self, hooks: _ForwardHooks) -> None:
        """Follow the ramp of the batch size; a checkpoint is saved before each of its steps."""
        run = self.run
        before = microbatches.get_num_microbatches()
        microbatches.update_num_microbatches(run.consumed_train_samples, consistency_check=False)
        if microbatches.get_num_microbatches() != before and run.iteration and run.args.save:
            hooks.off()
            self.checkpointer.save()
            hooks.on_again()
        microbatches.update_num_microbatches(run.consumed_train_samples, verbose=True)

    def _batch_size(self) -> int:
        args = self.run.args
        size = microbatches.get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
        return int(size)

    def _skip_batch(self) -> None:
        run = self.run
        iterators = self.iterators.train
        for iterator in iterators if isinstance(iterators, list) else [iterators]:
            for _ in range(microbatches.get_num_microbatches() if iterator is not None else 0):
                next(iterator)
        run.iteration += 1
        run.consumed_train_samples += self._batch_size()
        run.skipped_train_samples += self._batch_size()

    def _step(self) -> StepResult:
        """One iteration: gradients, optimizer, learning rate."""
        run, args, trainee = self.run, self.run.args, self.trainee
        for chunk in trainee.chunks:
            chunk.zero_grad_buffer()
        trainee.optimizer.zero_grad()
        with self.comparison.memory(), self._checks.late():
            reduced = self._forward_backward(
                self.iterators.train, microbatches.get_num_microbatches(), forward_only=False
            )
        if args.empty_unused_memory_level >= 1 and args.device == "cuda":
            torch.cuda.empty_cache()
        losses = _mean_losses(reduced)
        added = added_losses(args, microbatches.get_num_microbatches())
        timed = run.timed("optimizer", level=1, barrier=args.barrier_with_L1_time)
        with timed, run.recorder.span("optimizer"), fused_step(trainee.optimizer):
            successful, grad_norm, num_zeros = trainee.optimizer.step()
        check_step(run, self._checks)  # in bf16 and fp32 nothing was waited for before
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
            params_norm=parameters_norm(trainee.chunks, args.bf16)
            if args.log_params_norm
            else None,
            learning_rate=self._learning_rate(),
            loss_scale=float(trainee.optimizer.get_loss_scale().item()),
            batch_size=self._batch_size(),
        )

    def _forward_backward(self, iterator: Any, count: int, forward_only: bool) -> list[Any]:
        args = self.run.args
        losses: list[Any] = self.schedule(
            forward_step_func=self.forward_step,
            data_iterator=iterator,
            model=self.trainee.chunks,
            num_microbatches=count,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            decoder_seq_length=args.decoder_seq_length,
            forward_only=forward_only,
        )
        return losses

    def _learning_rate(self) -> float:
        """Of the parameters without a learning rate of their own; ranks without any take the
        others'."""
        rates = [
            group["lr"]
            for group in self.trainee.optimizer.param_groups
            if not group.get("is_decoupled_lr", False)
        ]
        return _largest(rates[0] if rates else None)[0] or 0.0

    def _count(self, step: StepResult) -> None:
        run = self.run
        run.iteration += 1
        run.consumed_train_samples += step.batch_size
        run.flops_so_far += flops_per_iteration(run.args, step.batch_size)

    def _write_metrics(self, step: StepResult, seconds: float) -> None:
        run = self.run
        if not (run.is_last and run.args.metrics_file):
            return
        losses = {} if step.skipped else step.losses
        self.metrics.write(
            iteration=run.iteration,
            **losses,
            **{
                "grad norm": step.grad_norm,
                "params norm": step.params_norm,
                "num zeros": step.num_zeros,
                "learning rate": step.learning_rate,
                "loss scale": step.loss_scale,
                "skipped": int(step.skipped),
                "seconds": seconds,
                "tokens/s": step.batch_size * run.args.seq_length / seconds,
                "peak memory": peak_memory_bytes(run),
                "consumed samples": run.consumed_train_samples,
            },
        )

    def _after_step(self, hooks: _ForwardHooks) -> bool:
        """Evaluation, garbage, checkpoints; True when the run should end here."""
        run, args = self.run, self.run.args
        interval = args.check_weight_hash_across_dp_replicas_interval
        if interval and run.iteration % interval == 0:
            self._compare_replicas(hooks)
        evaluates = self.iterators.eval_iters and self.iterators.has_valid
        if evaluates and args.eval_interval and run.iteration % args.eval_interval == 0:
            run.timers("interval-time").stop()
            hooks.off()
            if not args.manual_gc or args.manual_gc_eval:
                gc.collect()
            self.evaluate(f"iteration {run.iteration}", self.iterators.valid)
            hooks.on_again()
            run.timers("interval-time", log_level=0).start(barrier=True)
        every = args.manual_gc_interval if args.manual_gc else 0
        if every and run.iteration % every == 0:
            gc.collect()
        reason = self.exits.reason(run.iteration)
        due = args.save and args.save_interval and run.iteration % args.save_interval == 0
        if due or (reason and args.save):
            run.timers("interval-time").stop()
            hooks.off()
            self.checkpointer.save()
            hooks.on_again()
            run.timers("interval-time", log_level=0).start(barrier=True)
        if reason:
            run.say(f"[exiting program at iteration {run.iteration}] {reason}")
        return reason is not None

    def _compare_replicas(self, hooks: _ForwardHooks) -> None:
        from megatron.core.utils import check_param_hashes_across_dp_replicas

        hooks.off()
        if not check_param_hashes_across_dp_replicas(self.trainee.chunks, cross_check=True):
            raise RuntimeError("parameters differ between data-parallel replicas")
        hooks.on_again()

    def evaluate(self, prefix: str, iterator: Any, name: str = "validation") -> None:
        """Print and write the mean losses over ``iterators.eval_iters`` batches."""
        run, args, config = self.run, self.run.args, self.trainee.config
        count = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
        for chunk in self.trainee.chunks:
            chunk.eval()
        totals: dict[str, torch.Tensor] = {}
        timers, config.timers = config.timers, None
        with torch.no_grad():
            for _ in range(self.iterators.eval_iters):
                reduced = self._forward_backward(iterator, count, forward_only=True)
                for key, sums in _summed_losses(reduced).items():
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
    """Parameter gathering by forward hooks (``--overlap-param-gather``): off for the first good
    step, on after it, so that an error in loading does not spread by the first gather.
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

    def after_step(self, skipped: bool) -> None:
        """Switch on after the first step that was not skipped."""
        if self._used and not self._enabled and not skipped:
            self._enabled = True
            self.on_again()

    def off(self) -> None:
        """Gather what is outstanding and remove the hooks."""
        if self._enabled:
            for chunk in self._trainee.chunks:
                chunk.disable_forward_pre_hook(param_sync=True)

    def on_again(self) -> None:
        """Put the hooks back after :meth:`off`."""
        if self._enabled:
            for chunk in self._trainee.chunks:
                chunk.enable_forward_pre_hook()
            self._trainee.config.param_sync_func = self._sync


def _largest(*values: Any) -> list[float | None]:
    """Of each value, at least 0, the largest over the model-parallel ranks; None where no rank has
    one (the gradient norm of a skipped iteration). What is on the device already stays there until
    all are read at once."""
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


def _mean_losses(reduced: list[Any]) -> dict[str, torch.Tensor]:
    """Average of each loss over the microbatches (by tokens where the loss function counts
    them)."""
    if not mpu.is_pipeline_last_stage(ignore_virtual=True) or not reduced:
        return {}
    means = {}
    for key in reduced[0]:
        values = [each[key].view(-1) for each in reduced]
        if values[0].numel() == 2:
            sums = _over_replicas(torch.vstack(values).sum(dim=0))
            means[key] = sums[0] / sums[1]
        else:
            means[key] = _over_replicas(torch.cat(values).mean()) / _num_replicas()
    return means


def _summed_losses(reduced: list[Any]) -> dict[str, torch.Tensor]:
    """Numerator and denominator of each loss of one evaluation batch."""
    if not mpu.is_pipeline_last_stage(ignore_virtual=True) or not reduced:
        return {}
    sums = {}
    for key in reduced[0]:
        values = [each[key].view(-1) for each in reduced]
        if values[0].numel() == 2:
            sums[key] = _over_replicas(torch.vstack(values).sum(dim=0))
        else:
            total = _over_replicas(torch.cat(values).sum())
            sums[key] = torch.stack([total, torch.full_like(total, len(values) * _num_replicas())])
    return sums


def _over_replicas(sums: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(sums, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return sums


def _num_replicas() -> int:
    return int(mpu.get_data_parallel_world_size(with_context_parallel=True))
