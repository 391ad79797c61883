"""Layers of the tests' models: megatron-core's local ones, with what those lack on a CPU.

Norms carry the mark of sequence parallelism, and attention takes packed rows and context
parallelism. The specs fit all versions of megatron-core that the engine supports.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from megatron.dpp.core.varlen import causal_mask


class Norm:
    """PyTorch's norm whose parameters have the mark of sequence parallelism."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        kind: Any = getattr(torch.nn, config.normalization)
        norm = kind(hidden_size, eps=eps, device=_device(), dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class Attention(torch.nn.Module):
    """PyTorch's causal attention; [sq, b, np, hn] and [sk, b, ng, hn] -> [sq, b, np * hn]."""

    may_be_sliced = True

    def __init__(self, config: Any, *_: Any, **options: Any) -> None:
        super().__init__()
        self.config, self.softmax_scale = config, config.kv_channels**-0.5
        self.dropout = config.attention_dropout

    def forward(
        self, query: Any, key: Any, value: Any, *_: Any, packed_seq_params: Any = None, **__: Any
    ) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        if dropout and not self.config.sequence_parallel:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                return self._attend(query, key, value, dropout, packed_seq_params)
        return self._attend(query, key, value, dropout, packed_seq_params)

    def _attend(self, query: Any, key: Any, value: Any, dropout: float, params: Any) -> Any:
        query, key, value = (t.unsqueeze(1) if t.dim() == 3 else t for t in (query, key, value))
        group = parallel_state.get_context_parallel_group()
        key, value = whole(key, group), whole(value, group)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        options: dict[str, Any] = {
            "dropout_p": dropout, "scale": self.softmax_scale,
            "enable_gqa": q.shape[1] != k.shape[1],
        }  # fmt: skip
        if params is not None:
            allowed = own_part(documents(params.cu_seqlens_q, len(key)), group)
            output = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, **options)
        elif group.size() == 1:
            output = F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
        else:
            size = len(query) // 2
            ends = [(number + 1) * size for number in _chunks(group)]
            parts = [
                F.scaled_dot_product_attention(
                    part, k[:, :, :end], v[:, :, :end], attn_mask=causal_mask(size, end, part),
                    **options,
                )
                for end, part in zip(ends, q.chunk(2, dim=2), strict=True)
            ]  # fmt: skip
            output = torch.cat(parts, dim=2)
        return output.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)


def _chunks(group: Any) -> tuple[int, int]:
    """The chunks of a row that this context-parallel rank holds, of two per rank."""
    return group.rank(), 2 * group.size() - 1 - group.rank()


def own_part(row: torch.Tensor, group: Any) -> torch.Tensor:
    """This context-parallel rank's part of a row, [tokens, ...]."""
    chunks = row.chunk(2 * group.size())
    return torch.cat([chunks[number] for number in _chunks(group)])


def whole(part: torch.Tensor, group: Any) -> torch.Tensor:
    """The row of which each context-parallel rank has a part."""
    if group.size() == 1:
        return part
    chunks = gather_from_sequence_parallel_region(part, group=group).chunk(2 * group.size())
    return torch.cat([*chunks[::2], *chunks[::-2]])


def documents(starts: torch.Tensor, tokens: int) -> torch.Tensor:
    """The mask of attention within each document, [tokens, tokens]."""
    places = torch.arange(tokens, device=starts.device)
    numbers = torch.searchsorted(starts[1:].long(), places, right=True)
    return (numbers[:, None] == numbers[None, :]) & (places[:, None] >= places)


def positions(starts: torch.Tensor, tokens: int) -> torch.Tensor:
    """The place of each token in its document, [tokens]."""
    bounds = itertools.pairwise([*starts.tolist(), tokens])
    return torch.cat([torch.arange(end - begin) for begin, end in bounds]).to(starts.device)


def packed_params(starts: torch.Tensor, longest: int) -> PackedSeqParams:
    """The parameters of a packed row: int32 [n + 1], and the tokens of the longest document."""
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )  # fmt: skip


def block_spec(config: Any, *, vp_stage: int | None, spec: str = "torch") -> Any:
    """The block of one stage. ``spec``: ``torch`` takes :class:`Attention`, ``megatron``
    megatron-core's own.
    """
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    block = copy.copy(block)
    block.layer_specs = [_local(layer, spec) for layer in block.layer_specs]
    block.layer_norm = Norm
    return block


def prediction_spec(config: Any, *, vp_stage: int | None, spec: str = "torch") -> Any:
    """The block of layers that predict further tokens; None without them."""
    if not config.mtp_num_layers:
        return None
    layers = gpt_layer_specs.get_gpt_decoder_layer_specs(
        config, False, normalization=config.normalization
    )
    block = gpt_layer_specs.get_gpt_mtp_block_spec(config, layers[-1], False, vp_stage=vp_stage)
    if block is not None:
        block = copy.deepcopy(block)
        for layer in block.layer_specs:
            parts = layer.submodules
            parts.enorm = parts.hnorm = parts.layer_norm = Norm
            names = ("mtp_model_layer", "transformer_layer")  # the second one before 0.17
            name = next(name for name in names if hasattr(parts, name))
            setattr(parts, name, _local(getattr(parts, name), spec))
    return block


def _local(layer: Any, spec: str) -> Any:
    layer = copy.deepcopy(layer)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    if spec == "torch":
        parts.self_attention.submodules.core_attention = Attention
    return layer
