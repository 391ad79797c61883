"""The local layers' attention."""

from __future__ import annotations

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.dpp.mcore.layers import SdpaAttention


def test_attention_keeps_to_the_masks_that_samples_bring() -> None:
    """With ``--reset-attention-mask`` the second document does not see the first."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        attention_dropout=0.0,
        cuda_graph_scope=[],
    )
    q, k, v = torch.randn(3, 6, 1, 2, 4, generator=torch.Generator().manual_seed(1))
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    seen[3:, :3] = False
    plain, own = (
        SdpaAttention(config, 1, AttnMaskType.causal, "self", own_masks=own)
        for own in (False, True)
    )
    second = plain(q[3:], k[3:], v[3:], None)
    torch.testing.assert_close(own(q, k, v, ~seen[None, None])[3:], second)
    assert not torch.allclose(plain(q, k, v, ~seen[None, None])[3:], second)
    assert torch.equal(own(q, k, v, None), plain(q, k, v, None))  # on stages that read no data
