"""The GPT of bench_schedule.py on GPUs."""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sequences:
    """The contents of one microbatch; several sequences are packed.

    Args:
        numbers: of its sequences; each has tokens of its own.
        lengths: in tokens.
    """

    numbers: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)


class Model:
    """A GPT cut into p ranks x v chunks, its data and its static reference.

    Args:
        args: the command line.
        num_chunks: v.
        layout: as Megatron's --pipeline-model-parallel-layout; None: as many layers everywhere.
    """

    def __init__(self, args: argparse.Namespace, num_chunks: int, layout: str | None) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        self.args, self.num_chunks = args, num_chunks
        virtual = num_chunks if num_chunks > 1 else None
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=args.tensor,
            pipeline_model_parallel_size=args.ranks,
            virtual_pipeline_model_parallel_size=virtual,
            expert_model_parallel_size=args.expert_parallel,
        )
        torch.manual_seed(1234)
        model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
        self.config = self._config(virtual, layout)
        self.chunks = [self._chunk(c if virtual else None) for c in range(num_chunks)]
        generator = torch.Generator().manual_seed(7 + parallel_state.get_data_parallel_rank())
        shape = (args.micro_batch, args.sequence + 1)
        self.tokens = torch.randint(0, args.vocabulary, shape, generator=generator).cuda()
        self.positions = torch.arange(args.sequence, device="cuda").expand(args.micro_batch, -1)
        self.num_bytes = reserved()
        self._made: dict[Sequences, tuple[torch.Tensor, ...]] = {}

    def _config(self, virtual: int | None, layout: str | None) -> Any:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.transformer import TransformerConfig

        args = self.args
        config = TransformerConfig(
            num_layers=args.layers,
            hidden_size=args.hidden,
            num_attention_heads=args.heads,
            tensor_model_parallel_size=args.tensor,
            sequence_parallel=args.sequence_parallel,
            pipeline_model_parallel_size=args.ranks,
            virtual_pipeline_model_parallel_size=virtual,
            pipeline_model_parallel_layout=layout,
            pipeline_dtype=torch.bfloat16,
            params_dtype=torch.bfloat16,
            bf16=True,
            hidden_dropout=args.dropout,
            attention_dropout=args.dropout,
            deallocate_pipeline_outputs=True,
            persist_layer_norm=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=not args.no_gradient_accumulation_fusion,
            bias_dropout_fusion=True,
            overlap_p2p_comm=virtual is not None,
            batch_p2p_comm=virtual is None,
            **self._experts(),
        )
        config.finalize_model_grads_func = finalize_model_grads
        return config

    def _experts(self) -> dict[str, Any]:
        """The options of a mixture of experts, Mixtral's form: SwiGLU without biases."""
        args = self.args
        if not args.experts:
            return {}
        return {
            "num_moe_experts": args.experts,
            "moe_router_topk": args.topk,
            "moe_ffn_hidden_size": args.expert_hidden or 4 * args.hidden,
            "moe_grouped_gemm": args.grouped_gemm,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": args.expert_parallel,
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
        }

    def _chunk(self, stage: int | None) -> Any:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.dpp_train.model.layers import block_spec

        from megatron.dpp.core.wgrad import fused as fused_wgrad

        if self.config.gradient_accumulation_fusion:
            fused_wgrad.provide()
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        model = GPTModel(
            self.config,
            block_spec(self.config, vp_stage=stage),
            self.args.vocabulary,
            self.args.sequence,
            pre_process=first,
            post_process=last,
            vp_stage=stage,
            parallel_output=True,
        )
        model.cuda().bfloat16()
        model.model_type = 1
        options = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        return DistributedDataParallel(self.config, options, model)

    def step(
        self, schedule: Any, num_microbatches: int, microbatches: Sequence[Sequences] = ()
    ) -> list[Any]:
        """One forward and backward of all microbatches; without any given, of the longest."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        single = self.num_chunks == 1
        given = microbatches or [
            Sequences((number,), (self.args.sequence,)) for number in range(num_microbatches)
        ]
        iterators: list[Any] = [iter(list(given)) for _ in self.chunks]
        return schedule(
            forward_step_func=self._forward,
            data_iterator=iterators[0] if single else iterators,
            model=self.chunks[0] if single else self.chunks,
            num_microbatches=num_microbatches,
            seq_length=self.args.sequence,
            micro_batch_size=self.args.micro_batch,
        )

    def _forward(self, iterator: Any, model: Any) -> Any:
        from megatron.dpp_train.model.packed import packed_params

        given, packed = next(iterator), None
        if len(given.lengths) == 1:
            row = self._row(given.numbers[0], given.tokens)
            tokens, labels, places = row[:, :-1], row[:, 1:], self.positions[:, : given.tokens]
        else:
            starts, tokens, labels, places = self._several(given)
            packed = packed_params(starts, max(given.lengths))
        output = model(tokens, places, None, labels=labels, packed_seq_params=packed)
        return output, _loss

    def _row(self, number: int, length: int) -> torch.Tensor:
        return (self.tokens[:, : length + 1] + number) % self.args.vocabulary

    def _several(self, given: Sequences) -> tuple[torch.Tensor, ...]:
        """First tokens of packed sequences, then their tokens, labels and positions; made once."""
        if given not in self._made:
            rows = [self._row(*each) for each in zip(given.numbers, given.lengths, strict=True)]
            columns = [
                torch.cat([row[:, part] for row in rows], 1)
                for part in (slice(None, -1), slice(1, None))
            ]
            columns.append(torch.cat([self.positions[:, :length] for length in given.lengths], 1))
            starts = torch.tensor([0, *itertools.accumulate(given.lengths)], dtype=torch.int32)
            self._made[given] = starts.cuda(), *columns
        return self._made[given]

    def gradients(self) -> list[torch.Tensor]:
        """A copy of every gradient buffer."""
        return [buffer.grad_data.clone() for c in self.chunks for buffer in c.buffers]

    def close(self) -> None:
        from megatron.core import parallel_state

        self.chunks.clear()
        parallel_state.destroy_model_parallel()
        gc.collect()  # DDP's hooks make cycles; the next model's peak must not count this one
        torch.cuda.empty_cache()


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    # megatron-core divides the loss by the number of microbatches in place.
    return loss, {"lm loss": loss.detach().clone()}


def reserved() -> int:
    """Bytes that PyTorch holds of the device beside what it could give back."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()
