"""Models of the families in megatron-core: what ``--hf-forms`` asks for beside Megatron's flags.

:func:`adjust` changes the configuration from which ``megatron.training`` builds a GPT model. Norms
behind blocks, norms over all heads and the like are modules of local layers; scales of embedding
and logits, and rows that pad the vocabulary, are the model's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
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
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec

from megatron.dpp.errors import ConfigError
from megatron.dpp_train.hf.forms import FLAG, Forms, parse_forms

Add = Callable[[Any, torch.Tensor, float], torch.Tensor]
"""Adds a block's output and bias to the residual stream, with dropout."""


def add_arguments(parser: Any) -> Any:
    """Add the flag of the forms to Megatron's parser, and return it."""
    group = parser.add_argument_group("Hugging Face models")
    group.add_argument(FLAG, metavar="LIST", help="forms of a converted model, as convert prints")
    return parser


def adjust(config: GPTModelConfig, args: Any) -> GPTModelConfig:
    """A model's configuration with the forms that ``args`` ask for; returns ``config``.

    Raises:
        ConfigError: a form is unknown, or needs ``--transformer-impl local``.
    """
    forms, core = parse_forms(args.hf_forms), config.transformer
    config.rope_scaling_factor = args.rope_scaling_factor  # megatron.training leaves it out
    if forms.softmax_scale is not None:
        core.softmax_scale = forms.softmax_scale
    if forms.geglu or (forms.tanh_gelu and not core.bias_activation_fusion):
        core.activation_func, core.gated_linear_unit = tanh_gelu, forms.geglu
        core.bias_activation_fusion = False
    changed = forms.change_layers or forms.logit_scale != 1.0
    if changed and core.transformer_impl != "local":
        raise ConfigError(f"{FLAG} {forms}: needs --transformer-impl local")
    own_norms = core.sequence_parallel or core.layernorm_zero_centered_gamma
    if core.transformer_impl == "local" and (changed or own_norms):
        config.transformer_layer_spec = partial(_block, forms=forms, percent=args.rotary_percent)
    config.pre_wrap_hooks.append(partial(_formed, forms=forms))
    return config


def tanh_gelu(inputs: torch.Tensor) -> torch.Tensor:
    """GELU, approximated by tanh, of any shape."""
    return F.gelu(inputs, approximate="tanh")


# --- the model ---


