"""Builds models of megatron-core on the ranks of a run, in one process, and counts what they hold.

Arguments: configurations, each as ``TENSOR PIPELINE flags``. For each pipeline rank a JSON line
with its parameters and, without a pipeline, the bytes that autograd saves in the forward of one
microbatch. Collectives are PyTorch's fake ones, which send nothing: only sizes are counted.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.dpp.core.cpu import install
from megatron.dpp.memory import saved_bytes

ASSUMED = (
    "--lr 1e-3 --train-iters 1 --eval-iters 0 --transformer-impl local --mock-data "
    "--no-rope-fusion --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion "
    "--no-bias-dropout-fusion --no-gradient-accumulation-fusion "
)


def arguments(flags: str, world_size: int) -> Any:
    """The flags as Megatron reads them."""
    sys.argv = ["worker", *(ASSUMED + flags).split()]
    args = parse_args()
    args.world_size, args.rank = world_size, 0
    validate_args(args)
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    return args


def model_on(args: Any, rank: int) -> list[torch.nn.Module]:
    """The chunks of one rank."""
    store = FakeStore()  # type: ignore[no-untyped-call]
    torch.distributed.init_process_group("fake", store=store, rank=rank, world_size=args.world_size)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    tensor_parallel.random.initialize_rng_tracker(force_reset=True)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = core_transformer_config_from_args(args)
    config.use_cpu_initialization = True
    chunks = []
    for number in range(args.virtual_pipeline_model_parallel_size or 1):
        stage = {"vp_stage": number} if args.virtual_pipeline_model_parallel_size else {}
        chunks.append(
            GPTModel(
                config,
                get_gpt_decoder_block_spec(config, use_transformer_engine=False, **stage),
                args.padded_vocab_size,
                args.max_position_embeddings,
                pre_process=parallel_state.is_pipeline_first_stage(
                    ignore_virtual=not stage, **stage
                ),
                post_process=parallel_state.is_pipeline_last_stage(
                    ignore_virtual=not stage, **stage
                ),
                share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
                position_embedding_type=args.position_embedding_type,
                **stage,
            )
        )
    return [chunk.bfloat16() if args.bf16 else chunk for chunk in chunks]


def allow_plain_norms() -> None:
    """PyTorch's norms keep as much with sequence parallelism; megatron-core refuses them there, as
    nobody would reduce their gradients."""
    make = WrappedTorchNorm.__new__

    def new(cls: type, config: Any, *args: Any, **keywords: Any) -> Any:
        config = copy.copy(config)
        config.sequence_parallel = config.persist_layer_norm = False
        return make(cls, config, *args, **keywords)

    WrappedTorchNorm.__new__ = new


def saved(args: Any, chunk: torch.nn.Module) -> int:
    """Bytes saved by the forward of one microbatch, loss included."""
    size = (args.micro_batch_size, args.seq_length)
    tokens = torch.arange(size[0] * size[1]).reshape(size) % 100
    mask = torch.ones(size[1], size[1]).triu(1).bool()[None, None]
    chunk.train()
    output = chunk(tokens, torch.arange(size[1]).expand(size), mask, labels=tokens)
    return saved_bytes([output], chunk)


def main() -> None:
    """Measure every configuration of the command line."""
    support = install(host=True)
    allow_plain_norms()
    for text in sys.argv[1:]:
        tensor, pipeline, flags = text.split(" ", 2)
        ranks = int(tensor) * int(pipeline)
        args = arguments(flags, ranks)
        for stage in range(int(pipeline)):
            chunks = model_on(args, stage * int(tensor))
            row = {"parameters": sum(p.numel() for chunk in chunks for p in chunk.parameters())}
            if int(pipeline) == 1 and args.expert_model_parallel_size == 1:
                row["saved"] = saved(args, chunks[0])
            print("measured " + json.dumps({"name": text, "stage": stage, **row}), flush=True)
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
    support.close()


if __name__ == "__main__":
    main()
