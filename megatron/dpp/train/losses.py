"""What the loss functions of ``gpt`` and ``bert`` share."""

from __future__ import annotations

import torch

from megatron.dpp.errors import DppError
from megatron.dpp.train.initialize import Run


def masked_sum(output: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of ``output`` [b, s] where ``mask`` [b, s] is 1, in fp32, and the number of such places
    (int32)."""
    flat = mask.view(-1).float()
    total = torch.sum(output.view(-1).float() * flat)
    return total, flat.sum().detach().to(torch.int)


def checked(run: Run, loss: torch.Tensor) -> torch.Tensor:
    """``loss``, unless it is not finite and the user wants to be stopped then.

    Raises:
        DppError: NaN or infinity, with the iteration; switched off by
            ``--no-check-for-nan-in-loss-and-grad``.
    """
    if run.args.check_for_nan_in_loss_and_grad and not torch.isfinite(loss.detach()):
        raise DppError(
            f"iteration {run.iteration + 1}: the loss on rank {run.rank} is {loss.item()}; lower "
            "--lr, or pass --no-check-for-nan-in-loss-and-grad to go on"
        )
    return loss
