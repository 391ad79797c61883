"""The local layers' attention and norms."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.dpp.mcore import layers, packed
from megatron.dpp.mcore.layers import SdpaAttention, TorchNorm


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


def config_with(**changes: Any) -> TransformerConfig:
    usual = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "cuda_graph_scope": []}
    return TransformerConfig(**usual | changes)


@pytest.mark.parametrize(
    ("of_config", "own", "drops"),
    [(0.5, None, True), (0.0, None, False), (0.5, 0.0, False), (0.0, 0.5, True)],
)
def test_attention_drops_out_in_training_by_its_own_share_or_the_models(
    of_config: float, own: float | None, drops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of packed documents; and from the tracker's random state."""
    forks: list[int] = []

    @contextlib.contextmanager
    def fork() -> Any:
        forks.append(1)
        yield

    tracker = SimpleNamespace(fork=fork)
    monkeypatch.setattr(layers.tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    config = config_with(attention_dropout=of_config)
    attention = SdpaAttention(config, 1, AttnMaskType.causal, "self", attention_dropout=own)
    q, k, v = torch.randn(3, 6, 1, 2, 4, generator=torch.Generator().manual_seed(1))
    starts = torch.tensor([0, 2, 6], dtype=torch.int32)
    for params in (None, packed.packed_params(starts, 4)):
        forks.clear()
        judged = attention.eval()(q, k, v, None, packed_seq_params=params)
        assert not forks
        trained = attention.train()(q, k, v, None, packed_seq_params=params)
        assert torch.equal(trained, judged) is not drops and bool(forks) is drops


def test_ranks_that_hold_parts_of_a_sequence_draw_from_the_default_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As megatron-core's attention, which forks the tracker without sequence parallelism alone."""
    monkeypatch.setattr(layers.tensor_parallel, "get_cuda_rng_tracker", lambda: pytest.fail("fork"))
    config = config_with(
        attention_dropout=0.5, sequence_parallel=True, tensor_model_parallel_size=2
    )
    attention = SdpaAttention(config, 1, AttnMaskType.causal, "self")
    q, k, v = torch.randn(3, 6, 1, 1, 4)
    assert attention(q, k, v, None).shape == (6, 1, 4)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("cut", [True, False])
def test_norms_tell_that_their_gradients_are_sums_over_tensor_ranks(kind: str, cut: bool) -> None:
    config = config_with(
        normalization=kind, sequence_parallel=cut, tensor_model_parallel_size=2,
        use_cpu_initialization=True, layernorm_epsilon=1e-3,
    )  # fmt: skip
    norm: Any = TorchNorm(config, 8, eps=1e-3)
    assert type(norm).__name__ == kind and norm.eps == 1e-3
    marks = {name: p.sequence_parallel for name, p in norm.named_parameters()}
    assert set(marks.values()) == {cut} and len(marks) == (2 if kind == "LayerNorm" else 1)


@pytest.mark.parametrize(
    ("implementation", "ranks", "packs", "expected"),
    [
        ("torch", 1, True, SdpaAttention),
        ("torch", 2, True, SdpaAttention),
        ("megatron", 1, True, packed.PackedDotProductAttention),
        ("megatron", 2, True, SdpaAttention),
        ("megatron", 1, False, DotProductAttention),
    ],
)
def test_layers_are_made_from_the_attention_that_can_do_it(
    implementation: str, ranks: int, packs: bool, expected: Any
) -> None:
    """Only ours takes a sequence that is cut over context-parallel ranks."""
    local = layers._LocalLayers(
        config_with(context_parallel_size=ranks), implementation, own_masks=True, packs=packs
    )
    parts = local.made_from(get_gpt_layer_local_spec(qk_layernorm=True)).submodules
    attention = parts.self_attention
    core = attention.submodules.core_attention
    assert getattr(core, "module", core) is expected
    assert expected is not SdpaAttention or core.params == {"own_masks": True}
    assert (attention.module is packed.PackedSelfAttention) is packs
    norms = (parts.input_layernorm, parts.pre_mlp_layernorm, attention.submodules.q_layernorm)
    assert set(norms) == {TorchNorm}


@pytest.mark.parametrize("implementation", ["torch", "megatron"])
def test_layers_of_further_tokens_have_our_norms_and_attention(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """megatron-core's norms refuse sequence parallelism."""
    monkeypatch.setattr(
        layers, "get_gpt_mtp_block_spec",
        lambda config, layer, engine, vp_stage: SimpleNamespace(layer_specs=[further(layer)]),
    )  # fmt: skip
    name = layers.compat.field_name(layers.compat.MTP_LAYER)

    def further(layer: Any) -> Any:
        given = {"enorm": None, "hnorm": None, "layer_norm": None, name: layer}
        return SimpleNamespace(submodules=SimpleNamespace(**given))

    config = config_with(mtp_num_layers=1)
    block = layers.prediction_spec(config, implementation=implementation)
    parts = block.layer_specs[0].submodules
    assert parts.enorm is parts.hnorm is parts.layer_norm is TorchNorm
    core = getattr(parts, name).submodules.self_attention.submodules.core_attention
    expected = SdpaAttention if implementation == "torch" else packed.PackedDotProductAttention
    assert getattr(core, "module", core) is expected
    assert layers.prediction_spec(config_with()) is None
