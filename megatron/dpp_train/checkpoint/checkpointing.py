"""Saves and resumes: megatron-core's dist_checkpointing (``torch_dist``) and plain ``torch`` files.

Keys and layout are Megatron-LM core_v0.16.1's, so its checkpoints load here and ours load there. A
``torch_dist`` checkpoint may be resumed with other tensor, pipeline, virtual and data parallel
sizes. ``checkpoint_files`` places the files and makes them visible.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.utils import unwrap_model

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.checkpoint import checksums, durable, random_state
from megatron.dpp_train.checkpoint import files as files
from megatron.dpp_train.checkpoint.first_state import add_steps, begun, teach_sgd
from megatron.dpp_train.checkpoint.plain_data import only_plain_data
from megatron.dpp_train.checkpoint.saved_args import check_model, check_optimizer
from megatron.dpp_train.checkpoint.saving import note_shards, noting, saving, verify
from megatron.dpp_train.checkpoint.writers import bound_request, bound_writers
from megatron.dpp_train.exits import sigterm_held_back
from megatron.dpp_train.hf.load import fill
from megatron.dpp_train.model.build import Trainee
from megatron.dpp_train.model.fsdp import as_shards, shards_keep_identity
from megatron.dpp_train.optimizer.optimizer import fill_state, own_steps, steps_may_lack
from megatron.dpp_train.options.run_config import Settings
from megatron.dpp_train.state import Run, note_progress

_VERSION = 3.0


@dataclass
class Wanted:
    """The parts of a checkpoint that a run loads beside the parameters."""

    progress: bool
    optimizer: bool
    random: bool

    @classmethod
    def of(cls, args: Settings, found: files.Found) -> Wanted:
        """By the flags; a release starts a new run."""
        resumes = not (args.finetune or found.release or found.pretrained)
        return cls(resumes, resumes and not args.no_load_optim, resumes and not args.no_load_rng)


class Checkpointer:
    """Saves and loads the state of one run. As a context it waits for background writes at its end,
    but not after an error."""

    def __init__(self, run: Run, trainee: Trainee) -> None:
        self._run, self._trainee = run, trainee
        self._models = unwrap_model(trainee.chunks)
        self._strategy: Any = None
        self._random_state: Any = None
        self._wanted = Wanted(progress=True, optimizer=True, random=True)
        args = run.args
        self._queue = AsyncCallsQueue(args.use_persistent_ckpt_worker) if args.async_save else None
        self.last_saved = -1
        """Iteration of the last checkpoint that this run saved or started to save."""

    @property
    def _folder(self) -> str:
        return self._run.args.save or ""

    # --- saving ---

    def save(self) -> None:
        """Writes a checkpoint of the present iteration; a collective.

        Raises:
            DataError: writing failed; the previous checkpoint is unchanged.
        """
        run, args, folder = self._run, self._run.args, self._folder
        iteration = run.iteration
        self._finish(blocking=True)
        run.say(
            f"saving checkpoint at iteration {iteration:7d} to {args.save} ({args.ckpt_format})"
        )
        start = time.perf_counter()
        with saving(folder, iteration) as target:
            if run.is_first:
                files.begin(folder, iteration)
            dist.barrier()
            held_back = sigterm_held_back() if args.exit_signal_handler else nullcontext()
            with begun(self._trainee.optimizer), held_back:
                in_background = self._write(target)
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

    def _write(self, target: Path) -> bool:
        """Writes the state; True when the write goes on in the background and commits itself."""
        if self._run.args.ckpt_format == "torch":
            self._write_torch(target)
            return False
        return self._write_distributed(target)

    def _write_torch(self, target: Path) -> None:
        args = self._run.args
        path = target / _rank_directory() / "model_optim_rng.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        optimizer = self._trainee.optimizer
        if args.use_distributed_optimizer and not args.no_save_optim:
            share = path.with_name("distrib_optim.pt")
            with durable.naming(share):
                optimizer.save_parameter_state(str(share))
        generators = random_state.collect(args, sharded=False)  # may be a collective
        if mpu.get_expert_data_parallel_rank() == 0:
            state = self._common_state(generators)
            for name, model in self._named_models():
                state[name] = model.state_dict_for_save_checkpoint()
            if not args.no_save_optim:
                state["optimizer"] = optimizer.state_dict()
                state["opt_param_scheduler"] = self._trainee.scheduler.state_dict()
            with durable.naming(path, RuntimeError):
                torch.save(state, path)
            checksums.note(target, [path], self._run.rank)

    def _write_distributed(self, target: Path) -> bool:
        args, iteration = self._run.args, self._run.iteration
        metadata = _content_metadata(args)
        state = self._sharded_state(metadata, with_random=not args.no_save_rng)
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
                preprocess_common_before_consistancy_check=_without_rank,
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

    def poll(self) -> None:
        """Commits background writes that are done; called between iterations. A collective.

        Raises:
            DataError: one of them failed; the previous checkpoint is unchanged.
        """
        self._finish(blocking=False)

    def _finish(self, *, blocking: bool) -> None:
        if self._queue is not None and self._queue.get_num_unfinalized_calls():
            with saving(self._folder, self.last_saved):
                self._queue.maybe_finalize_async_calls(blocking=blocking)

    def close(self) -> None:
        """Waits for background writes and commits them; calling it twice is fine."""
        self._finish(blocking=True)
        self._end_queue(abort=False)

    def _end_queue(self, *, abort: bool) -> None:
        if self._queue is not None:
            self._queue.close(abort=abort)
            self._queue = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:  # no commit, which is a collective: the other ranks may be in the middle of another
            self._end_queue(abort=True)

    # --- the state ---

    def _named_models(self) -> list[tuple[str, Any]]:
        if len(self._models) == 1:
            return [("model", self._models[0])]
        return [(f"model{i}", model) for i, model in enumerate(self._models)]

    def _common_state(self, random_state: Any) -> dict[str, Any]:
        run = self._run
        state: dict[str, Any] = {
            "args": _saved_args(run),
            "checkpoint_version": _VERSION,
            "iteration": run.iteration,
            "num_floating_point_operations_so_far": run.flops_so_far,
        }
        if not run.args.no_save_rng:
            state["rng_state"] = random_state
        return state

    def _sharded_state(
        self, metadata: dict[str, Any], *, with_random: bool, loading: bool = False
    ) -> dict[str, Any]:
        """The whole state for dist_checkpointing; with ``loading`` as a request for it."""
        args, trainee = self._run.args, self._trainee
        state = self._common_state(random_state.collect(args, sharded=True))
        if not with_random:
            state.pop("rng_state", None)
        for name, model in self._named_models():
            state[name] = model.sharded_state_dict(metadata=metadata)
        wanted = self._wanted.optimizer if loading else not args.no_save_optim
        if trainee.optimizer is not None and wanted:
            options = {"is_loading": True} if loading else {}
            if loading:
                fill_state(trainee.optimizer)
                teach_sgd(trainee.optimizer)
            with shards_keep_identity():
                state["optimizer"] = trainee.optimizer.sharded_state_dict(
                    state, metadata=metadata, **options
                )
            state["opt_param_scheduler"] = trainee.scheduler.state_dict()
        return state

    # --- loading ---

    def load(self) -> None:
        """Resumes from ``--load``, or starts from ``--pretrained-checkpoint``, if one exists.

        Raises:
            DataError: the checkpoint is broken or does not fit the model.
            ConfigError: this layout cannot read its optimizer state.
        """
        run, args = self._run, self._run.args
        if run.is_first:
            for line in files.tidy_own(args):
                run.say(f"warning: {line}")
        dist.barrier()
        found = files.find_start(args)
        if found is None and args.load_hf:
            fill(run, self._models)
            if self._trainee.optimizer is not None and (args.fp16 or args.bf16):
                self._trainee.optimizer.reload_model_params()
            dist.barrier()
            return
        if found is None:
            if args.load:
                run.say(f"{args.load}: no checkpoint yet; starting from random parameters")
            return
        run.say(f" loading checkpoint {found.path} ...")
        verify(run, found)
        self._wanted = Wanted.of(args, found)
        with nullcontext() if found.is_deepspeed else only_plain_data(found.path):
            self._apply(self._read(found), found)
        run.say(f"  successfully loaded checkpoint {found.path} at iteration {run.iteration}")

    def _read(self, found: files.Found) -> dict[str, Any]:
        return self._read_distributed(found) if found.is_distributed else self._read_torch(found)

    def _read_torch(self, found: files.Found) -> dict[str, Any]:
        path = found.path / _rank_directory() / "model_optim_rng.pt"
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error
        saved = state.get("args")
        if saved is not None and self._wanted.optimizer and "optimizer" in state:
            check_optimizer(self._run.args, saved, found.path)
        return state

    def _read_distributed(self, found: files.Found) -> dict[str, Any]:
        args = self._run.args
        path = str(found.path)
        common = dist_checkpointing.load_common_state_dict(path)
        saved = common.get("args", SimpleNamespace())
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
        metadata["dp_cp_group"] = mpu.get_data_parallel_group(with_context_parallel=True)
        same = _model_layout(saved) == _model_layout(args)
        wanted = self._wanted
        wanted.optimizer &= not getattr(saved, "no_save_optim", False)
        if not same and wanted.progress:
            self._check_resharding(saved, metadata)
        if wanted.optimizer:
            check_optimizer(args, saved, found.path)
        if wanted.progress:
            check_model(args, saved, found.path)
        with_random = same and wanted.random and not getattr(saved, "no_save_rng", False)
        request = self._sharded_state(metadata, with_random=with_random, loading=True)
        strategy = get_default_load_sharded_strategy(path)
        if args.ckpt_fully_parallel_load:
            strategy = FullyParallelLoadStrategyWrapper(strategy, metadata["dp_cp_group"])
        try:
            state: dict[str, Any] = dist_checkpointing.load(
                request, path, strategy, strict=args.dist_ckpt_strictness
            )
        except (dist_checkpointing.core.CheckpointingException, OSError, KeyError) as error:
            raise DataError(f"{found.path}: does not fit this model ({error})") from error
        if not with_random:
            state.pop("rng_state", None)
        return state

    def _check_resharding(self, saved: Any, metadata: dict[str, Any]) -> None:
        run, args = self._run, self._run.args
        layouts = f"(TP, PP) is {_model_layout(args)}, the checkpoint's {_model_layout(saved)}"
        run.say(f"{layouts}: its random state is not used")
        kind = metadata.get("distrib_optim_sharding_type")
        if args.use_distributed_optimizer and self._wanted.optimizer and kind == "dp_reshardable":
            raise ConfigError(
                f"{layouts}, and its distributed optimizer state was saved for one layout: save it "
                "with --dist-ckpt-optim-fully-reshardable, or load with --no-load-optim"
            )

    def _apply(self, state: dict[str, Any], found: files.Found) -> None:
        run, args = self._run, self._run.args
        saved = state.get("args")
        if self._wanted.progress:
            run.iteration = int(state["iteration"])
            run.flops_so_far = float(state.get("num_floating_point_operations_so_far", 0.0))
            if saved is not None:
                check_model(args, saved, found.path)
                run.consumed_train_samples = getattr(saved, "consumed_train_samples", 0)
                run.skipped_train_samples = getattr(saved, "skipped_train_samples", 0)
                run.consumed_valid_samples = getattr(saved, "consumed_valid_samples", 0)
                update_num_microbatches(run.consumed_train_samples)
        self._apply_model(state, found)
        self._apply_optimizer(state, found)
        if self._wanted.random:
            self._random_state = state.get("rng_state")
        dist.barrier()

    def _apply_model(self, state: dict[str, Any], found: files.Found) -> None:
        for (name, _), chunk in zip(self._named_models(), self._trainee.chunks, strict=True):
            try:
                chunk.load_state_dict(state[name])
            except (RuntimeError, KeyError) as error:
                raise DataError(f"{found.path}: does not fit this model ({error})") from error

    def restore_random_state(self) -> None:
        """Sets the generators to the checkpoint's states, if it has any.

        Call it when everything is built: ``data`` draws for its loaders from the CPU's generator,
        which without a GPU is dropout's.
        """
        if self._random_state is not None:
            random_state.restore(self._run.args, self._random_state)
            self._random_state = None

    def _apply_optimizer(self, state: dict[str, Any], found: files.Found) -> None:
        args, trainee = self._run.args, self._trainee
        optimizer = trainee.optimizer
        if optimizer is None:
            return
        if not self._wanted.optimizer:
            if args.fp16 or args.bf16:
                optimizer.reload_model_params()
            return
        if "optimizer" not in state:
            raise DataError(f"{found.path}: holds no optimizer state; add --no-load-optim")
        if not optimizer.is_stub_optimizer:
            loaded = state["optimizer"]
            if args.use_torch_fsdp2:
                loaded = as_shards(optimizer, loaded)
            if found.is_distributed:
                add_steps(optimizer, loaded)
            with steps_may_lack(), torch.no_grad():  # in fp32 it copies into views of parameters
                optimizer.load_state_dict(loaded)
                if args.use_distributed_optimizer and not found.is_distributed:
                    path = found.path / _rank_directory() / "distrib_optim.pt"
                    optimizer.load_parameter_state(str(path))
            own_steps(optimizer)
        self._apply_scheduler(state, found)

    def _apply_scheduler(self, state: dict[str, Any], found: files.Found) -> None:
        try:
            self._trainee.scheduler.load_state_dict(state["opt_param_scheduler"])
        except AssertionError as error:  # megatron-core's way to refuse another schedule
            raise ConfigError(
                f"{found.path}: {error}; give the flags it was saved with, or choose with "
                "--override-opt_param-scheduler (flags) or --use-checkpoint-opt_param-scheduler"
            ) from error


def _rank_directory() -> str:
    """This rank's directory inside a ``torch`` checkpoint."""
    pipeline = mpu.get_pipeline_model_parallel_world_size() > 1
    expert = mpu.get_expert_model_parallel_world_size() > 1
    return files.rank_directory(
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_pipeline_model_parallel_rank() if pipeline else None,
        mpu.get_expert_model_parallel_rank() if expert else None,
    )


