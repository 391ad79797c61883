"""Norms of the local layers: PyTorch's, with what megatron-core and families ask of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.dpp.errors import ConfigError


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
        plain = not (config.layernorm_zero_centered_gamma or scale != 1.0)
        norms: dict[str, Any] = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        if config.normalization not in norms:
            raise ConfigError(
                f"--normalization {config.normalization}: expected one of {', '.join(norms)}"
            )
        kinds = norms if plain else {"LayerNorm": _LayerNorm, "RMSNorm": _RMSNorm}
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        norm: Any = kinds[config.normalization](
            hidden_size, eps=eps, device=device, dtype=config.params_dtype
        )
        if not plain:
            norm.change(centred=config.layernorm_zero_centered_gamma, scale=scale)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        made: torch.nn.Module = norm
        return made


class _Changed(torch.nn.Module):
    """A norm whose factor may be 1 + weight, and whose output may be scaled. It computes in 32
    bit."""

    weight: torch.nn.Parameter
    offset, scale = 0.0, 1.0

    def change(self, *, centred: bool, scale: float) -> None:
        """Set the form; a centred norm starts with a weight of 0."""
        self.offset, self.scale = float(centred), scale
        if centred:
            torch.nn.init.zeros_(self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., size] in and out."""
        normed = self.normed(input.float(), self.weight.float() + self.offset)
        return (normed * self.scale).to(input.dtype)

    def normed(self, input: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """The norm in 32 bit."""
        raise NotImplementedError


class _RMSNorm(_Changed, torch.nn.RMSNorm):
    def normed(self, input: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(input, self.normalized_shape, factor, self.eps)


class _LayerNorm(_Changed, torch.nn.LayerNorm):
    def normed(self, input: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(input, self.normalized_shape, factor, self.bias.float(), self.eps)
