"""Forms of a layer that families have and megatron-core's local layers lack.

Each is a flag: norms of what a block adds, scales of embedding, residual and logits, norms of
queries and keys over all heads, and rotary embeddings of layers with a window. :func:`form_layer`
puts the modules here into the spec of a layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from megatron.dpp.errors import ConfigError
from megatron.dpp_train.model import packed
from megatron.dpp_train.model.norms import TorchNorm
from megatron.dpp_train.options.run_config import RunConfig

Add = Callable[[Any, torch.Tensor, float], torch.Tensor]
"""Adds a block's output and bias to the residual stream, with dropout."""


def gated_gelu(inputs: torch.Tensor) -> torch.Tensor:
    """The activation of ``--geglu``, of any shape: GELU, approximated by tanh."""
    return F.gelu(inputs, approximate="tanh")


class ScaledSum(torch.nn.Module):
    """Stands for megatron-core's ``get_bias_dropout_add``: the output of a block is normalised and
    scaled before it is added to the residual stream."""

    def __init__(self, config: TransformerConfig, *, scale: float, normalised: bool) -> None:
        super().__init__()
        self.scale = scale
        self.norm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)
        if not normalised:
            self.norm = torch.nn.Identity()

    def forward(self, *mode: bool) -> Add:
        """The function that adds, for megatron-core's ``training`` and ``fused``."""
        add = get_bias_dropout_add(*mode)

        def changed(
            output: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, rate: float
        ) -> torch.Tensor:
            values, bias = output
            values = self.norm(values if bias is None else values + bias)
            if self.scale != 1.0:
                values = values * self.scale
            summed: torch.Tensor = add((values, None), residual, rate)
            return summed

        return changed


class NormOverHeads(torch.nn.Module):
    """RMSNorm of the queries, or the keys, of all heads together.

    Tensor-parallel ranks hold parts of the heads, and the whole weight: megatron-core sums the
    gradients of norms of queries and keys over them.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, groups: bool
    ) -> None:
        super().__init__()
        heads = config.num_query_groups if groups else config.num_attention_heads
        self.ranks = mpu.get_tensor_model_parallel_world_size()
        if heads % self.ranks:
            raise ConfigError(
                f"--qk-norm-over-heads with --tensor-model-parallel-size {self.ranks}: must divide "
                f"the {heads} {'query groups' if groups else 'heads'}"
            )
        self.width, self.eps = heads * hidden_size, eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        weight = torch.ones(self.width, device=device, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight)

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """[s, b, heads, size] of this rank, in and out."""
        wide = heads.flatten(-2).float()
        squares = wide.pow(2).sum(-1, keepdim=True)
        weight = self.weight
        if self.ranks > 1:
            group = mpu.get_tensor_model_parallel_group()
            squares = differentiable.all_reduce(squares, group=group)  # type: ignore[no-untyped-call]
            weight = weight.chunk(self.ranks)[mpu.get_tensor_model_parallel_rank()]
        normed = wide * torch.rsqrt(squares / self.width + self.eps)
        return (weight * normed).to(heads.dtype).view_as(heads)


class BiasedExperts(SequentialMLP):  # type: ignore[misc]
    """Experts with biases.

    megatron-core adds them in place to what autograd knows as a view; here the products are copied
    first. It also takes the second bias for one that tensor-parallel ranks share, but they hold
    those of other experts.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for expert in self.local_experts:
            expert.linear_fc2.register_forward_hook(_copied)
            bias = expert.linear_fc2.bias
            bias.sequence_parallel = False
            tensor_parallel.set_tensor_model_parallel_attributes(bias, True, 0, 1)