def _saved_args(run: Run) -> argparse.Namespace:
    """The arguments with the run's progress, where Megatron-LM looks for it."""
    values = {
        **vars(run.args),
        "iteration": run.iteration,
        "consumed_train_samples": run.consumed_train_samples,
        "skipped_train_samples": run.skipped_train_samples,
        "consumed_valid_samples": run.consumed_valid_samples,
        "add_position_embedding": True,
        "rank": 0,
        "local_rank": 0,
    }
    return argparse.Namespace(**values)


def _without_rank(common: dict[str, Any]) -> dict[str, Any]:
    """The part that must be equal on all ranks: megatron-core compares it before saving."""
    return {
        key: vars(value) if key == "args" else value
        for key, value in common.items()
        if key != "optimizer"  # the order of parameter groups differs between ranks
    }


def _content_metadata(args: Settings) -> dict[str, Any]:
    """Describes the shards of the state, as Megatron-LM notes it in the checkpoint."""
    metadata: dict[str, Any] = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }
    if args.use_distributed_optimizer:
        full = args.dist_ckpt_optim_fully_reshardable
        metadata["distrib_optim_sharding_type"] = "fully_reshardable" if full else "dp_reshardable"
        if full:
            efficient = "distrib_optim_fully_reshardable_mem_efficient"
            metadata[efficient] = getattr(args, efficient)
    return metadata


def _model_layout(args: Any) -> tuple[int, int]:
    return (
        getattr(args, "tensor_model_parallel_size", 1),
        getattr(args, "pipeline_model_parallel_size", 1),
    )
