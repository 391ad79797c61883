"""Layer specs: which modules a transformer layer of megatron-core is built from.

GPT and BERT have three implementations. ``torch`` uses PyTorch's scaled-dot-product attention and
norms that support sequence parallelism; it needs neither Transformer Engine nor Apex. ``megatron``
is megatron-core's local spec with those norms. ``transformer_engine`` is megatron-core's.
Checkpoints move between ``torch`` and ``megatron``, whose parameter names are equal.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.dpp.core import compat
from megatron.dpp.errors import ConfigError
from megatron.dpp_train.model import context, packed
from megatron.dpp_train.model.masks import (
    masked,
    new_softmax_offset,
    seen,
    sharded_softmax_offset,
    window_of,
)
from megatron.dpp_train.model.norms import TorchNorm

IMPLEMENTATIONS = ("torch", "megatron", "transformer_engine")
Change = Callable[[ModuleSpec], ModuleSpec]
"""A function that gives a changed spec of a layer."""


class SdpaAttention(MegatronModule):  # type: ignore[misc]
    """Core attention by ``torch.nn.functional.scaled_dot_product_attention``.

    Same constructor and call as megatron-core's ``DotProductAttention``; query [sq, b, np, hn], key
    and value [sk, b, ng, hn], result [sq, b, np * hn], where np and ng count this rank's heads and
    query groups.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        *,
        own_masks: bool = False,
    ) -> None:
        super().__init__(config=config)
        self.context_ranks: Any = None
        if config.context_parallel_size > 1:
            _check_context_can(attn_mask_type, own_masks=own_masks)
            own = getattr(pg_collection, "cp", None)
            self.context_ranks = own or parallel_state.get_context_parallel_group()
        self.attn_mask_type = attn_mask_type
        self.own_masks = own_masks
        self.may_be_sliced = not own_masks and self.context_ranks is None
        head_size = config.kv_channels
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(head_size)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.window = window_of(config, layer_number)
        self.softmax_offset = new_softmax_offset(config)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend. ``attention_mask`` is Megatron's, True where a key must not be seen; causal
        attention and packed sequences ignore it unless samples have masks of their own.
        """
        if attention_bias is not None:
            raise ConfigError("attention bias needs --transformer-impl transformer_engine")
        if packed_seq_params is not None and self.own_masks:
            raise ConfigError(
                "--reset-attention-mask with packed sequences: packed documents have masks already"
            )
        mask_type = attn_mask_type or self.attn_mask_type
        dropout = self.dropout if self.training else 0.0
        with self._random_draws(dropout):
            if self.context_ranks is not None:
                return self._attend_to_all_ranks(query, key, value, dropout, packed_seq_params)
            if packed_seq_params is not None:
                documents = packed.documents_of(packed_seq_params)
                q, k, v = packed.as_packed(query, key, value)
                return packed.attend(
                    q, k, v, documents,
                    scale=self.softmax_scale, dropout=dropout, mask_type=mask_type,
                    window=self.window, sinks=self.softmax_offset,
                )  # fmt: skip
            causal = mask_type == AttnMaskType.causal
            causal &= attention_mask is None or not self.own_masks
            allowed = None if causal or attention_mask is None else ~attention_mask
            q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
            if self.window is not None or self.softmax_offset is not None:
                allowed = seen(len(query), self.window, query.device) if causal else allowed
                output = masked(
                    q, k, v, allowed,
                    scale=self.softmax_scale, dropout=dropout, sinks=self.softmax_offset,
                )  # fmt: skip
                return output.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)
            output = F.scaled_dot_product_attention(
                q, k, v, attn_mask=allowed, dropout_p=dropout, is_causal=causal,
                scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip
        return output.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)

    def _attend_to_all_ranks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout: float,
        packed_seq_params: Any,
    ) -> torch.Tensor:
        """Attend where context-parallel ranks hold parts of the sequence."""
        allowed = None
        if packed_seq_params is not None:
            query, key, value = packed.as_packed(query, key, value)
            tokens = len(query) * self.context_ranks.size()
            allowed = packed.documents_of(packed_seq_params).allowed(tokens, causal=True)
        return context.attend(
            query, key, value, self.context_ranks,
            scale=self.softmax_scale, dropout=dropout, allowed=allowed,
        )  # fmt: skip

    def _random_draws(self, dropout: float) -> contextlib.AbstractContextManager[None]:
        """The random state from which this attention draws."""
        if dropout > 0.0 and not self.config.sequence_parallel:
            fork: contextlib.AbstractContextManager[None]
            fork = tensor_parallel.get_cuda_rng_tracker().fork()
            return fork
        return contextlib.nullcontext()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """See megatron-core's ``DotProductAttention.sharded_state_dict``."""
        return sharded_softmax_offset(self, prefix, sharded_offsets, metadata)


def _check_context_can(mask_type: AttnMaskType, *, own_masks: bool) -> None:
    """Refuse masks that a sequence cut over context-parallel ranks does not support."""
    if own_masks or mask_type not in packed.CAUSAL:
        what = "--reset-attention-mask" if own_masks else f"attention of type {mask_type.name}"
        raise ConfigError(
            f"--context-parallel-size above 1 with {what}: the local layers cut causal attention "
            "alone; use --context-parallel-size 1"
        )


