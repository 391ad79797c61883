"""Attention with a window, and with a softmax that has one more, learned logit per head.

The kernels of ``torch.nn.functional`` know masks only. A window is a mask. The further logit is
that of one more key, whose value is 0: the attention that it takes is lost.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)


def window_of(config: TransformerConfig, layer_number: int) -> int | None:
    """Tokens before a query that a layer's attention sees; None for all.

    Args:
        layer_number: from 1, over all stages.
    """
    skipped = config.window_attn_skip_freq
    if not is_layer_window_attention(config.window_size, skipped, layer_number):
        return None
    return int(config.window_size[0])


def seen(tokens: int, window: int | None, device: torch.device) -> torch.Tensor:
    """The causal mask of a window, [tokens, tokens]: True where a query sees a key."""
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask.triu(-window)


def masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor | None,
    *,
    scale: float,
    dropout: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention with a mask: query [b, heads, s, d], key and value [b, groups, t, d], result like
    the query.

    Args:
        allowed: boolean, of a shape that spreads to [b, heads, s, t]; None allows all.
        sinks: the further logit of each head, [heads].
    """
    gqa = query.shape[1] != key.shape[1]
    if sinks is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, dropout_p=dropout, scale=scale, enable_gqa=gqa
        )
    batch, heads, rows, _ = query.shape
    bias = query.new_zeros(batch, heads, rows, key.shape[2])
    if allowed is not None:
        bias = bias.masked_fill(~allowed, float("-inf"))
    last = sinks.to(query.dtype).view(1, heads, 1, 1).expand(batch, heads, rows, 1)
    key, value = (F.pad(each, (0, 0, 0, 1)) for each in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=torch.cat([bias, last], dim=-1), dropout_p=dropout,
        scale=scale, enable_gqa=gqa,
    )  # fmt: skip


def new_softmax_offset(config: TransformerConfig) -> torch.Tensor | None:
    """The further logits of this rank's heads for ``--softmax-type``: None, zeros, or a parameter
    like that of megatron-core's ``DotProductAttention``."""
    if config.softmax_type == "vanilla":
        return None
    heads = config.num_attention_heads // mpu.get_tensor_model_parallel_world_size()
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    offset = torch.zeros(heads, device=device, dtype=config.params_dtype)
    if config.softmax_type == "off-by-one":
        return offset
    if config.perform_initialization:
        config.init_method(offset)
    return mark_softmax_offset(torch.nn.Parameter(offset))


def mark_softmax_offset(offset: torch.nn.Parameter) -> torch.nn.Parameter:
    """Say that tensor-parallel ranks hold parts of the offset, each of its heads."""
    tensor_parallel.set_tensor_model_parallel_attributes(offset, True, 0, 1)
    return offset


def sharded_softmax_offset(module: Any, prefix: str, offsets: Any, metadata: Any) -> Any:
    """The sharded state of an attention's further logits, under megatron-core's name."""
    return make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True), prefix, {"softmax_offset": 0}, offsets,
        tp_group=mpu.get_tensor_model_parallel_group(),
        dp_cp_group=(metadata or {}).get("dp_cp_group"),
    )  # fmt: skip
