"""Parts that the training scripts share: the loop, data sets, batches and sums of losses.

The loop, its flags, optimizers, checkpoints and logs are ``megatron.training``'s. What a script
adds is a model, data sets and a forward step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split

from megatron.dpp_train.pretrain.mended import mended

_DEFAULTS = {"eval_interval": 1000}
"""Values of flags that Megatron's loop needs and gives no value."""

_SPIKE = 10
"""A loss this many times the largest one so far is spiky (``--check-for-spiky-loss``)."""


def train(
    datasets: Callable[..., Any],
    forward_step: Callable[..., Any],
    *,
    model_config: Callable[[Any], Any] | None = None,
    model_provider: Callable[..., Any] | None = None,
    add_arguments: Callable[[Any], Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Parses the command line and runs Megatron's loop on it.

    Args:
        datasets: Megatron's provider of train, validation and test sets.
        forward_step: Megatron's forward step.
        model_config: from parsed arguments to a model configuration of ``megatron.training``.
        model_provider: builds one chunk of a model, in place of ``model_config``.
        add_arguments: adds flags to Megatron's parser, and returns it.
        defaults: values of flags that the command line leaves out.
        around: what holds while models are built and trained.
    """
    datasets.is_distributed = True  # type: ignore[attr-defined]
    with mended(), around():
        args = parse_and_validate_args(
            extra_args_provider=add_arguments, args_defaults={**_DEFAULTS, **(defaults or {})}
        )
        model = None if model_config is None else model_config(args)
        settings = pretrain_cfg_container_from_args(args, model)
        pretrain(
            settings,
            datasets,
            ModelType.encoder_or_decoder,
            forward_step,
            model_provider=model_provider,
        )


def dataset_values(args: Any) -> dict[str, Any]:
    """Values that the configurations of all of megatron-core's data sets share."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": args.split,
        "multiple_validation_sets": args.multiple_validation_sets,
        "full_validation": args.full_validation,
        "num_dataset_builder_threads": args.num_dataset_builder_threads,
        "path_to_cache": args.data_cache_path,
        "mmap_bin_files": args.mmap_bin_files,
        "tokenizer": get_tokenizer(),
        "mid_level_dataset_surplus": args.mid_level_dataset_surplus,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
    }


def is_first_tensor_rank() -> bool:
    """True on the rank of a tensor-parallel group that reads data for all of them."""
    return bool(mpu.get_tensor_model_parallel_rank() == 0)


def next_batch(iterator: Any, layout: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """The next batch of a data iterator, on the device of every tensor-parallel rank.

    Args:
        iterator: yields mappings of tensors on the first tensor-parallel rank.
        layout: name -> dtype of the tensors to take.
    """
    sample = next(iterator) if is_first_tensor_rank() else None
    batch: dict[str, torch.Tensor] = {}
    for dtype in dict.fromkeys(layout.values()):
        names = [name for name, kind in layout.items() if kind == dtype]
        if sample is not None:
            sample |= {name: sample[name].to(dtype) for name in names}
        batch |= tensor_parallel.broadcast_data(names, sample, dtype)
    return batch


def masked_sum(losses: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of ``losses`` [b, s] where ``mask`` [b, s] is 1, in fp32, and the number of such places
    (int32)."""
    flat = mask.view(-1).float()
    return torch.sum(losses.view(-1).float() * flat), flat.sum().detach().to(torch.int)


def checked(loss: torch.Tensor) -> torch.Tensor:
    """``loss``, after the checks of ``--check-for-nan-in-loss-and-grad`` and
    ``--check-for-spiky-loss``; Megatron's state machine ends the run where one fails."""
    args, machine = get_args(), get_rerun_state_machine()
    checks: list[tuple[Callable[..., Any], str, bool]] = []
    if args.check_for_nan_in_loss_and_grad:
        checks.append((lambda value: ~torch.isfinite(value), "the loss is not finite", True))
    if args.check_for_spiky_loss:
        checks.append((_is_spike, "the loss is spiky", False))
    for is_wrong, message, fatal in checks:
        machine.validate_result(
            result=loss, rejection_func=is_wrong, message=message, tolerance=0.0, fatal=fatal
        )
    return loss


def _is_spike(value: torch.Tensor) -> Any:
    machine = get_rerun_state_machine()
    return machine.is_unexpectedly_large(value, threshold=_SPIKE, context="loss")
