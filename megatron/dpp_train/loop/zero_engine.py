"""``--deepspeed-zero-stage``: DeepSpeed's engine instead of megatron-core's gradient buffers and
optimizer.

Model, data, learning rate, loop and log lines stay the same. ``job`` uses
:class:`EngineCheckpointer`, which starts the engine, instead of ``Checkpointer``, and
:func:`accumulate` instead of a schedule. The loop sees an :class:`EngineChunk` and an
:class:`EngineOptimizer`. The package is optional; ``validate`` refuses the flag without it.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron.dpp.errors import ConfigError, DataError, one_line
from megatron.dpp_train.checkpoint import files as files
from megatron.dpp_train.checkpoint import random_state
from megatron.dpp_train.checkpoint.checkpointing import Checkpointer
from megatron.dpp_train.checkpoint.contents import Contents
from megatron.dpp_train.checkpoint.loader import Loader, Wanted
from megatron.dpp_train.checkpoint.saver import Saver
from megatron.dpp_train.model.build import Trainee, build_scheduler
from megatron.dpp_train.model.configs import optimizer_config
from megatron.dpp_train.optimizer.optimizer import parameter_groups
from megatron.dpp_train.options.run_config import RunConfig
from megatron.dpp_train.state import Run


def start_engine(run: Run, trainee: Trainee) -> None:
    """Hands the chunk of ``trainee`` to a new engine, and replaces chunk, optimizer and scheduler.

    The engine takes the parameters as they are: load a checkpoint in Megatron's form before.
    """
    os.environ["DS_ACCELERATOR"] = run.device.type  # read when the package is imported
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    args = run.args
    (chunk,) = trainee.chunks
    optimizer = _torch_optimizer(args, chunk)
    try:
        engine, *_ = deepspeed.initialize(
            model=chunk, optimizer=optimizer, config=engine_settings(args), dist_init_required=False
        )
    except (ValueError, AssertionError) as error:  # the package's way to refuse settings
        raise ConfigError(
            f"--deepspeed-zero-stage {args.deepspeed_zero_stage}: DeepSpeed refuses "
            f"({one_line(error)})"
        ) from error
    trainee.chunks = [EngineChunk(engine)]
    trainee.optimizer = EngineOptimizer(engine)
    trainee.scheduler = build_scheduler(args, optimizer)


def engine_settings(args: RunConfig) -> dict[str, Any]:
    """DeepSpeed's configuration for these flags."""
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": microbatches,
        "gradient_clipping": args.clip_grad,
        "zero_optimization": {"stage": args.deepspeed_zero_stage},
        "steps_per_print": None,
        "bf16": {"enabled": args.bf16},
        "fp16": {"enabled": args.fp16},
    }
    if args.fp16:
        settings["fp16"] |= {
            "loss_scale": args.loss_scale or 0,  # 0: dynamic
            "initial_scale_power": int(math.log2(args.initial_loss_scale)),
            "loss_scale_window": args.loss_scale_window,
            "hysteresis": args.hysteresis,
            "min_loss_scale": args.min_loss_scale,
        }
    return settings


def _torch_optimizer(args: RunConfig, chunk: torch.nn.Module) -> torch.optim.Optimizer:
    """PyTorch's optimizer over megatron-core's parameter groups, which differ in weight decay and
    learning rate."""
    groups = parameter_groups([chunk], optimizer_config(args))
    if args.optimizer == "sgd":
        return torch.optim.SGD(
            groups, lr=args.lr, weight_decay=args.weight_decay, momentum=args.sgd_momentum
        )
    kind = torch.optim.AdamW if args.decoupled_weight_decay else torch.optim.Adam
    return kind(
        groups,
        lr=args.lr,
        weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_eps,
    )


