"""Reads checkpoints: finds the one to start from, checks that it fits, and takes its state over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.num_microbatches_calculator import update_num_microbatches
from torch.distributed.checkpoint.api import CheckpointException  # no Exception, by its base
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron.dpp.errors import ConfigError, DataError, DppError, one_line
from megatron.dpp.safe_files import FileState
from megatron.dpp_train import culprits
from megatron.dpp_train.checkpoint import files as files
from megatron.dpp_train.checkpoint.contents import Contents, model_layout, optimizer_file, rank_file
from megatron.dpp_train.checkpoint.first_state import add_steps
from megatron.dpp_train.checkpoint.guards import verify
from megatron.dpp_train.checkpoint.plain_data import only_plain_data
from megatron.dpp_train.checkpoint.saved_args import check_model, check_optimizer, other_slices
from megatron.dpp_train.hf.load import fill
from megatron.dpp_train.model.fsdp import as_shards
from megatron.dpp_train.optimizer.optimizer import own_steps, steps_may_lack
from megatron.dpp_train.options.run_config import Settings
from megatron.dpp_train.state import PROGRESS

_SCHEDULE = {
    "max_lr": "highest",
    "min_lr": "lowest",
    "lr_warmup_steps": "samples of warm-up",
    "lr_decay_steps": "samples until the lowest",
    "lr_decay_style": "style",
}
"""Settings of the learning rate in a checkpoint, and their names for people."""
_UNFIT = (dist_checkpointing.core.CheckpointingException, OSError, KeyError)
_MISSING = "Missing key in checkpoint"
"""Errors of megatron-core and PyTorch about a state that a checkpoint does not have."""


@contextmanager
def _unchanged(path: Path) -> Iterator[None]:
    """Around the check of a checkpoint's files and their reading.

    Raises:
        DataError: one of them was written or moved meanwhile.
    """
    before = {file: FileState.of(file) for file in path.rglob("*") if file.is_file()}
    yield
    for file, was in before.items():
        if FileState.of(file) != was:
            raise DataError(f"{file}: written or moved while it was loaded; start again")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Around reading a checkpoint: makes one plain error of what a damaged file, or a state that
    the model does not have, raises.

    Raises:
        DataError: with the checkpoint's path.
    """
    try:
        yield
    except (DppError, torch.OutOfMemoryError):
        raise
    except (Exception, CheckpointException) as error:
        by_rank = getattr(error, "failures", {0: (error, None)})  # as PyTorch gathers them
        causes = [cause for cause, _ in by_rank.values()]
        if any(map(culprits.find, causes)):
            raise  # of a rank that ended, or of memory
        unfit = all(isinstance(cause, _UNFIT) or _MISSING in str(cause) for cause in causes)
        what = "does not fit this model" if unfit else "cannot be read, it is damaged"
        if any(isinstance(cause, FileNotFoundError) for cause in causes):
            what = "was moved, or a file of it, while it was loaded"
        raise DataError(f"{path}: {what} ({one_line(causes[0], 300)})") from error


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


