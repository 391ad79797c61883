"""The content of a checkpoint: its keys, the shards of its state, and the files of a rank.

Keys and layout are Megatron-LM core_v0.16.1's, so its checkpoints load here and ours load there.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from megatron.core import parallel_state as mpu
from megatron.core.utils import unwrap_model

from megatron.dpp_train.checkpoint import files as files
from megatron.dpp_train.checkpoint import random_state
from megatron.dpp_train.checkpoint.first_state import teach_sgd
from megatron.dpp_train.checkpoint.saved_args import WORKING_DIRECTORY
from megatron.dpp_train.model.build import Trainee
from megatron.dpp_train.model.fsdp import shards_keep_identity
from megatron.dpp_train.optimizer.optimizer import fill_state
from megatron.dpp_train.options.run_config import Settings
from megatron.dpp_train.state import PROGRESS, Run

_VERSION = 3.0


class Contents:
    """The state of a run and its model in a checkpoint's form.

    Attributes:
        models: the chunks without wrappers, as they were when this was made.
    """

    def __init__(self, run: Run, trainee: Trainee) -> None:
        self.run, self.trainee = run, trainee
        self.models = unwrap_model(trainee.chunks)

    def named_models(self) -> list[tuple[str, Any]]:
        """Each chunk with its key."""
        if len(self.models) == 1:
            return [("model", self.models[0])]
        return [(f"model{i}", model) for i, model in enumerate(self.models)]

    def common(self, random_states: Any) -> dict[str, Any]:
        """The part that all ranks share, and the random states unless ``--no-save-rng``."""
        run = self.run
        state: dict[str, Any] = {
            "args": self._args(),
            "checkpoint_version": _VERSION,
            "iteration": run.iteration,
            "num_floating_point_operations_so_far": run.flops_so_far,
        }
        if not run.args.no_save_rng:
            state["rng_state"] = random_states
        return state

    def whole(self) -> dict[str, Any] | None:
        """This rank's state for a ``torch`` file, None where another replica writes it; a
        collective."""
        args, trainee = self.run.args, self.trainee
        generators = random_state.collect(args, sharded=False)  # may be a collective
        if mpu.get_expert_data_parallel_rank() != 0:
            return None
        state = self.common(generators)
        for name, model in self.named_models():
            state[name] = model.state_dict_for_save_checkpoint()
        if not args.no_save_optim:
            state["optimizer"] = trainee.optimizer.state_dict()
            state["opt_param_scheduler"] = trainee.scheduler.state_dict()
        return state

    def shards(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """This rank's state for a save by dist_checkpointing."""
        args = self.run.args
        state = self._models_shards(metadata, with_random=not args.no_save_rng)
        if not args.no_save_optim:
            self._add_optimizer(state, metadata)
        return state

    def request(self, metadata: dict[str, Any], *, optimizer: bool, random: bool) -> dict[str, Any]:
        """The state that dist_checkpointing loads into: the parameters, and what is asked for."""
        state = self._models_shards(metadata, with_random=random)
        if optimizer and self.trainee.optimizer is not None:
            fill_state(self.trainee.optimizer)
            teach_sgd(self.trainee.optimizer)
            self._add_optimizer(state, metadata, is_loading=True)
        return state

    def _models_shards(self, metadata: dict[str, Any], *, with_random: bool) -> dict[str, Any]:
        state = self.common(random_state.collect(self.run.args, sharded=True))
        if not with_random:
            state.pop("rng_state", None)
        for name, model in self.named_models():
            state[name] = model.sharded_state_dict(metadata=metadata)
        return state

    def _add_optimizer(
        self, state: dict[str, Any], metadata: dict[str, Any], **options: bool
    ) -> None:
        trainee = self.trainee
        if trainee.optimizer is None:
            return
        with shards_keep_identity():
            state["optimizer"] = trainee.optimizer.sharded_state_dict(
                state, metadata=metadata, **options
            )
        state["opt_param_scheduler"] = trainee.scheduler.state_dict()

    def _args(self) -> argparse.Namespace:
        """The arguments with the run's progress, where Megatron-LM looks for it."""
        run = self.run
        values = {
            **vars(run.args),
            "iteration": run.iteration,
            **{name: getattr(run, name) for name in PROGRESS},
            "add_position_embedding": True,
            "rank": 0,
            "local_rank": 0,
            WORKING_DIRECTORY: _working_directory(),
        }
        return argparse.Namespace(**values)


def _working_directory() -> str | None:
    """The directory in which this rank works; None where it is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def rank_file(checkpoint: Path) -> Path:
    """This rank's file of a ``torch`` checkpoint."""
    return checkpoint / _rank_directory() / "model_optim_rng.pt"


def optimizer_file(checkpoint: Path) -> Path:
    """This rank's share of the distributed optimizer in a ``torch`` checkpoint."""
    return checkpoint / _rank_directory() / "distrib_optim.pt"


def _rank_directory() -> str:
    pipeline = mpu.get_pipeline_model_parallel_world_size() > 1
    expert = mpu.get_expert_model_parallel_world_size() > 1
    return files.rank_directory(
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_pipeline_model_parallel_rank() if pipeline else None,
        mpu.get_expert_model_parallel_rank() if expert else None,
    )


def equal_on_all_ranks(common: dict[str, Any]) -> dict[str, Any]:
    """The part that must be equal on all ranks: megatron-core compares it before saving."""
    shared = {
        key: vars(value) if key == "args" else value
        for key, value in common.items()
        if key != "optimizer"  # the order of parameter groups differs between ranks
    }
    if "args" in shared:
        local = (WORKING_DIRECTORY, "model_origin")  # each node may have its own
        shared["args"] = {key: each for key, each in shared["args"].items() if key not in local}
    return shared


def content_metadata(args: Settings) -> dict[str, Any]:
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


def model_layout(args: Any) -> tuple[int, int]:
    """Tensor and pipeline parallel sizes of a run, or of the one that saved a checkpoint."""
    return (
        getattr(args, "tensor_model_parallel_size", 1),
        getattr(args, "pipeline_model_parallel_size", 1),
    )