def _copied(_: Any, __: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    return output[0].clone(), output[1]


class WindowRotaryAttention(packed.PackedSelfAttention):
    """Self-attention whose layers with a window have a rotary embedding of their own, without the
    scaling of the others' (``--window-rotary-base``)."""

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        layer_number: int,
        base: int,
        percent: float,
        **options: Any,
    ) -> None:
        self.window_rotary: RotaryEmbedding | None = None
        rotary = None
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            rotary = RotaryEmbedding(
                config.kv_channels,
                percent,
                rotary_interleaved=config.rotary_interleaved,
                rotary_base=base,
                use_cpu_initialization=config.use_cpu_initialization,
            )
            if hasattr(config, "yarn_rotary_scaling_factor"):
                config = copy.copy(config)
                config.yarn_rotary_scaling_factor = 1.0
                config.yarn_mscale = config.yarn_mscale_all_dim = None
        super().__init__(config, *args, layer_number=layer_number, **options)
        self.window_rotary = rotary

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        rotary_pos_emb: Any = None,
        **options: Any,
    ) -> Any:
        """Attend; see megatron-core's ``Attention.forward``."""
        if self.window_rotary is not None and rotary_pos_emb is not None:
            rotary_pos_emb = self.window_rotary(len(rotary_pos_emb))
        return super().forward(
            hidden_states, attention_mask, *args, rotary_pos_emb=rotary_pos_emb, **options
        )


class ScaledModel(GPTModel):  # type: ignore[misc]
    """A GPT model whose embedding is scaled, and whose loss counts the first tokens of the
    vocabulary only. The rows behind them pad it: they get a probability of 0, and gradients of 0.

    Args:
        num_tokens: tokens that count; None counts all.
        embedding_scale: factor of the embedding, rounded to its type.
    """

    def __init__(self, num_tokens: int | None, embedding_scale: float, **options: Any) -> None:
        super().__init__(**options)
        self._num_tokens, self._embedding_scale = num_tokens, embedding_scale

    def forward(
        self,
        input_ids: Any,
        position_ids: Any,
        attention_mask: Any,
        decoder_input: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Losses or outputs; see megatron-core's ``GPTModel.forward``."""
        if self._embedding_scale != 1.0 and self.pre_process and decoder_input is None:
            embedded = self.embedding(input_ids=input_ids, position_ids=position_ids)
            factor = torch.tensor(self._embedding_scale, dtype=embedded.dtype)
            decoder_input = embedded * factor.item()
        return super().forward(
            input_ids, position_ids, attention_mask, decoder_input=decoder_input, **options
        )

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Losses [b, s] of ``labels`` [b, s]. ``logits`` [s, b, v/t] are this rank's share; their
        padded columns are overwritten."""
        if self._num_tokens is not None:
            width = logits.shape[-1]
            here = max(0, self._num_tokens - width * mpu.get_tensor_model_parallel_rank())
            with torch.no_grad():  # in place: a copy would take as much memory as the logits
                # finite: a rank may hold padding alone, and a fused kernel subtracts its maximum
                logits[..., here:] = torch.finfo(logits.dtype).min
        losses: torch.Tensor = super().compute_language_model_loss(labels, logits)
        return losses


def form_layer(layer: ModuleSpec, config: TransformerConfig, args: RunConfig) -> ModuleSpec:
    """The spec of a local layer, changed to the forms that ``args`` ask for."""
    parts = layer.submodules
    if not args.input_norms:
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    if args.output_norms or args.residual_scale != 1.0:
        values = {
            "config": config,
            "scale": args.residual_scale,
            "normalised": args.output_norms,
        }
        parts.self_attn_bda = ModuleSpec(ScaledSum, params=values)
        parts.mlp_bda = ModuleSpec(ScaledSum, params=values)
    experts: Any = getattr(parts.mlp.submodules, "experts", None)
    if getattr(experts, "module", None) is SequentialMLP and config.add_bias_linear:
        experts.module = BiasedExperts
    attention = parts.self_attention
    if args.qk_norm_over_heads:
        for name, groups in (("q_layernorm", False), ("k_layernorm", True)):
            norm = ModuleSpec(NormOverHeads, params={"groups": groups})
            setattr(attention.submodules, name, norm)
    if args.window_rotary_base is not None:
        attention.module = WindowRotaryAttention
        attention.params = (attention.params or {}) | {
            "base": args.window_rotary_base,
            "percent": args.rotary_percent,
        }
    return layer