class Loader:
    """Loads the state of one run."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self._run, self._trainee = contents.run, contents.trainee

    def load(self) -> Any:
        """Takes over what ``--load``, ``--pretrained-checkpoint`` or ``--load-hf`` names, if it
        exists; a collective.

        Returns:
            The random states to go on with, or None.

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
            fill(run, self.contents.models)
            self._renew_main_parameters()
            dist.barrier()
            return None
        if found is None:
            if args.load:
                run.say(f"{args.load}: no checkpoint yet; starting from random parameters")
            return None
        run.say(f" loading checkpoint {found.path} ...")
        # One rank looks, as each look at a file of a network's may ask the server.
        with _unchanged(found.path) if run.is_first else nullcontext():
            verify(run, found)
            wanted = Wanted.of(args, found)
            plain = nullcontext() if found.is_deepspeed else only_plain_data(found.path)
            with _reading(found.path), plain:
                state = self.read(found, wanted)
                self._take(state, found, wanted)
        run.say(f"  successfully loaded checkpoint {found.path} at iteration {run.iteration}")
        return state.get("rng_state") if wanted.random else None

    def read(self, found: files.Found, wanted: Wanted) -> dict[str, Any]:
        """The state in a checkpoint that fits. Takes from ``wanted`` what was not saved."""
        if found.is_distributed:
            return self._read_shards(found, wanted)
        return self._read_whole(found, wanted)

    def _read_whole(self, found: files.Found, wanted: Wanted) -> dict[str, Any]:
        path = rank_file(found.path)
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error
        saved = state.get("args")
        if saved is not None and wanted.optimizer and "optimizer" in state:
            check_optimizer(self._run.args, saved, found.path)
        return state

    def _read_shards(self, found: files.Found, wanted: Wanted) -> dict[str, Any]:
        args, path = self._run.args, str(found.path)
        common = dist_checkpointing.load_common_state_dict(path)
        saved = common.get("args", SimpleNamespace())
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
        metadata["dp_cp_group"] = mpu.get_data_parallel_group(with_context_parallel=True)
        same = model_layout(saved) == model_layout(args)
        wanted.optimizer &= not getattr(saved, "no_save_optim", False)
        if not same and wanted.progress:
            self._check_resharding(saved, metadata, wanted)
        if wanted.optimizer:
            check_optimizer(args, saved, found.path)
        if wanted.progress:
            check_model(args, saved, found.path)
        with_random = same and wanted.random and not getattr(saved, "no_save_rng", False)
        request = self.contents.request(metadata, optimizer=wanted.optimizer, random=with_random)
        strategy = get_default_load_sharded_strategy(path)
        strategy.load_tensors_metadata = _tensors_in
        if args.ckpt_fully_parallel_load:
            strategy = FullyParallelLoadStrategyWrapper(strategy, metadata["dp_cp_group"])
        state: dict[str, Any] = dist_checkpointing.load(
            request, path, strategy, strict=args.dist_ckpt_strictness
        )
        if not with_random:
            state.pop("rng_state", None)
        return state

    def _check_resharding(self, saved: Any, metadata: dict[str, Any], wanted: Wanted) -> None:
        run, args = self._run, self._run.args
        layouts = f"(TP, PP) is {model_layout(args)}, the checkpoint's {model_layout(saved)}"
        run.say(f"{layouts}: its random state is not used")
        kind = metadata.get("distrib_optim_sharding_type")
        if args.use_distributed_optimizer and wanted.optimizer and kind == "dp_reshardable":
            raise ConfigError(
                f"{layouts}, and its distributed optimizer state was saved for one layout: save it "
                "with --dist-ckpt-optim-fully-reshardable, or load with --no-load-optim"
            )

    def _take(self, state: dict[str, Any], found: files.Found, wanted: Wanted) -> None:
        run, args = self._run, self._run.args
        saved = state.get("args")
        if wanted.progress:
            run.iteration = int(state["iteration"])
            run.flops_so_far = float(state.get("num_floating_point_operations_so_far", 0.0))
            if saved is not None:
                check_model(args, saved, found.path)
                if line := other_slices(args, saved, found.path):
                    run.say(f"warning: {line}")
                for name, new in PROGRESS.items():
                    setattr(run, name, getattr(saved, name, new))
                update_num_microbatches(run.consumed_train_samples)
        self.take_model(state, found)
        self.take_optimizer(state, found, wanted)
        dist.barrier()

    def take_model(self, state: dict[str, Any], found: files.Found) -> None:
        """Puts the parameters into the chunks.

        Raises:
            DataError: they do not fit.
        """
        for (name, _), chunk in zip(
            self.contents.named_models(), self._trainee.chunks, strict=True
        ):
            try:
                chunk.load_state_dict(state[name])
            except (RuntimeError, KeyError) as error:
                raise DataError(f"{found.path}: does not fit this model ({error})") from error

    def take_optimizer(self, state: dict[str, Any], found: files.Found, wanted: Wanted) -> None:
        """Puts the optimizer's and the scheduler's states into them, where they are wanted.

        Raises:
            DataError: there are none.
            ConfigError: the scheduler's is another one's.
        """
        args, optimizer = self._run.args, self._trainee.optimizer
        if optimizer is None:
            return
        if not wanted.optimizer:
            self._renew_main_parameters()
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
                    optimizer.load_parameter_state(str(optimizer_file(found.path)))
            own_steps(optimizer)
        self.take_scheduler(state, found)

    def _renew_main_parameters(self) -> None:
        """In 16 bit: else the first step would put the random parameters back."""
        args, optimizer = self._run.args, self._trainee.optimizer
        if optimizer is not None and (args.fp16 or args.bf16):
            optimizer.reload_model_params()

    def take_scheduler(self, state: dict[str, Any], found: files.Found) -> None:
        """Puts the state of the learning rate's schedule into it.

        Raises:
            ConfigError: it is another schedule's.
        """
        saved, scheduler = state["opt_param_scheduler"], self._trainee.scheduler
        try:
            scheduler.load_state_dict(saved)
        except AssertionError as error:  # megatron-core's way to refuse another schedule
            raise ConfigError(
                f"{found.path}: {error}; give the flags it was saved with, or choose with "
                "--override-opt_param-scheduler (flags) or --use-checkpoint-opt_param-scheduler"
            ) from error
        changed = [
            f"{text} {getattr(scheduler, name)} (there {saved[name]})"
            for name, text in _SCHEDULE.items()
            if name in saved and getattr(scheduler, name, saved[name]) != saved[name]
        ]
        if changed:
            self._run.say(f"learning rate: not as in the checkpoint: {', '.join(changed)}")


def _tensors_in(
    folder: Path, metadata: Metadata | None = None
) -> dict[str, dist_checkpointing.ShardedTensor]:
    """A checkpoint's tensors without their data. megatron-core's own function hands all that is
    described of a tensor to ``torch.empty``: strides, too, since PyTorch 2.15.
    """
    metadata = metadata or FileSystemReader(folder).read_metadata()
    return {
        key: dist_checkpointing.ShardedTensor.from_rank_offsets(
            key, torch.empty(each.size, dtype=each.properties.dtype, device="meta")
        ).without_data()
        for key, each in metadata.state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }
