"""``--deepspeed-zero-stage``: DeepSpeed's ZeRO engine inside of Megatron's own loop.

Model, data, learning rate, loop and log stay Megatron's. Forward, backward, clipping, loss scale
and update are the engine's, and so are its checkpoints. Data parallelism alone. torchrun starts it
under ``megatron.dpp.run`` in the place of ``pretrain_gpt.py``; ``megatron-dpp train --mode
deepspeed --engine deepspeed`` does so.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.utils import get_model_config

from megatron.dpp.errors import ConfigError, DataError

TRACKER = "latest_checkpointed_iteration.txt"


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the engine's flag to Megatron's parser, and return it."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument(
        "--deepspeed-zero-stage",
        type=int,
        choices=(1, 2, 3),
        help="share optimizer state (1), gradients (2) and parameters (3) by DeepSpeed's engine",
    )
    return parser


@contextlib.contextmanager
def engine() -> Iterator[None]:
    """Let Megatron's loop train with DeepSpeed's engine in the block."""
    from megatron.training import training

    run = _Run(training.setup_model_and_optimizer, training.get_optimizer_param_scheduler)
    with mock.patch.multiple(
        training,
        setup_model_and_optimizer=run.set_up,
        get_forward_backward_func=lambda **_: accumulate,
        save_checkpoint=run.save,
    ):
        yield


class _Run:
    """Stands in for Megatron's functions that build and save what the engine has."""

    def __init__(self, set_up: Callable[..., Any], scheduler: Callable[..., Any]) -> None:
        self._set_up, self._scheduler_of = set_up, scheduler
        self._engine: Any = None
        self._scheduler: Any = None

    def set_up(self, *words: Any, **options: Any) -> tuple[list[EngineChunk], Any, Any]:
        """The model as Megatron builds it, its parameters in an engine."""
        from megatron.training import get_args

        args = get_args()
        sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
        if sizes != (1, 1):
            raise ConfigError(
                "--deepspeed-zero-stage: DeepSpeed's engine shards replicas of one process: leave "
                "tensor and pipeline parallel sizes out"
            )
        own = bool(args.load and next(Path(args.load).glob("iter_*/zero_pp_rank_*"), None))
        given = {"skip_train": args.skip_train, "load": args.load}
        args.skip_train, args.load = True, None if own else args.load
        (module,), _, _ = self._set_up(*words, **options)
        vars(args).update(given)
        optimizer = _torch_optimizer(args, module)
        self._engine = _start(args, module, optimizer)
        self._scheduler = self._scheduler_of(optimizer)
        if own:
            self._load(args)
        chunk = EngineChunk(self._engine, module)
        return [chunk], EngineOptimizer(self._engine), self._scheduler

    def _load(self, args: Any) -> None:
        step = args.ckpt_step or int(Path(args.load, TRACKER).read_text(encoding="utf-8"))
        path, state = self._engine.load_checkpoint(args.load, tag=f"iter_{step:07d}")
        if path is None:
            raise DataError(f"--load {args.load}: DeepSpeed's engine cannot load iter_{step:07d}")
        args.iteration, args.consumed_train_samples = state["iteration"], state["samples"]
        self._scheduler.load_state_dict(state["scheduler"])

    def save(self, iteration: int, *_: Any, **__: Any) -> None:
        """Write the engine's own files; then name them as the latest checkpoint."""
        from megatron.training import get_args

        args = get_args()
        state = {
            "iteration": iteration,
            "samples": args.consumed_train_samples,
            "scheduler": self._scheduler.state_dict(),
        }
        tag = f"iter_{iteration:07d}"
        self._engine.save_checkpoint(args.save, tag=tag, client_state=state, save_latest=False)
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            scratch = Path(args.save, f".{TRACKER}")
            scratch.write_text(str(iteration), encoding="utf-8")
            scratch.replace(Path(args.save, TRACKER))


