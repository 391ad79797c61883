"""One rank that builds models and counts what they hold; started by ``test_against_models``.

Arguments: configurations as ``arch:flags``. For each, a JSON line with the rank's parameters and,
without a pipeline, the bytes that autograd saves in the forward of one microbatch; the estimate of
both beside them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from megatron.core import num_microbatches_calculator, parallel_state

from megatron.dpp.core.cpu import install
from megatron.dpp.core.memory import saved_bytes
from megatron.dpp_train.cost.from_flags import shape_of
from megatron.dpp_train.cost.memory import rank_parameters, stage_bytes
from megatron.dpp_train.initialize import set_seeds
from megatron.dpp_train.model.build import bare_chunks
from megatron.dpp_train.model.configs import settled, transformer_config
from megatron.dpp_train.model.tasks import TASKS
from megatron.dpp_train.preflight import check as preflight


def measure(arch: str, flags: list[str], rank: int, world_size: int) -> dict[str, Any]:
    """Build the model of ``flags`` and run one forward of it."""
    args = settled(preflight.check(arch, flags, world_size)[0])
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    set_seeds(args)
    chunks = bare_chunks(args, transformer_config(args), TASKS[arch].build_chunk)
    if args.bf16:
        chunks = [chunk.bfloat16() for chunk in chunks]
    shape = shape_of(args, on_gpu=False, arch=arch)
    pipeline_rank = parallel_state.get_pipeline_model_parallel_rank()
    result = {
        "parameters": sum(p.numel() for chunk in chunks for p in chunk.parameters()),
        "estimated_parameters": rank_parameters(shape, pipeline_rank),
    }
    if shape.pipeline == 1 and shape.expert == 1:  # else the router decides who has how many
        result["saved"] = forward(args, arch, chunks[0])
        result["estimated_saved"] = stage_bytes(shape, 0)
    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.unset_num_microbatches_calculator()
    return result


def forward(args: Any, arch: str, chunk: Any) -> int:
    """Bytes saved by the forward of one microbatch, loss included."""
    size = (args.micro_batch_size, args.seq_length)
    tokens = torch.arange(size[0] * size[1]).reshape(size) % 100
    chunk.train()
    if arch == "bert":
        types = tokens % 2 if args.bert_binary_head else None
        outputs = chunk(tokens, torch.ones_like(tokens), lm_labels=tokens, tokentype_ids=types)
    else:
        square = torch.ones(size[1], size[1]).triu(1).bool()[None, None]
        outputs = chunk(tokens, torch.arange(size[1]).expand(size), square, labels=tokens)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return saved_bytes([tensor for tensor in outputs if tensor is not None], chunk)


def main() -> None:
    """Measure every configuration of the command line."""
    support = install()
    torch.distributed.init_process_group("gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for text in sys.argv[1:]:
        arch, flags = text.split(":", 1)
        result = measure(arch, flags.split(), rank, world_size)
        print("measured " + json.dumps({"name": text, **result}), flush=True)
    torch.distributed.destroy_process_group()
    support.close()


main()
