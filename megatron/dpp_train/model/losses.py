"""Losses: checked without making the host wait for the device, averaged for the log, and the ones
that layers add by themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron.dpp.errors import DppError
from megatron.dpp_train.optimizer.grad_checks import GradientChecks
from megatron.dpp_train.options.layer_patterns import layers_with_experts
from megatron.dpp_train.options.run_config import Settings
from megatron.dpp_train.state import Run


def masked_sum(output: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of ``output`` [b, s] where ``mask`` [b, s] is 1, in fp32, and the number of such places
    (int32)."""
    flat = mask.view(-1).float()
    total = torch.sum(output.view(-1).float() * flat)
    return total, flat.sum().detach().to(torch.int)


def require_finite(run: Run, loss: torch.Tensor) -> torch.Tensor:
    """``loss``, unless a training loss of this iteration is known not to be finite.

    An evaluation reports such a loss and goes on, as Megatron-LM's: one microbatch of short
    sentences without a masked token gives BERT a NaN.

    Raises:
        DppError: names iteration and value; off with ``--no-check-for-nan-in-loss-and-grad``.
    """
    if run.args.check_for_nan_in_loss_and_grad and loss.requires_grad:
        _refuse(run, run.loss_check.add(loss, run.iteration))
    return loss


def check_step(run: Run, gradients: GradientChecks) -> None:
    """Checks the losses that were not computed yet when the step was launched, and this rank's
    gradients before their reduction. The parameters may have been updated with them.

    Raises:
        DppError: one of them is not finite.
    """
    _refuse(run, run.loss_check.rest())
    found = gradients.read()
    if found is not None:
        raise _not_finite(run, f"the gradients on rank {run.rank} have a norm of {found}")


def check_norm(run: Run, grad_norm: float | None) -> None:
    """Checks the norm of all gradients, which every rank knows: replicas end together.

    Raises:
        DppError: it is not finite.
    """
    if grad_norm is None or math.isfinite(grad_norm):
        return
    if run.args.check_for_nan_in_loss_and_grad:
        raise _not_finite(run, f"the norm of all gradients is {grad_norm}")


def _refuse(run: Run, loss: float | None) -> None:
    if loss is not None:
        raise _not_finite(run, f"the loss on rank {run.rank} is {loss}")


def _not_finite(run: Run, what: str) -> DppError:
    return DppError(
        f"iteration {run.iteration + 1}: {what}; lower --lr, or pass "
        "--no-check-for-nan-in-loss-and-grad to go on"
    )


_BALANCING = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def added_losses(args: Settings, num_microbatches: int) -> dict[str, torch.Tensor]:
    """Losses that routers and multi-token prediction have added since the last call: means over the
    iteration's microbatches, under Megatron-LM's names. A collective over pipeline and replicas.

    ``load_balancing_loss``, ``z_loss`` and similar ones are means over the layers with experts, the
    same on all ranks; ``mtp_1 loss`` and so on are on the last stage only.
    """
    losses: dict[str, torch.Tensor] = {}
    if args.num_experts:
        from megatron.core.transformer.moe.moe_utils import track_moe_metrics

        kinds = args.moe_router_load_balancing_type
        kinds = [kinds] if isinstance(kinds, str) else kinds
        names = [_BALANCING[kind] for kind in kinds if kind in _BALANCING]
        if args.moe_z_loss_coeff is not None:
            names.append("z_loss")
        track_moe_metrics(
            loss_scale=1 / num_microbatches,
            iteration=0,
            total_loss_dict=losses,
            force_initialize=True,
            track_names=names,
            num_layers=args.num_layers + (args.mtp_num_layers or 0),
            moe_layer_freq=layers_with_experts(args),
            mtp_num_layers=args.mtp_num_layers,
        )
    if args.mtp_num_layers:
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        MTPLossLoggingHelper.track_mtp_metrics(
            1 / num_microbatches, 0, writer=None, total_loss_dict=losses
        )
    return {name: loss.detach().clone() for name, loss in losses.items()}


def mean_losses(reduced: list[Any]) -> dict[str, torch.Tensor]:
    """Average of each loss over microbatches and replicas, by tokens where the loss function counts
    them; empty off the last stage. A collective over the replicas."""
    means = {}
    for name, values in _by_name(reduced):
        if values[0].numel() == 2:
            total, count = _over_replicas(torch.vstack(values).sum(dim=0))
            means[name] = total / count
        else:
            means[name] = _over_replicas(torch.cat(values).mean()) / _num_replicas()
    return means


def summed_losses(reduced: list[Any]) -> dict[str, torch.Tensor]:
    """Numerator and denominator of each loss of one evaluation batch; as :func:`mean_losses`."""
    sums = {}
    for name, values in _by_name(reduced):
        if values[0].numel() == 2:
            sums[name] = _over_replicas(torch.vstack(values).sum(dim=0))
        else:
            total = _over_replicas(torch.cat(values).sum())
            count = torch.full_like(total, len(values) * _num_replicas())
            sums[name] = torch.stack([total, count])
    return sums


def _by_name(reduced: list[Any]) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Each loss with its values of all microbatches."""
    if mpu.is_pipeline_last_stage(ignore_virtual=True) and reduced:
        for name in reduced[0]:
            yield name, [each[name].view(-1) for each in reduced]


def _over_replicas(sums: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(sums, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return sums


def _num_replicas() -> int:
    return int(mpu.get_data_parallel_world_size(with_context_parallel=True))
