"""One training job, from checked arguments to the last evaluation."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron.dpp import DppSchedule, StaticSchedule
from megatron.dpp.core.slices import Unit
from megatron.dpp.errors import FAILED, DataError, error_line, print_error, tell_torchrun
from megatron.dpp.trace import NullRecorder, TraceLayout, open_recorder, parse_iterations
from megatron.dpp_train import culprits
from megatron.dpp_train.checkpoint.checkpointing import Checkpointer
from megatron.dpp_train.cost import planned
from megatron.dpp_train.data.samples import build_iterators
from megatron.dpp_train.exits import ExitConditions
from megatron.dpp_train.hf.load import export
from megatron.dpp_train.initialize import initialize
from megatron.dpp_train.loop.diagnostics import Diagnostics
from megatron.dpp_train.loop.logs import print_peaks
from megatron.dpp_train.loop.loop import Trainer
from megatron.dpp_train.loop.measure import Comparison, fit_slices
from megatron.dpp_train.loop.metrics import MetricsFile, gather_hashes
from megatron.dpp_train.loop.writers import Writers
from megatron.dpp_train.loop.zero_engine import EngineCheckpointer, accumulate
from megatron.dpp_train.model.build import build_trainee
from megatron.dpp_train.model.configs import transformer_config
from megatron.dpp_train.model.tasks import TASKS
from megatron.dpp_train.options import settings
from megatron.dpp_train.options.run_config import RunConfig
from megatron.dpp_train.options.trace_layout import trace_layout
from megatron.dpp_train.state import Run, note_progress


def run_job(args: RunConfig, task_name: str, rank: int, tokenizer: Any) -> None:
    """Joins the job that settled ``args`` describe, trains, and leaves it.

    Raises:
        DppError: the run cannot start or go on.
    """
    with culprits.watching_ends(partial(_give_up, rank)):
        run, trace_folder = _run_to_its_end(args, task_name, rank, tokenizer)
    _leave(run)  # not after an error: the other ranks may be in the middle of a collective
    args = run.args
    if args.save_hf and run.is_first:
        export(run)  # may take longer than a collective's deadline: no rank waits
    if args.trace:
        run.say(f"trace: {trace_folder}")
        folder = shlex.quote(str(trace_folder))
        run.say(f"look at it: megatron-dpp report --benchmark_dir {folder}")


def _give_up(rank: int, told: str) -> None:
    """End this rank, which waits for one that has ended."""
    said = f"rank {rank}: {told}; this rank has waited for it since"
    tell_torchrun(error_line(said), printed=True)
    print_error(said)
    os._exit(FAILED)


def _run_to_its_end(args: RunConfig, task_name: str, rank: int, tokenizer: Any) -> tuple[Run, Path]:
    """The run after its last iteration, and the folder of its trace."""
    run = initialize(args, rank)
    run.tokenizer = tokenizer
    run.say(settings.summary(args, task_name))
    if args.dpp_plan:
        run.say(planned.describe(args))
    args = run.args = fit_slices(run, task_name)
    layout = trace_layout(
        args,
        mpu.get_data_parallel_rank(),
        mpu.get_pipeline_model_parallel_rank(),
        mpu.get_tensor_model_parallel_rank(),
    )
    trace_folder = layout.path(args.trace_dir).parent
    if run.is_first:
        _save_settings(run, trace_folder)
        _link_trace(args, trace_folder)
    note_progress(run, "Starting job")
    with _recorder(run, layout) as run.recorder, contextlib.ExitStack() as stack:
        _train(run, task_name, stack)
    return run, trace_folder


def _save_settings(run: Run, trace_folder: Path) -> None:
    """Saves them in the run's directory, else beside the checkpoints, the TensorBoard files or the
    trace."""
    args = run.args
    folder = (
        os.environ.get("RUN_DIR")
        or args.save
        or args.tensorboard_dir
        or (trace_folder if args.trace else None)
    )
    if folder is None:
        return
    try:
        run.say(f"settings: {settings.save(args, Path(folder))}")
    except OSError as error:
        raise DataError(f"{folder}: the settings cannot be saved ({error.strerror})") from error


def _link_trace(args: RunConfig, trace_folder: Path) -> None:
    """Gives a trace in the run's directory the name ``benchmark/data-...`` as well; a directory of
    that name stays."""
    home = os.environ.get("RUN_DIR")
    if not (args.trace and home and Path(home) in trace_folder.absolute().parents):
        return
    link = Path("benchmark") / trace_folder.name
    with contextlib.suppress(OSError):  # the trace itself is elsewhere
        link.parent.mkdir(exist_ok=True)
        scratch = link.with_name(f".{link.name}-{os.getpid()}")
        scratch.symlink_to(trace_folder.absolute())
        try:
            scratch.replace(link)
        finally:
            scratch.unlink(missing_ok=True)


def _train(run: Run, task_name: str, stack: contextlib.ExitStack) -> None:
    args, task = run.args, TASKS[task_name]
    trainee = build_trainee(run, transformer_config(args), task.build_chunk)
    kind = EngineCheckpointer if args.deepspeed_zero_stage else Checkpointer
    checkpointer = stack.enter_context(kind(run, trainee))
    checkpointer.load()
    iterators = stack.enter_context(closing(build_iterators(run, len(trainee.chunks), task)))
    checkpointer.restore_random_state()
    metrics = stack.enter_context(closing(MetricsFile(args.metrics_file if run.is_last else None)))
    trainer = Trainer(
        run=run,
        trainee=trainee,
        forward_step=task.forward_step(run),
        schedule=stack.enter_context(_schedule(run)),
        iterators=iterators,
        writers=stack.enter_context(Writers(run)),
        metrics=metrics,
        exits=stack.enter_context(closing(ExitConditions(run))),
        checkpointer=checkpointer,
        comparison=Comparison(run, trainee, task_name),
        diagnostics=stack.enter_context(closing(Diagnostics(run))),
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


@contextlib.contextmanager
def _schedule(run: Run) -> Iterator[Callable[..., Any]]:
    """The dynamic schedule with ``--use-dpp``, megatron-core's own without.

    ``--dpp-inject`` and ``--dpp-transport`` work with both, so that each can be measured alone.
    With dropout and several stages both draw the masks of a task from the task's identity, so that
    their losses are equal; ``--no-dpp-task-rng`` restores Megatron-LM's order of draws. DeepSpeed's
    engine has one stage and needs no schedule.
    """
    if run.args.deepspeed_zero_stage:
        yield accumulate
        return
    kind: Any = DppSchedule if run.args.use_dpp else StaticSchedule
    schedule = kind(
        run.args.dpp,
        recorder=run.recorder,
        seed=run.args.seed,
        log=run.say_stage,
    )

    def call(**keywords: Any) -> Any:
        policy, sizes = keywords.pop("policy", None), keywords.pop("sizes", None)
        units, longest = keywords.pop("units", ()), keywords.pop("longest_row", 0)
        if not keywords["forward_only"]:
            schedule.iteration = run.iteration  # random states continue after a resume
            if run.args.use_dpp:
                schedule.policy = policy
        if run.args.use_dpp and sizes is not None:
            schedule.announce(sizes, *([Unit(*unit) for unit in units], longest) if units else ())
        return schedule(**keywords)

    with schedule:  # an error here tells the other ranks the cause
        yield call
        if run.args.use_dpp:
            print_peaks(run, schedule.peak_held)


def _recorder(run: Run, layout: TraceLayout) -> Any:
    """Writes a file per rank with ``--trace``, nothing without."""
    args = run.args
    if not args.trace:
        return NullRecorder()
    return open_recorder(
        args.trace_dir,
        rank=run.rank,
        layout=layout,
        device=run.device,
        iterations=parse_iterations(args.trace_iterations) if args.trace_iterations else None,
        interval=args.trace_interval,
    )


def _leave(run: Run) -> None:
    if dist.is_initialized():
        dist.barrier()  # no rank closes connections while another is in its last collective
        dist.destroy_process_group()
    if run.cpu_support is not None:
        run.cpu_support.close()
