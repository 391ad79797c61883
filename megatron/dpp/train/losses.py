"""What the loss functions of ``gpt`` and ``bert`` share, and the losses that layers add by
themselves."""

from __future__ import annotations

import argparse
import math

import torch
from megatron.core.transformer.moe.moe_utils import track_moe_metrics
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron.dpp.errors import DppError
from megatron.dpp.mcore.training.grad_checks import GradientChecks
from megatron.dpp.plan.layer_patterns import layers_with_experts
from megatron.dpp.train.initialize import Run


def masked_sum(output: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of ``output`` [b, s] where ``mask`` [b, s] is 1, in fp32, and the number of such places
    (int32)."""
    flat = mask.view(-1).float()
    total = torch.sum(output.view(-1).float() * flat)
    return total, flat.sum().detach().to(torch.int)


def checked(run: Run, loss: torch.Tensor) -> torch.Tensor:
    """``loss``, unless one of this iteration's losses is known not to be finite and the user wants
    to be stopped then.

    An evaluation goes on and reports it, as Megatron-LM's: one microbatch of short sentences
    without a masked token is enough for BERT's NaN.

    Raises:
        DppError: NaN or infinity, with the iteration; switched off by
            ``--no-check-for-nan-in-loss-and-grad``.
    """
    if run.args.check_for_nan_in_loss_and_grad and loss.requires_grad:
        _refuse(run, run.loss_check.add(loss, run.iteration))
    return loss


def check_step(run: Run, gradients: GradientChecks) -> None:
    """The same for what no GPU had computed when a step was launched: its last losses, and the
    gradients of this rank before they were reduced. The parameters may have been updated with them.

    Raises:
        DppError: as there.
    """
    _refuse(run, run.loss_check.rest())
    found = gradients.read()
    if found is not None:
        raise _not_finite(run, f"the gradients on rank {run.rank} have a norm of {found}")


def check_norm(run: Run, grad_norm: float | None) -> None:
    """The same for the norm of all gradients, which every rank knows: replicas end together.

    Raises:
        DppError: as there.
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


def added_losses(args: argparse.Namespace, num_microbatches: int) -> dict[str, torch.Tensor]:
    """What routers and layers that predict further tokens have added to the loss since the last
    call: means over the iteration's microbatches, under Megatron-LM's names.

    ``load_balancing_loss``, ``z_loss`` and their kin are means over the layers with experts, the
    same on all ranks; ``mtp_1 loss`` and so on are there on the last stage. A collective over the
    pipeline and the replicas.
    """
    losses: dict[str, torch.Tensor] = {}
    if args.num_experts:
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
        MTPLossLoggingHelper.track_mtp_metrics(
            1 / num_microbatches, 0, writer=None, total_loss_dict=losses
        )
    return {name: loss.detach().clone() for name, loss in losses.items()}
