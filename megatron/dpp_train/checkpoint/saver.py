"""Writes checkpoints: now or in the background, in directories that ``files`` begins and
commits."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)

from megatron.dpp.errors import DataError
from megatron.dpp_train.checkpoint import checksums, durable
from megatron.dpp_train.checkpoint import files as files
from megatron.dpp_train.checkpoint.contents import (
    Contents,
    content_metadata,
    equal_on_all_ranks,
    optimizer_file,
    rank_file,
)
from megatron.dpp_train.checkpoint.first_state import begun
from megatron.dpp_train.checkpoint.guards import note_shards, noting, saving
from megatron.dpp_train.checkpoint.writers import bound_request, bound_writers
from megatron.dpp_train.exits import sigterm_held_back
from megatron.dpp_train.state import note_progress


class Saver:
    """Saves the state of one run."""

    def __init__(self, contents: Contents) -> None:
        self.contents, self._run = contents, contents.run
        self._strategy: Any = None
        args = contents.run.args
        self._queue = AsyncCallsQueue(args.use_persistent_ckpt_worker) if args.async_save else None
        self.last_saved = -1
        """Iteration of the last checkpoint that this run saved or started to save."""

    @property
    def _folder(self) -> str:
        return self._run.args.save or ""

    def save(self) -> None:
        """Writes a checkpoint of the present iteration; a collective.

        Raises:
            DataError: writing failed; the previous checkpoint is unchanged.
        """
        run, args, folder = self._run, self._run.args, self._folder
        iteration = run.iteration
        self.finish(blocking=True)
        run.say(
            f"saving checkpoint at iteration {iteration:7d} to {args.save} ({args.ckpt_format})"
        )
        start = time.perf_counter()
        with saving(folder, iteration) as target:
            if run.is_first:
                files.begin(folder, iteration)
            dist.barrier()
            held_back = sigterm_held_back() if args.exit_signal_handler else nullcontext()
            with begun(self.contents.trainee.optimizer), held_back:
                in_background = self.write(target)
            if not in_background:
                dist.barrier()
                self._commit(iteration, start)
                dist.barrier()
        self.last_saved = iteration

    def _commit(self, iteration: int, start: float) -> None:
        run, args = self._run, self._run.args
        if not run.is_first:
            return
        before = self._to_remove(iteration)
        files.commit(self._folder, iteration)
        seconds = time.perf_counter() - start
        run.say(
            f"  successfully saved checkpoint from iteration {iteration:7d} to {args.save} "
            f"in {seconds:.1f} s"
        )
        note_progress(run, f"Saved checkpoint\tIteration: {iteration}")
        if before is not None:
            files.remove(before)

    def _to_remove(self, iteration: int) -> Path | None:
        """The checkpoint that the one of ``iteration`` replaces, by ``--save-retain-interval``."""
        args = self._run.args
        keep = args.save_retain_interval
        if not keep:
            return None
        try:
            before = files.find(args.save)
        except DataError:  # it was removed already
            return None
        if before is None or before.iteration == iteration or not before.iteration % keep:
            return None
        return before.path

    def write(self, target: Path) -> bool:
        """Writes the state; True when the write goes on in the background and commits itself."""
        if self._run.args.ckpt_format == "torch":
            self._write_whole(target)
            return False
        return self._write_shards(target)

    def _write_whole(self, target: Path) -> None:
        args = self._run.args
        path = rank_file(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        if args.use_distributed_optimizer and not args.no_save_optim:
            share = optimizer_file(target)
            with durable.naming(share):
                self.contents.trainee.optimizer.save_parameter_state(str(share))
        state = self.contents.whole()
        if state is not None:
            with durable.naming(path, RuntimeError):
                torch.save(state, path)
            checksums.note(target, [path], self._run.rank)

    def _write_shards(self, target: Path) -> bool:
        args, iteration = self._run.args, self._run.iteration
        metadata = content_metadata(args)
        state = self.contents.shards(metadata)
        reuse = self._strategy is not None and args.ckpt_assume_constant_structure
        if self._strategy is None:
            self._strategy = self._save_strategy()
        start = time.perf_counter()
        with bound_writers(in_background=args.async_save):
            request = dist_checkpointing.save(
                state,
                str(target),
                self._strategy,
                async_sharded_save=args.async_save,
                validate_access_integrity=not reuse,
                preprocess_common_before_consistancy_check=equal_on_all_ranks,
                content_metadata={k: v for k, v in metadata.items() if k != "dp_cp_group"},
            )
        if request is None:
            note_shards(target, self._run.rank)
            return False
        request = noting(request, target, self._run.rank)
        assert self._queue is not None
        request.add_finalize_fn(lambda: self._commit(iteration, start))
        self._queue.schedule_async_request(bound_request(request))
        return True

    def _save_strategy(self) -> Any:
        args = self._run.args
        strategy = get_default_save_sharded_strategy("torch_dist")
        if args.ckpt_assume_constant_structure:
            strategy.use_cached_ckpt_structure = True
        if args.ckpt_fully_parallel_save:
            group = mpu.get_data_parallel_group(with_context_parallel=True)
            strategy = FullyParallelSaveStrategyWrapper(
                strategy, group, args.ckpt_assume_constant_structure
            )
        return strategy

    def finish(self, *, blocking: bool) -> None:
        """Commits background writes that are done; with ``blocking`` waits for all. A collective.

        Raises:
            DataError: one of them failed; the previous checkpoint is unchanged.
        """
        if self._queue is not None and self._queue.get_num_unfinalized_calls():
            with saving(self._folder, self.last_saved):
                self._queue.maybe_finalize_async_calls(blocking=blocking)

    def end(self, *, abort: bool) -> None:
        """Ends the process of background writes; calling it twice is fine."""
        if self._queue is not None:
            self._queue.close(abort=abort)
            self._queue = None
