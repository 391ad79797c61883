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
from megatron.dpp.core.slices import Slices, units_of
from megatron.dpp_train.cost.from_flags import shape_of
from megatron.dpp_train.cost.memory import key_bytes, rank_parameters, stage_bytes
from megatron.dpp_train.cost.shape import RunShape
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
        if args.dpp_slice_tokens != "off":
            result |= in_slices(args, shape, chunks[0])
        else:
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


def in_slices(args: Any, shape: RunShape, chunk: Any) -> dict[str, Any]:
    """Bytes of a microbatch in slices: saved by their forwards, and of keys before and after the
    backward of the last slice.
    """
    tokens = torch.arange(args.micro_batch_size * args.seq_length)
    tokens = tokens.reshape(args.micro_batch_size, args.seq_length) % 100
    pieces, slices = shape.slices, Slices([chunk])
    units = units_of([args.seq_length], pieces[0].model.seq_length)
    assert len(units) == len(pieces) > 1
    chunk.train()
    saved, losses = 0, []
    with slices.bound():
        for unit in units:
            part = tokens[:, unit.begin : unit.end]
            places = torch.arange(unit.begin, unit.end).expand(part.shape)
            with slices.running(0, unit):
                losses.append(chunk(part, places, None, labels=part))
            saved += saved_bytes(losses[-1:], chunk, slices.keys.storages)
        keys = [slices.keys.num_bytes]
        with slices.running(0, units[-1]):
            losses[-1].sum().backward()
        keys.append(slices.keys.num_bytes)
    before, gradients = (len(chunk.decoder.layers) * each for each in key_bytes(pieces[0]))
    return {
        "saved": saved,
        "estimated_saved": sum(stage_bytes(piece, 0) for piece in pieces),
        "keys": keys,
        "estimated_keys": [before, before + gradients],
    }


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
