"""The local layers' attention and norms."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.bert import bert_layer_specs
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.dpp.core.experts import GroupedExperts
from megatron.dpp.errors import ConfigError
from megatron.dpp_train.model import layers, masks, packed
from megatron.dpp_train.model.layers import SdpaAttention
from megatron.dpp_train.model.norms import TorchNorm


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


def test_a_call_may_ask_for_another_mask_than_the_layers() -> None:
    """megatron-core's layers pass a type with each call."""
    q, k, v = torch.randn(3, 6, 1, 2, 4, generator=torch.Generator().manual_seed(1))
    causal, full = (
        SdpaAttention(config_with(attention_dropout=0.0), 1, kind, "self")
        for kind in (AttnMaskType.causal, AttnMaskType.no_mask)
    )
    for one, other in ((causal, full), (full, causal)):
        expected = other(q, k, v, None)
        assert torch.equal(one(q, k, v, None, attn_mask_type=other.attn_mask_type), expected)
        assert not torch.allclose(one(q, k, v, None), expected)


@pytest.mark.parametrize("kind", [AttnMaskType.causal, AttnMaskType.no_mask])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_is_the_softmax_of_products_of_a_query_with_the_keys_of_its_group(
    groups: int, kind: AttnMaskType
) -> None:
    """Heads lie one behind the other in the result."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(6, 2, heads, 8, generator=generator) for heads in (4, groups, groups))
    config = config_with(attention_dropout=0.0, num_attention_heads=4, hidden_size=32)
    seen = torch.ones(6, 6).tril() if kind == AttnMaskType.causal else torch.ones(6, 6)
    for scale in (None, 0.2):
        attention = SdpaAttention(config, 1, kind, "self", softmax_scale=scale)
        ours, theirs = (each.repeat_interleave(4 // groups, dim=2) for each in (k, v))
        products = torch.einsum("qbhd,kbhd->bhqk", q, ours) * (scale or 8**-0.5)
        shares = products.masked_fill(seen == 0, -torch.inf).softmax(-1)
        expected = torch.einsum("bhqk,kbhd->qbhd", shares, theirs).reshape(6, 2, 32)
        torch.testing.assert_close(attention(q, k, v, None), expected)


def test_packed_documents_are_masked_as_the_call_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(packed, "attend", lambda *_, mask_type, **__: asked.append(mask_type))
    attention = SdpaAttention(config_with(), 1, AttnMaskType.causal, "self").eval()
    q, params = torch.randn(6, 1, 2, 4), packed.packed_params(torch.tensor([0, 2, 6]), 4)
    for kind in (AttnMaskType.padding, None):
        with contextlib.suppress(AttributeError):  # of the result, which is none
            attention(q, q, q, None, attn_mask_type=kind, packed_seq_params=params)
    assert asked == [AttnMaskType.padding, AttnMaskType.causal]


def test_parts_of_a_sequence_drop_out_too_over_the_ranks_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless the layer is given ranks of its own."""
    given: list[Any] = []
    monkeypatch.setattr(layers.parallel_state, "get_context_parallel_group", lambda: "all")
    monkeypatch.setattr(
        layers.context, "attend",
        lambda q, k, v, ranks, **options: given.append((ranks, options["dropout"])),
    )  # fmt: skip
    tracker = SimpleNamespace(fork=contextlib.nullcontext)
    monkeypatch.setattr(layers.tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    config = config_with(context_parallel_size=2, attention_dropout=0.5)
    for groups in (None, SimpleNamespace(cp="own")):
        attention = SdpaAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)
        for training in (True, False):
            attention.train(training)(*torch.randn(3, 6, 1, 2, 4), None)
    assert given == [("all", 0.5), ("all", 0.0), ("own", 0.5), ("own", 0.0)]


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize(
    ("window", "kind"), [(2, "vanilla"), (None, "learnable"), (3, "learnable")]
)
def test_our_attention_has_windows_and_further_logits(
    window: int | None, kind: str, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a plain softmax over the keys of the window, and over one more logit of each head."""
    monkeypatch.setattr(masks.mpu, "get_tensor_model_parallel_world_size", lambda: 1)
    asked = {"window_size": None if window is None else (window, 0), "softmax_type": kind}
    config = config_with(use_cpu_initialization=True, **asked)
    attention = SdpaAttention(config, 1, AttnMaskType.causal, "self").eval()
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 6, 1, 2, 4)
    params = packed.packed_params(torch.tensor([0, 6], dtype=torch.int32), 6) if packs else None
    found = attention(q, k, v, None, packed_seq_params=params)
    for head in range(2):
        scores = (q[:, 0, head] @ k[:, 0, head].T) * attention.softmax_scale
        far = torch.arange(6)[:, None] - torch.arange(6)
        hidden = (far < 0) | (far > (6 if window is None else window))
        weights = scores.masked_fill(hidden, -math.inf).exp()
        total = weights.sum(-1, keepdim=True)
        if kind == "learnable":
            total = total + attention.softmax_offset[head].exp()
        wanted = weights / total @ v[:, 0, head]
        torch.testing.assert_close(found[:, 0].view(6, 2, 4)[:, head], wanted)


@pytest.mark.parametrize(
    ("mask", "own", "what"),
    [
        (AttnMaskType.causal, True, "--reset-attention-mask"),
        (AttnMaskType.no_mask, False, "attention of type no_mask"),
    ],
)
def test_masks_that_parts_of_a_sequence_do_not_have_are_refused(
    mask: AttnMaskType, own: bool, what: str
) -> None:
    """They would be ignored, and tokens would see what they must not."""
    config, groups = config_with(context_parallel_size=2), SimpleNamespace(cp="ranks")
    with pytest.raises(ConfigError, match=rf"--context-parallel-size above 1 with {what}: "):
        SdpaAttention(config, 1, mask, "self", pg_collection=groups, own_masks=own)
    causal = SdpaAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)
    assert causal.context_ranks == "ranks"


@pytest.mark.parametrize("kernel", ["a kernel", None])
def test_a_kernel_that_routers_have_stays(
    kernel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name for a missing one is None, with which routers compare it."""
    module, name = layers.compat.resolve("transformer.moe.moe_utils:te_general_gemm")
    monkeypatch.setattr(module, name, kernel, raising=False)
    if kernel is None:
        monkeypatch.delattr(module, name)
    empty = SimpleNamespace(layer_specs=[])
    monkeypatch.setattr(layers, "get_gpt_decoder_block_spec", lambda *_, **__: empty)
    layers.block_spec(config_with(num_moe_experts=4, moe_ffn_hidden_size=8))
    assert getattr(module, name) == kernel


@pytest.mark.parametrize("experts", [None, 4])
def test_a_block_is_made_from_the_specs_of_its_own_stage(
    experts: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers compare with a kernel's name, which exists with Transformer Engine alone."""
    asked: list[dict[str, Any]] = []
    layer = get_gpt_layer_local_spec()

    def specs(config: Any, **given: Any) -> Any:
        asked.append(given)
        return SimpleNamespace(layer_specs=[layer, layer], layer_norm="another")

    monkeypatch.setattr(layers, "get_gpt_decoder_block_spec", specs)
    module, name = layers.compat.resolve("transformer.moe.moe_utils:te_general_gemm")
    monkeypatch.setattr(module, name, None, raising=False)
    monkeypatch.delattr(module, name)
    sizes = {"num_moe_experts": experts, "moe_ffn_hidden_size": experts and 8}
    config = config_with(normalization="RMSNorm", qk_l2_norm=True, **sizes)
    block = layers.block_spec(config, vp_stage=1)
    assert asked == [{
        "use_transformer_engine": False, "normalization": "RMSNorm", "qk_l2_norm": True,
        "vp_stage": 1,
    }]  # fmt: skip
    assert len(block.layer_specs) == 2 and block.layer_norm is TorchNorm
    assert hasattr(module, name) is (experts is not None)


def test_blocks_by_other_packages_are_theirs_and_need_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = SimpleNamespace(layer_specs=[get_gpt_layer_local_spec()], layer_norm="theirs")
    monkeypatch.setattr(layers, "get_gpt_decoder_block_spec", lambda *_, **__: block)
    with pytest.raises(ConfigError, match="'apex': expected one of torch, megatron, transformer"):
        layers.block_spec(config_with(), implementation="apex")
    for found in (None, "a package"):
        packages = {"transformer_engine": found}
        monkeypatch.setattr(layers.importlib.util, "find_spec", packages.__getitem__)
        refusal = pytest.raises(ConfigError, match="the package is not installed; pip install")
        with contextlib.nullcontext() if found else refusal:
            made: Any = layers.block_spec(config_with(), implementation="transformer_engine")
            assert made is block
    made = layers.block_spec(config_with(), implementation="megatron")
    assert made.layer_norm is TorchNorm


@pytest.mark.parametrize("own", [True, False])
def test_masks_of_samples_reach_the_attention_of_all_layers(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that predict further tokens are normalised as the model's."""
    asked: list[dict[str, Any]] = []
    name = layers.compat.field_name(layers.compat.MTP_LAYER)

    def further(config: Any, layer: Any, engine: bool, vp_stage: Any) -> Any:
        parts: Any = SimpleNamespace(**{name: layer})
        return SimpleNamespace(layer_specs=[SimpleNamespace(submodules=parts)])

    def made(config: Any, engine: bool, **given: Any) -> Any:
        asked.append(given)
        return [get_gpt_layer_local_spec()]

    monkeypatch.setattr(layers, "get_gpt_mtp_block_spec", further)
    monkeypatch.setattr(layers, "get_gpt_decoder_layer_specs", made)
    block = SimpleNamespace(layer_specs=[get_gpt_layer_local_spec()])
    monkeypatch.setattr(layers, "get_gpt_decoder_block_spec", lambda *_, **__: block)
    config = config_with(mtp_num_layers=1, normalization="RMSNorm", qk_l2_norm=True)
    predicted: Any = layers.prediction_spec(config, own_masks=own)
    (first,) = layers.block_spec(config, own_masks=own).layer_specs  # type: ignore[misc]
    for layer in (first, getattr(predicted.layer_specs[0].submodules, name)):
        core = layer.submodules.self_attention.submodules.core_attention
        assert core.params == {"own_masks": own}
    assert asked == [{"normalization": "RMSNorm", "qk_l2_norm": True}]


def test_the_head_of_bert_has_our_norm_while_it_is_built() -> None:
    head = layers.compat.resolve("models.bert.bert_lm_head:LNImpl")
    before = getattr(*head)
    config = config_with(
        sequence_parallel=True, tensor_model_parallel_size=2, use_cpu_initialization=True
    )
    with layers.bert_head_norm():
        norm = getattr(*head)(config=config, hidden_size=8, eps=1e-3)
    assert isinstance(norm, torch.nn.LayerNorm) and norm.eps == 1e-3
    assert norm.weight.sequence_parallel is True
    assert getattr(*head) is before


@pytest.mark.parametrize("on_cpu", [True, False])
def test_norms_are_made_on_the_ranks_device_unless_the_cpu_is_asked_for(
    on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("meta"))
    norm: Any = TorchNorm(config_with(use_cpu_initialization=on_cpu), 8)
    assert norm.weight.device.type == ("cpu" if on_cpu else "meta")


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("cut", [True, False])
def test_norms_tell_that_their_gradients_are_sums_over_tensor_ranks(kind: str, cut: bool) -> None:
    config = config_with(
        normalization=kind, sequence_parallel=cut, tensor_model_parallel_size=2,
        use_cpu_initialization=True, layernorm_epsilon=1e-3, params_dtype=torch.bfloat16,
    )  # fmt: skip
    norm: Any = TorchNorm(config, 8, eps=1e-3)
    assert type(norm).__name__ == kind and norm.eps == 1e-3
    assert {parameter.dtype for parameter in norm.parameters()} == {torch.bfloat16}
    marks = {name: p.sequence_parallel for name, p in norm.named_parameters()}
    assert set(marks.values()) == {cut} and len(marks) == (2 if kind == "LayerNorm" else 1)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_centred_norm_multiplies_by_one_more_than_its_weight(kind: str) -> None:
    config = config_with(use_cpu_initialization=True, normalization=kind)
    plain = TorchNorm(config, 8)
    config.layernorm_zero_centered_gamma = True
    centred = TorchNorm(config, 8, scale=2.0)
    inputs = torch.randn(3, 8)
    torch.testing.assert_close(centred(inputs), 2 * plain(inputs))
    with torch.no_grad():
        plain.weight.fill_(1.5)
        centred.weight.fill_(0.5)
    torch.testing.assert_close(centred(inputs), 2 * plain(inputs))


def test_norms_that_pytorch_does_not_have_are_refused() -> None:
    said = "--normalization L2Norm: expected one of LayerNorm, RMSNorm"
    with pytest.raises(ConfigError, match=said):
        TorchNorm(config_with(use_cpu_initialization=True, normalization="L2Norm"), 8)


def made_from(
    layer: Any, patch: pytest.MonkeyPatch, *, packs: bool = True, implementation: str = "torch",
    **changes: Any,
) -> Any:  # fmt: skip
    """The spec that megatron-core's ``layer`` becomes, in a model of GPT, which packs, or BERT."""
    block = SimpleNamespace(layer_specs=[layer])
    patch.setattr(layers, "get_gpt_decoder_block_spec", lambda *_, **__: block)
    patch.setattr(bert_layer_specs, "bert_layer_local_spec", layer)
    patch.setattr(layers, "get_num_layers_to_build", lambda *_: 1)
    (found,) = layers.block_spec(
        config_with(**changes), arch="gpt" if packs else "bert", implementation=implementation,
        own_masks=packs,
    ).layer_specs  # fmt: skip
    return found


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
    implementation: str, ranks: int, packs: bool, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only ours takes a sequence that is cut over context-parallel ranks."""
    layer = get_gpt_layer_local_spec(qk_layernorm=True)
    made = made_from(
        layer, monkeypatch, context_parallel_size=ranks, implementation=implementation, packs=packs
    )
    parts = made.submodules
    attention = parts.self_attention
    core = attention.submodules.core_attention
    assert getattr(core, "module", core) is expected
    assert expected is not SdpaAttention or core.params == {"own_masks": True}
    assert (attention.module is packed.PackedSelfAttention) is packs
    norms = (parts.input_layernorm, parts.pre_mlp_layernorm, attention.submodules.q_layernorm)
    assert set(norms) == {TorchNorm}


@pytest.mark.parametrize(
    ("latent", "names"), [(False, ("q_layernorm", "k_layernorm")), (True, ("kv_layernorm",))]
)
def test_norms_of_queries_and_keys_are_ours_where_the_layer_has_them(
    latent: bool, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for normed in (True, False):
        layer = get_gpt_layer_local_spec(qk_layernorm=normed, multi_latent_attention=latent)
        made = made_from(layer, monkeypatch)
        attention = made.submodules.self_attention.submodules
        assert {getattr(attention, name) is TorchNorm for name in names} == {normed}
        module = layer.submodules.self_attention.module
        ours = made.submodules.self_attention.module
        assert ours is (module if latent else packed.PackedSelfAttention)


@pytest.mark.parametrize("stage", [0, 1, None])
def test_a_bert_stage_builds_the_layers_of_its_own_chunk(
    stage: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {None: 5, 0: 2, 1: 3}
    monkeypatch.setattr(
        layers, "get_num_layers_to_build", lambda config, vp_stage=None: numbers[vp_stage]
    )
    block = layers.block_spec(config_with(), arch="bert", vp_stage=stage)
    assert len(block.layer_specs) == numbers[stage] and block.layer_norm is TorchNorm
    attention = block.layer_specs[0].submodules.self_attention
    assert attention.module is not packed.PackedSelfAttention


@pytest.mark.parametrize("grouped", [True, False])
def test_experts_are_grouped_where_asked_in_layers_of_further_tokens_too(
    grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_with(num_moe_experts=2, moe_ffn_hidden_size=8, mtp_num_layers=1)
    layer = get_gpt_layer_local_spec(num_experts=2)
    parts: Any = SimpleNamespace(**{layers.compat.field_name(layers.compat.MTP_LAYER): layer})
    further = SimpleNamespace(layer_specs=[SimpleNamespace(submodules=parts)])
    block = SimpleNamespace(layer_specs=[layer])
    monkeypatch.setattr(layers, "get_gpt_decoder_block_spec", lambda *_, **__: block)
    monkeypatch.setattr(layers, "get_gpt_mtp_block_spec", lambda *_, **__: further)
    predicted: Any = layers.prediction_spec(config, grouped_experts=grouped)
    made = [
        *layers.block_spec(config, grouped_experts=grouped).layer_specs,  # type: ignore[list-item]
        getattr(
            predicted.layer_specs[0].submodules, layers.compat.field_name(layers.compat.MTP_LAYER)
        ),
    ]
    expected = GroupedExperts if grouped else SequentialMLP
    assert [one.submodules.mlp.submodules.experts.module for one in made] == [expected] * 2
    assert layer.submodules.mlp.submodules.experts.module is SequentialMLP, "it is megatron-core's"


def test_further_tokens_are_predicted_around_the_last_layer_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first ones of a model with experts may be dense."""
    given: list[Any] = []
    monkeypatch.setattr(layers, "get_gpt_decoder_layer_specs", lambda *_, **__: ["dense", "last"])
    monkeypatch.setattr(
        layers, "get_gpt_mtp_block_spec",
        lambda config, layer, engine, vp_stage: given.append((layer, vp_stage)),
    )  # fmt: skip
    config = config_with(mtp_num_layers=1)
    assert layers.prediction_spec(config, vp_stage=3) is None
    assert given == [("last", 3)]


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