def block_spec(
    config: TransformerConfig,
    *,
    arch: str = "gpt",
    implementation: str = "torch",
    vp_stage: int | None = None,
    own_masks: bool = False,
    grouped_experts: bool = False,
    change: Change | None = None,
    output_scale: float = 1.0,
) -> TransformerBlockSubmodules:
    """The spec of this rank's transformer block.

    Args:
        config: decides the norm, experts, QK layer norm, and how many layers this stage has.
        arch: ``gpt`` or ``bert``.
        implementation: one of :data:`IMPLEMENTATIONS`.
        vp_stage: the virtual pipeline stage (chunk) to build, or None without virtual stages.
        own_masks: samples bring attention masks that are not the plain causal one
            (``--reset-attention-mask``); ``torch`` leaves masks unread without this.
        grouped_experts: experts of local layers run their products as one each.
        change: gives the spec of a local layer in the form that the model has.
        output_scale: factor of the last norm's output, in local layers.

    Returns:
        What ``GPTModel`` and ``BertModel`` take as ``transformer_layer_spec``.

    Raises:
        ConfigError: an unknown name, or Transformer Engine is asked for and not installed.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(
            f"layer implementation {implementation!r}: expected one of {', '.join(IMPLEMENTATIONS)}"
        )
    if implementation == "transformer_engine":
        _require_transformer_engine()
    elif config.num_moe_experts:
        _name_missing_kernel()
    if arch == "bert":
        return _bert_block(config, implementation, vp_stage)
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=implementation == "transformer_engine",
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    if implementation == "transformer_engine":
        return block
    local = _LocalLayers(config, implementation, own_masks, grouped_experts, change=change)
    layers = [local.made_from(layer) for layer in block.layer_specs]
    norm: Any = TorchNorm
    if output_scale != 1.0:
        norm = ModuleSpec(TorchNorm, params={"scale": output_scale})
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def prediction_spec(
    config: TransformerConfig,
    *,
    implementation: str = "torch",
    vp_stage: int | None = None,
    own_masks: bool = False,
    grouped_experts: bool = False,
    change: Change | None = None,
) -> Any | None:
    """The spec of the layers that predict further tokens (``config.mtp_num_layers``), each around a
    layer like the model's last.

    Returns:
        What ``GPTModel`` takes as ``mtp_block_spec``: None on all stages but the last, and without
        such layers.
    """
    if not config.mtp_num_layers:
        return None
    engine = implementation == "transformer_engine"
    layers = get_gpt_decoder_layer_specs(
        config, engine, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm
    )
    block = get_gpt_mtp_block_spec(config, layers[-1], engine, vp_stage=vp_stage)
    if block is not None and not engine:
        block = copy.deepcopy(block)
        local = _LocalLayers(config, implementation, own_masks, grouped_experts, change=change)
        for layer in block.layer_specs:
            parts = layer.submodules
            parts.enorm = parts.hnorm = parts.layer_norm = TorchNorm
            name = compat.field_name(compat.MTP_LAYER)
            setattr(parts, name, local.made_from(getattr(parts, name)))
    return block


def _bert_block(
    config: TransformerConfig, implementation: str, vp_stage: int | None
) -> TransformerBlockSubmodules:
    from megatron.core.models.bert import bert_layer_specs

    norm: Any
    if implementation == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        layer, norm = bert_layer_specs.get_bert_layer_with_transformer_engine_spec(), TENorm
    else:
        local = _LocalLayers(config, implementation, packs=False)
        layer = local.made_from(bert_layer_specs.bert_layer_local_spec)
        norm = TorchNorm
    num_layers = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)


def bert_head_norm() -> contextlib.AbstractContextManager[None]:
    """Let a BERT model be built with :class:`TorchNorm` in its masked-word head, as megatron-core's
    norm refuses ``sequence_parallel`` without Apex (bert_lm_head.py:38).
    """

    def norm(_: Any, **arguments: Any) -> torch.nn.Module:
        return TorchNorm(**arguments)

    return compat.patched("models.bert.bert_lm_head:LNImpl", norm)


def _name_missing_kernel() -> None:
    """Give megatron-core's router the name ``te_general_gemm``, which it compares with None
    (moe_utils.py:1192,1225) but lacks without Transformer Engine.
    """
    moe_utils, name = compat.resolve("transformer.moe.moe_utils:te_general_gemm")
    if not hasattr(moe_utils, name):
        setattr(moe_utils, name, None)


@dataclass(frozen=True)
class _LocalLayers:
    """Makes the specs of local layers.

    Args:
        config: with context parallelism the attention is ours.
        implementation: ``torch`` or ``megatron``.
        own_masks: see :func:`block_spec`, as ``grouped_experts``.
        packs: for packed sequences, too. BERT's must not, as ``BertModel`` reads the shape of its
            masks from the attention's class.
        change: see :func:`block_spec`.
    """

    config: TransformerConfig
    implementation: str
    own_masks: bool = False
    grouped_experts: bool = False
    packs: bool = True
    change: Change | None = None

    def made_from(self, layer: ModuleSpec) -> ModuleSpec:
        """A layer's spec with our norms, attention and experts."""
        layer = copy.deepcopy(layer)
        parts = layer.submodules
        parts.input_layernorm = TorchNorm
        parts.pre_mlp_layernorm = TorchNorm
        attention = parts.self_attention.submodules
        if self.packs and parts.self_attention.module is SelfAttention:
            parts.self_attention.module = packed.PackedSelfAttention
        if self.implementation == "torch" or self.config.context_parallel_size > 1:
            attention.core_attention = ModuleSpec(
                SdpaAttention, params={"own_masks": self.own_masks}
            )
        elif self.packs and attention.core_attention is DotProductAttention:
            attention.core_attention = packed.PackedDotProductAttention
        for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if getattr(attention, name, None) is WrappedTorchNorm:
                setattr(attention, name, TorchNorm)
        return self.change(layer) if self.change else layer


def _require_transformer_engine() -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(
            "--transformer-impl transformer_engine: the package is not installed; "
            "pip install transformer_engine[pytorch], or use --transformer-impl local"
        )