class EngineChunk:
    """The engine as the one model chunk of a run."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.module = engine, engine.module

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """The model's forward."""
        return self.engine(*inputs, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def zero_grad_buffer(self) -> None:
        """A no-op: the engine frees gradients after use."""

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter's part on this rank: with stage 3 its shard, else all of it."""
        for name, parameter in self.module.named_parameters():
            yield name, getattr(parameter, "ds_tensor", parameter)

    def parameters(self) -> Iterator[torch.Tensor]:
        """The parameters of :meth:`named_parameters`, without their names."""
        return (parameter for _, parameter in self.named_parameters())

    def gradient_bytes(self) -> int:
        """Bytes of gradients between two microbatches: with stage 2 a share, else all of them."""
        total = sum(parameter.nbytes for parameter in self.parameters())
        stage = self.engine.zero_optimization_stage()
        return total // self.engine.dp_world_size if stage == 2 else total


class EngineOptimizer:
    """The engine's optimizer with the names of megatron-core's."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.optimizer = engine.optimizer.optimizer  # PyTorch's, over this rank's share
        self.is_stub_optimizer = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """PyTorch's groups, whose learning rates and weight decays are in force."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @property
    def fp32_from_float16_groups(self) -> list[list[torch.Tensor]]:
        """The engine's fp32 copies of its shard."""
        return [group["params"] for group in self.param_groups]

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss unchanged: ``engine.backward`` scales it."""
        return loss

    def get_loss_scale(self) -> torch.Tensor:
        """The scale of the last step, 1 without fp16."""
        scale = self._engine.optimizer.loss_scale if self._engine.fp16_enabled() else 1.0
        return torch.tensor(float(scale))

    def zero_grad(self) -> None:
        """A no-op: the engine frees gradients after use."""

    def step(self) -> tuple[bool, float | None, None]:
        """Updates the parameters.

        Returns:
            True unless the step was skipped, the norm of the gradients (None then), and None for
            the number of zeros.
        """
        self._engine.step()
        if not self._engine.was_step_applied():
            return False, None, None
        return True, float(self._engine.get_global_grad_norm()), None


def accumulate(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: list[EngineChunk],
    num_microbatches: int,
    forward_only: bool,
    **_: Any,
) -> list[dict[str, torch.Tensor]]:
    """Runs microbatches one after the other, with the keywords of megatron-core's
    ``forward_backward_func``; each counts by its mean loss.

    Returns:
        The values of each microbatch's loss function for the log.
    """
    (chunk,), losses = model, []
    for index in range(num_microbatches):
        chunk.engine.set_gradient_accumulation_boundary(index == num_microbatches - 1)
        output, loss_function = forward_step_func(data_iterator, chunk)
        loss, *num_tokens, logged = loss_function(output)
        if num_tokens:
            loss = loss / num_tokens[0].clamp(min=1)
        if not forward_only:
            chunk.engine.backward(loss / num_microbatches, scale_wrt_gas=False)
        losses.append(logged)
    return losses


class EngineLoader(Loader):
    """Reads the engine's own files, or those in Megatron's form, which may have any layout."""

    def load(self) -> Any:
        """As :meth:`Loader.load`; also starts the engine, after it has read the parameters of a
        checkpoint in Megatron's form.

        Raises:
            ConfigError: the run asks for the optimizer state of a checkpoint in Megatron's form.
        """
        run, trainee = self.contents.run, self.contents.trainee
        found = files.find_start(run.args)
        if found is not None and found.is_deepspeed:
            start_engine(run, trainee)
            return super().load()
        if found is not None and Wanted.of(run.args, found).optimizer:
            raise ConfigError(
                f"{found.path} was not saved by DeepSpeed's engine, which can read its parameters "
                "but not its optimizer state: add --no-load-optim"
            )
        states = super().load()
        start_engine(run, trainee)
        return states

    def read(self, found: files.Found, wanted: Wanted) -> dict[str, Any]:
        if not found.is_deepspeed:
            return super().read(found, wanted)
        path, state = _engine(self.contents).load_checkpoint(
            str(found.path.parent),
            tag=found.path.name,
            load_optimizer_states=wanted.optimizer,
            load_module_only=not wanted.optimizer,
        )
        if path is None:
            raise DataError(f"{found.path}: DeepSpeed could not load it")
        return dict(state)

    def take_model(self, state: dict[str, Any], found: files.Found) -> None:
        if not found.is_deepspeed:
            super().take_model(state, found)

    def take_optimizer(self, state: dict[str, Any], found: files.Found, wanted: Wanted) -> None:
        if found.is_deepspeed and wanted.optimizer:
            self.take_scheduler(state, found)


class EngineSaver(Saver):
    """Writes the engine's own files in the directories of ``files``: a killed save leaves the
    previous checkpoint usable. They fit one ZeRO stage and one number of ranks."""

    def write(self, target: Path) -> bool:
        contents = self.contents
        state = contents.common(random_state.collect(contents.run.args, sharded=False))
        state["opt_param_scheduler"] = contents.trainee.scheduler.state_dict()
        _engine(contents).save_checkpoint(
            str(target.parent), tag=target.name, client_state=state, save_latest=False
        )
        return False


def _engine(contents: Contents) -> Any:
    return contents.trainee.chunks[0].engine


class EngineCheckpointer(Checkpointer):
    """Saves and loads the engine's own files; ``load`` also starts the engine."""

    loader_kind, saver_kind = EngineLoader, EngineSaver