def _start(args: Any, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """A new engine over the parameters as they are."""
    os.environ["DS_ACCELERATOR"] = "cuda" if torch.cuda.is_available() else "cpu"
    own = str(Path(__file__).parent)  # a script's folder comes first, and holds this deepspeed.py
    sys.path[:] = [each for each in sys.path if each != own]
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    try:
        return deepspeed.initialize(
            model=module, optimizer=optimizer, config=settings(args), dist_init_required=False
        )[0]
    except (ValueError, AssertionError) as error:  # the package's way to refuse settings
        why = " ".join(str(error).split())
        stage = args.deepspeed_zero_stage
        raise ConfigError(f"--deepspeed-zero-stage {stage}: DeepSpeed refuses ({why})") from error


def settings(args: Any) -> dict[str, Any]:
    """DeepSpeed's configuration for Megatron's parsed flags."""
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": microbatches,
        "gradient_clipping": args.clip_grad,
        "zero_optimization": {"stage": args.deepspeed_zero_stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        "bf16": {"enabled": args.bf16},
        "fp16": {"enabled": args.fp16},
    }
    if args.fp16:
        found["fp16"] |= {
            "loss_scale": args.loss_scale or 0,  # 0: dynamic
            "initial_scale_power": int(math.log2(args.initial_loss_scale)),
            "loss_scale_window": args.loss_scale_window,
            "hysteresis": args.hysteresis,
            "min_loss_scale": args.min_loss_scale,
        }
    return found


def _torch_optimizer(args: Any, module: torch.nn.Module) -> torch.optim.Optimizer:
    """PyTorch's optimizer; biases and norms have no weight decay, as in Megatron."""
    plain: list[torch.Tensor] = []
    decayed: list[torch.Tensor] = []
    for name, parameter in module.named_parameters():
        is_plain = parameter.ndim == 1 or name.endswith(".bias")
        (plain if is_plain else decayed).append(parameter)
    kinds = ((decayed, 1.0), (plain, 0.0))
    groups = [
        {"params": each, "wd_mult": scale, "default_config": True} for each, scale in kinds if each
    ]
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=args.lr, momentum=args.sgd_momentum)
    return torch.optim.AdamW(
        groups, lr=args.lr, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_eps
    )


class EngineChunk:
    """The engine as the one model chunk of a run, with the names that Megatron's loop asks for."""

    def __init__(self, engine: Any, module: torch.nn.Module) -> None:
        self.engine, self.module = engine, module
        self.config: Any = get_model_config(module)

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """The model's forward."""
        return self.engine(*inputs, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def zero_grad_buffer(self) -> None:
        """A no-op: the engine frees gradients after use."""


class EngineOptimizer:
    """The engine's optimizer with the names of megatron-core's."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.is_stub_optimizer = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """PyTorch's groups, whose learning rates are in force."""
        groups: list[dict[str, Any]] = self._engine.optimizer.optimizer.param_groups
        return groups

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss unchanged: the engine's backward scales it."""
        return loss

    def get_loss_scale(self) -> torch.Tensor:
        """The scale of the last step, 1 without fp16."""
        return torch.tensor(
            float(self._engine.optimizer.loss_scale) if self._engine.fp16_enabled() else 1.0
        )

    def zero_grad(self) -> None:
        """A no-op: the engine frees gradients after use."""

    def step(self) -> tuple[bool, float | None, None]:
        """Update the parameters: True unless the step was skipped, the norm of the gradients, and
        None for the number of zeros."""
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
    """Run microbatches one after the other, with the keywords of megatron-core's schedules; each
    counts by its mean loss. Returns what each microbatch's loss function gives for the log."""
    (chunk,), reports = model, []
    iterator = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
    for index in range(num_microbatches):
        chunk.engine.set_gradient_accumulation_boundary(index == num_microbatches - 1)
        output, loss_function = forward_step_func(iterator, chunk)
        loss, *counts, report = loss_function(output)
        if counts:
            loss = loss / counts[0].clamp(min=1)
        if not forward_only:
            chunk.engine.backward(loss / num_microbatches, scale_wrt_gas=False)
        reports.append(report)
    return reports


def main() -> None:
    """Train GPT with the flags of the command line."""
    from megatron.dpp_train.pretrain import gpt

    with engine():
        gpt.main(add_arguments)


if __name__ == "__main__":
    main()
