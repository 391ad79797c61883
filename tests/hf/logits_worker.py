"""Logits of converted models, from this project's own training code.

Argument: a JSON file with a list of ``[name, flags]``. Tokens are read from ``tokens.pt`` beside
it; the logits go to ``NAME.pt``.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.loop.runs_worker import _forget, _port


def run(path: Path) -> int:
    tokens = torch.load(path.with_name("tokens.pt"))
    for number, (name, words) in enumerate(json.loads(path.read_text())):
        os.environ["MASTER_PORT"] = _port(path.with_suffix(f".port{number}"))
        print(f"--- {name}: {' '.join(words)}", flush=True)
        logits(words, tokens, path.with_name(f"{name}.pt"))
        _forget()
    return 0


def logits(words: list[str], tokens: torch.Tensor, target: Path) -> None:
    """Load the model that the flags name and write its logits for one microbatch."""
    from megatron.dpp.trace import NullRecorder
    from megatron.dpp_train.checkpoint.checkpointing import Checkpointer
    from megatron.dpp_train.initialize import initialize
    from megatron.dpp_train.loop import job, pretrain
    from megatron.dpp_train.model.build import build_trainee
    from megatron.dpp_train.model.configs import transformer_config
    from megatron.dpp_train.model.tasks import TASKS
    from megatron.dpp_train.preflight import check as preflight

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    args, run_tokenizer = preflight.check("gpt", words, world)
    run = initialize(pretrain._settled(args), rank)
    run.tokenizer, run.recorder = run_tokenizer, NullRecorder()
    trainee = build_trainee(run, transformer_config(run.args), TASKS["gpt"].build_chunk)
    Checkpointer(run, trainee).load()
    found: list[torch.Tensor] = []

    def step(_: Any, model: Any) -> tuple[Any, Any]:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).triu(1) > 0.5
        return model(tokens, positions, mask), partial(keep)

    def keep(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        found.append(gather_from_tensor_model_parallel_region(output))
        return output.sum(), {}

    for chunk in trainee.chunks:
        chunk.eval()
    with job._schedule(run) as schedule, torch.no_grad():
        schedule(
            forward_step_func=step,
            data_iterator=None if len(trainee.chunks) == 1 else [None] * len(trainee.chunks),
            model=trainee.chunks,
            num_microbatches=run.args.global_batch_size // run.args.data_parallel_size,
            seq_length=tokens.shape[1],
            micro_batch_size=tokens.shape[0],
            decoder_seq_length=None,
            forward_only=True,
        )
    if run.is_last:
        torch.save(found[0], target)
    job._leave(run)


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1])))