class FormedModel(GPTModel):  # type: ignore[misc]
    """A GPT model whose embedding is scaled, and whose loss counts the first tokens of the
    vocabulary only. The rows behind them pad it: they get a probability of 0, and gradients of 0.
    """

    forms: Forms

    def forward(
        self,
        input_ids: Any,
        position_ids: Any,
        attention_mask: Any,
        decoder_input: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Losses or outputs; see megatron-core's ``GPTModel.forward``."""
        scale = self.forms.embedding_scale
        if scale != 1.0 and self.pre_process and decoder_input is None:
            embedded = self.embedding(input_ids=input_ids, position_ids=position_ids)
            decoder_input = embedded * torch.tensor(scale, dtype=embedded.dtype).item()
        return super().forward(
            input_ids, position_ids, attention_mask, decoder_input=decoder_input, **options
        )

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Losses [b, s] of ``labels`` [b, s]. ``logits`` [s, b, v/t] are this rank's share; their
        padded columns are overwritten."""
        if self.forms.tokens is not None:
            width = logits.shape[-1]
            here = max(0, self.forms.tokens - width * mpu.get_tensor_model_parallel_rank())
            with torch.no_grad():  # in place: a copy would take as much memory as the logits
                # finite: a rank may hold padding alone, and a fused kernel subtracts its maximum
                logits[..., here:] = torch.finfo(logits.dtype).min
        losses: torch.Tensor = super().compute_language_model_loss(labels, logits)
        return losses


def _formed(chunks: list[Any], *, forms: Forms) -> list[Any]:
    """Chunks of a model, as ``megatron.training`` has built them, with the forms of a model."""
    for chunk in chunks:
        if forms.tokens is not None or forms.embedding_scale != 1.0:
            chunk.__class__, chunk.forms = FormedModel, forms
        for module in chunk.modules():
            if isinstance(module, SequentialMLP) and module.config.add_bias_linear:
                _mend_biases(module)
    return chunks


def _mend_biases(experts: Any) -> None:
    """megatron-core adds the second bias of experts in place to what autograd knows as a view; here
    the products are copied first. It also takes that bias for one which tensor-parallel ranks
    share, but they hold those of other experts."""
    for expert in experts.local_experts:
        expert.linear_fc2.register_forward_hook(_copied)
        bias = expert.linear_fc2.bias
        bias.sequence_parallel = False
        tensor_parallel.set_tensor_model_parallel_attributes(bias, True, 0, 1)


def _copied(_: Any, __: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    return output[0].clone(), output[1]


# --- layers ---


def _block(
    config: GPTModelConfig, vp_stage: int | None = None, *, forms: Forms, percent: float
) -> TransformerBlockSubmodules:
    """The spec of this stage's layers: megatron-core's local ones, changed to the forms."""
    core, spec = config.transformer, default_layer_spec(config, vp_stage)
    if isinstance(spec, ModuleSpec):
        spec = TransformerBlockSubmodules([spec] * get_num_layers_to_build(core, vp_stage))
    layers = [_layer(copy.deepcopy(each), core, forms, percent) for each in spec.layer_specs]
    norm: Any = partial(TorchNorm, scale=forms.logit_scale)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _layer(layer: ModuleSpec, core: TransformerConfig, forms: Forms, percent: float) -> ModuleSpec:
    """The spec of a local layer, changed to the forms."""
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = TorchNorm
    if forms.no_input_norms:
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    if forms.output_norms or forms.residual_scale != 1.0:
        values = {"config": core, "forms": forms}
        parts.self_attn_bda = parts.mlp_bda = ModuleSpec(ScaledSum, params=values)
    attention = parts.self_attention
    for name, groups in (("q_layernorm", False), ("k_layernorm", True)):
        if forms.qk_norm_over_heads:
            setattr(attention.submodules, name, partial(NormOverHeads, groups=groups))
        elif getattr(attention.submodules, name) is WrappedTorchNorm:
            setattr(attention.submodules, name, TorchNorm)
    if forms.window_rotary_base is not None:
        bases = (_WindowRotary, attention.module)
        attention.module = type("WindowRotaryAttention", bases, {})
        attention.params = {
            **(attention.params or {}),
            "base": forms.window_rotary_base,
            "percent": percent,
        }
    return layer


class ScaledSum(torch.nn.Module):
    """Stands for megatron-core's ``get_bias_dropout_add``: the output of a block is normalised and
    scaled before it is added to the residual stream."""

    def __init__(self, config: TransformerConfig, forms: Forms) -> None:
        super().__init__()
        self.scale = forms.residual_scale
        self.norm: torch.nn.Module = torch.nn.Identity()
        if forms.output_norms:
            self.norm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)

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


class _WindowRotary:
    """Mixed into self-attention: layers with a window have a rotary embedding of their own, without
    the scaling of the others'."""

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        layer_number: int,
        base: int,
        percent: float,
        **options: Any,
    ) -> None:
        rotary: RotaryEmbedding | None = None
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
        super().__init__(config, *args, layer_number=layer_number, **options)  # type: ignore[call-arg]
        self.window_rotary = rotary

    def forward(self, *args: Any, rotary_pos_emb: Any = None, **options: Any) -> Any:
        """Attend; see megatron-core's ``Attention.forward``."""
        if self.window_rotary is not None and rotary_pos_emb is not None:
            rotary_pos_emb = self.window_rotary(len(rotary_pos_emb))
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **options)  # type: ignore[misc]


# --- norms ---


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


class TorchNorm:
    """PyTorch's LayerNorm or RMSNorm whose parameters carry Megatron's ``sequence_parallel`` mark.

    megatron-core's ``WrappedTorchNorm`` refuses ``sequence_parallel``, as its weights lack the mark
    by which ``finalize_model_grads`` all-reduces their gradients over the tensor-parallel ranks.
    """

    def __new__(  # type: ignore[misc]
        cls,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        scale: float = 1.0,
        **_: Any,
    ) -> torch.nn.Module:
        kind: Any = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        centred = config.layernorm_zero_centered_gamma
        if centred or scale != 1.0:
            if kind is torch.nn.LayerNorm:
                raise ConfigError("--apply-layernorm-1p with local layers needs RMSNorm")
            kind = partial(_ChangedNorm, centred=centred, scale=scale)
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        norm: torch.nn.Module = kind(hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class _ChangedNorm(torch.nn.RMSNorm):
    """RMSNorm whose factor may be 1 + weight, and whose output may be scaled, in 32 bit."""

    def __init__(self, *args: Any, centred: bool, scale: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.offset, self.scale = float(centred), scale
        if centred:
            torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] in and out."""
        factor = self.weight.float() + self.offset
        normed = F.rms_norm(x.float(), self.normalized_shape, factor, self.eps)
        return (normed * self.scale).to(x.dtype)
