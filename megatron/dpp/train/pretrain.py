"""``pretrain``: a whole training run, from command line to exit code.

``pretrain_gpt.py`` and ``pretrain_bert.py`` call :func:`main`. Settings that cannot work are
printed once, as one line, and end every rank with exit code 2 before a process group exists, most
of them before PyTorch is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.dpp.cli import arguments, preflight
from megatron.dpp.errors import ConfigError, DataError, DppError

if TYPE_CHECKING:
    from megatron.dpp.train.task import Task

Args = argparse.Namespace

_FAILED = 1
_INTERRUPTED = 130


def main(task_name: str, argv: Sequence[str] | None = None) -> int:
    """Train; the process's exit code.

    Args:
        task_name: ``gpt`` or ``bert``.
        argv: the command line; ``sys.argv`` when None.
    """
    rank, world_size = arguments.rank_and_world()
    try:
        args, tokenizer = preflight.check(task_name, argv, world_size)
        args = _settled(args)
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        arguments.dpp_config(args).node_ip(rank, world_size, ranks_per_node)
    except (ConfigError, DataError) as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return preflight.BAD_INPUT
    if rank == 0:
        for line in arguments.warnings_of(args):
            print(f"warning: {line}", file=sys.stderr, flush=True)
    try:
        pretrain(args, task_name, rank, tokenizer)
    except DppError as error:
        print(f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _settled(args: Args) -> Args:
    """``args`` with the values that need PyTorch, checked by megatron-core; without other ranks."""
    if args.disable_jit_fuser:  # read when PyTorch is imported
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from megatron.dpp.train.configs import check_with_core, settled

    args = settled(args)
    check_with_core(args)
    return args


def pretrain(args: Args, task_name: str, rank: int, tokenizer: Any) -> None:
    """Build the run that checked ``args`` describe, and train."""
    from megatron.dpp.cli import planned, settings
    from megatron.dpp.train.diagnostics import note_progress
    from megatron.dpp.train.initialize import initialize

    run = initialize(args, rank)
    run.tokenizer = tokenizer
    run.say(settings.summary(args, task_name))
    if args.dpp_plan:
        run.say(planned.describe(args))
    if run.is_first:
        _save_settings(run)
    note_progress(run, "Starting job")
    with contextlib.ExitStack() as stack:
        run.recorder = stack.enter_context(_recorder(run))
        _train(run, task_name, stack)
    folder = _trace_layout(run).path(args.trace_dir).parent
    # Not after an error: the other ranks may be in the middle of a collective.
    _leave(run)
    if args.trace:
        run.say(f"trace: {folder}")
        run.say(f"look at it: python profiling/aggregate.py --benchmark_dir {folder}")


def _save_settings(run: Any) -> None:
    """Beside the checkpoints, else the TensorBoard files or the trace."""
    from megatron.dpp.cli import settings

    args = run.args
    folder = args.save or args.tensorboard_dir
    if folder is None and args.trace:
        folder = _trace_layout(run).path(args.trace_dir).parent
    if folder is None:
        return
    try:
        run.say(f"settings: {settings.save(args, Path(folder))}")
    except OSError as error:
        raise DataError(f"{folder}: the settings cannot be saved ({error.strerror})") from error


def _train(run: Any, task_name: str, stack: contextlib.ExitStack) -> None:
    from megatron.dpp.train.checkpointing import Checkpointer
    from megatron.dpp.train.configs import transformer_config
    from megatron.dpp.train.data import build_iterators
    from megatron.dpp.train.diagnostics import Diagnostics
    from megatron.dpp.train.exits import ExitConditions
    from megatron.dpp.train.logs import Writers
    from megatron.dpp.train.loop import Trainer
    from megatron.dpp.train.measure import Comparison
    from megatron.dpp.train.metrics import MetricsFile, gather_hashes
    from megatron.dpp.train.model import build_trainee
    from megatron.dpp.train.zero_engine import EngineCheckpointer

    args, task = run.args, _task(task_name)
    config = transformer_config(args)
    trainee = build_trainee(run, config, task.build_chunk)
    kind = EngineCheckpointer if args.deepspeed_zero_stage else Checkpointer
    checkpointer = stack.enter_context(kind(run, trainee))
    checkpointer.load()
    iterators = stack.enter_context(
        contextlib.closing(build_iterators(run, len(trainee.chunks), task))
    )
    checkpointer.restore_random_state()
    metrics = stack.enter_context(MetricsFile(args.metrics_file if run.is_last else None))
    trainer = Trainer(
        run=run,
        trainee=trainee,
        forward_step=task.forward_step(run),
        schedule=stack.enter_context(_schedule(run)),
        iterators=iterators,
        writers=stack.enter_context(contextlib.closing(Writers(run))),
        metrics=metrics,
        exits=stack.enter_context(ExitConditions(run)),
        checkpointer=checkpointer,
        comparison=Comparison(run, trainee.chunks, trainee.optimizer, task_name),
        diagnostics=stack.enter_context(contextlib.closing(Diagnostics(run))),
    )
    run.say("training ..." if not args.skip_train else "skipping training (--skip-train is on) ...")
    complete = args.skip_train or trainer.train()
    if iterators.eval_iters and complete:
        place = f"iteration {run.iteration} on"
        if iterators.has_valid:
            trainer.evaluate(f"{place} validation set", iterators.valid)
        if iterators.has_test:
            trainer.evaluate(f"{place} test set", iterators.test, "test")
    if args.metrics_file:
        metrics.write(iteration=run.iteration, parameters_sha256=gather_hashes(run, trainee.chunks))


def _task(name: str) -> Task:
    from megatron.dpp.train.task import Task

    family = importlib.import_module(f"megatron.dpp.train.{name}")
    return Task(
        family.build_chunk, family.datasets, family.forward_step, every_stage_reads=name == "bert"
    )


@contextlib.contextmanager
def _schedule(run: Any) -> Iterator[Callable[..., Any]]:
    """The dynamic pipeline with ``--use-dpp``, megatron-core's own schedules without.

    ``--dpp-inject`` and ``--dpp-transport`` work with both, so that each can be measured alone.
    With dropout and several stages both draw a task's masks from what the task is, so that their
    losses are equal; ``--no-dpp-task-rng`` restores Megatron-LM's own order of draws. DeepSpeed's
    engine has one stage, and no schedule to choose.
    """
    if run.args.deepspeed_zero_stage:
        from megatron.dpp.train.zero_engine import accumulate

        yield accumulate
        return
    from megatron.dpp.train.logs import print_peaks

    config = arguments.dpp_config(run.args)
    options = {"recorder": run.recorder, "seed": run.args.seed, "log": run.say_stage}
    schedule: Any
    if run.args.use_dpp:
        from megatron.dpp import DppSchedule

        schedule = DppSchedule(config, **options)
    else:
        from megatron.dpp.runtime.static import StaticSchedule

        schedule = StaticSchedule(config, **options)

    def call(**keywords: Any) -> Any:
        if not keywords["forward_only"]:
            schedule.iteration = run.iteration  # random states continue after a resume
        return schedule(**keywords)

    with schedule:  # leaving by an error tells the other ranks why
        yield call
        if run.args.use_dpp:
            print_peaks(run, schedule.peak_held)


def _recorder(run: Any) -> Any:
    """Where a trace goes: a file per rank with ``--trace``, nowhere without."""
    from megatron.dpp.trace import NullRecorder, open_recorder, parse_iterations

    args = run.args
    if not args.trace:
        return NullRecorder()
    return open_recorder(
        args.trace_dir,
        rank=run.rank,
        layout=_trace_layout(run),
        device=run.device,
        iterations=parse_iterations(args.trace_iterations) if args.trace_iterations else None,
        interval=args.trace_interval,
    )


def _trace_layout(run: Any) -> Any:
    from megatron.core import parallel_state as mpu

    from megatron.dpp.trace import TraceLayout

    args = run.args
    return TraceLayout(
        data=mpu.get_data_parallel_rank(),
        pipeline=mpu.get_pipeline_model_parallel_rank(),
        tensor=mpu.get_tensor_model_parallel_rank(),
        data_size=args.data_parallel_size,
        pipeline_size=args.pipeline_model_parallel_size,
        tensor_size=args.tensor_model_parallel_size,
        num_chunks=args.virtual_pipeline_model_parallel_size or 1,
        schedule="dpp" if args.use_dpp else "pp",
    )


def _leave(run: Any) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()  # nobody closes connections while another is in its last collective
        dist.destroy_process_group()
    if run.cpu_support is not None:
        run.cpu_support.close()
