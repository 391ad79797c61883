"""A program on ``megatron.training`` that trains models of ``--hf-forms`` on the rows of a file.

``ROWS`` names a tensor [n, s + 1] of tokens; sample i is row i.
"""

from __future__ import annotations

import os
import queue
from functools import partial
from typing import Any

import torch
from megatron.core.datasets import utils
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.enums import ModelType
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from megatron.dpp_train.hf.layers import add_arguments, adjust


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The rows, from the first one on again and again."""

    def __init__(self, length: int) -> None:
        self.rows, self.length = torch.load(os.environ["ROWS"]), length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index % len(self.rows)]
        size = len(row) - 1
        mask = torch.ones(1, size, size, dtype=torch.bool).triu(1)
        return {
            "tokens": row[:-1],
            "labels": row[1:],
            "positions": torch.arange(size),
            "mask": mask,
        }


def datasets(counts: list[int], vp_stage: int | None = None) -> tuple[Any, ...]:
    return tuple(Rows(count) if count else None for count in counts)


datasets.is_distributed = True  # type: ignore[attr-defined]


def forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(iterator)
    inner = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    labels = batch["labels"] if inner.post_process else None
    return model(batch["tokens"], batch["positions"], batch["mask"], labels=labels), partial(loss)


def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total, count = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int)
    return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}


if __name__ == "__main__":
    utils.compile_helpers = lambda: None
    results: queue.Queue[Any] = queue.Queue()  # of this process alone, without a server to start
    filesystem_async.get_write_results_queue = lambda: results
    args = parse_and_validate_args(add_arguments)
    config = adjust(gpt_config_from_args(args), get_args())
    settings = pretrain_cfg_container_from_args(args, config)
    pretrain(settings, datasets, ModelType.encoder_or_decoder, forward_step)
