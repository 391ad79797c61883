"""A run with a model of a few numbers, whose checkpoints are real ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp_train.checkpoint import files as files
from megatron.dpp_train.checkpoint import loader
from megatron.dpp_train.checkpoint.checkpointing import Checkpointer
from megatron.dpp_train.model.build import Trainee
from megatron.dpp_train.options.run_config import Settings
from megatron.dpp_train.state import Progress
from tests.checkpoint import shards

ARGS = {
    "ckpt_format": "torch", "async_save": False, "exit_signal_handler": False,
    "save_retain_interval": None, "load": None, "ckpt_step": None, "pretrained_checkpoint": None,
    "exit_on_missing_checkpoint": False, "finetune": False, "load_hf": None, "no_load_optim": False,
    "no_load_rng": False, "no_save_optim": False, "no_save_rng": False, "fp16": False,
    "bf16": False, "use_torch_fsdp2": False, "use_distributed_optimizer": False, "world_size": 1,
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "log_progress": False,
    "expert_model_parallel_size": 1, "skip_train": False, "data_parallel_random_init": False,
    "ckpt_assume_constant_structure": False, "ckpt_fully_parallel_save": False,
    "ckpt_fully_parallel_load": False, "dist_ckpt_optim_fully_reshardable": False,
    "dist_ckpt_strictness": "assume_ok_unexpected", "use_persistent_ckpt_worker": False,
    "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 16,
    "tokenizer_type": "NullTokenizer",
}  # fmt: skip


class Chunk:
    """A model of one tensor; ``before_save`` may fail."""

    def __init__(self, name: str = "weight", value: float = 0.0) -> None:
        self.name, self.value = name, value
        self.metadata: dict[str, Any] = {}

    def before_save(self) -> None:
        pass

    def state_dict_for_save_checkpoint(self) -> dict[str, Any]:
        self.before_save()
        return {self.name: torch.full((9,), self.value)}

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        self.before_save()
        self.metadata = dict(metadata)
        return {self.name: shards.sharded(self.name, int(self.value))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = float(state[self.name][0])


class Optimizer:
    """An optimizer with one moment and, in files of its own, a share of it."""

    is_stub_optimizer = False

    def __init__(self, events: list[str]) -> None:
        self.events, self.moment, self.share = events, 0, 0

    def save_parameter_state(self, path: str) -> None:
        torch.save(self.share, path)

    def load_parameter_state(self, path: str) -> None:
        assert not torch.is_grad_enabled(), "in fp32 it copies into views of parameters"
        self.share = torch.load(path)
        self.events.append("share")

    def state_dict(self) -> dict[str, Any]:
        return {"moment": torch.full((9,), float(self.moment))}

    def sharded_state_dict(self, state: Any, metadata: Any, **options: Any) -> dict[str, Any]:
        self.events.append(f"shards {sorted(options)}")
        return {"moment": shards.sharded("moment", self.moment)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not torch.is_grad_enabled(), "in fp32 it copies into views of parameters"
        self.moment = int(state["moment"][0])
        self.events.append("moment")

    def reload_model_params(self) -> None:
        self.events.append("reload")


class Scheduler:
    def __init__(self) -> None:
        self.steps = 0
        self.lr_decay_steps = 48

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.steps, "lr_decay_steps": self.lr_decay_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["num_steps"]


class Job:
    """A run that notes what it says, and the door to its checkpoints, which is made at first use:
    set ``run.args`` and the model before."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, **args: Any) -> None:
        shards.write_here(patch)
        patch.setattr(loader, "update_num_microbatches", self._ramp)
        self._patch, self.folder = patch, folder
        self.events: list[str] = []
        self.run: Any = SimpleNamespace(
            args=Settings.of(ARGS | {"save": str(folder)} | args),
            rank=0, is_first=True, iteration=0, flops_so_far=0.0, say=self._say,
            **vars(Progress()),
        )  # fmt: skip
        self.chunks = [Chunk()]
        self.optimizer: Any = Optimizer(self.events)
        self.scheduler = Scheduler()
        self._door: Checkpointer | None = None

    @property
    def door(self) -> Checkpointer:
        if self._door is None:
            chunks: Any = self.chunks
            config: Any = None
            trainee = Trainee(chunks, config, self.optimizer, self.scheduler)
            self._door = Checkpointer(self.run, trainee)
        return self._door

    def _say(self, text: str) -> None:
        self.events.append(text.split()[0])

    def _ramp(self, samples: int) -> None:
        self.events.append(f"ramp {samples}")

    def save(self, iteration: int) -> None:
        """Saves a state that is the number of its iteration in every part."""
        self.run.iteration = iteration
        for chunk in self.chunks:
            chunk.value = float(iteration)
        if self.optimizer is not None:
            self.optimizer.moment = self.optimizer.share = iteration
        self.scheduler.steps = iteration
        self.door.save()

    def next(self, **args: Any) -> Job:
        """A new run that has loaded what this one saved."""
        job = self.started(**args)
        job.door.load()
        return job

    def started(self, **args: Any) -> Job:
        """A new run with this one's arguments that is to load what it saved."""
        given = vars(self.run.args) | {"load": str(self.folder), "async_save": False} | args
        return Job(self._patch, self.folder, **given)

    def state(self) -> tuple[float, ...]:
        """Iteration, parameter, moment, share and steps of the schedule."""
        optimizer = self.optimizer
        return (
            self.run.iteration, self.chunks[0].value, optimizer.moment, optimizer.share,
            self.scheduler.steps,
        )  # fmt: skip

    def newest(self) -> str:
        return (self.folder / files.TRACKER).read_text()

    def there(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("iter_*"))
