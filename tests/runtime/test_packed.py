"""Attention over the documents of a packed microbatch."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.dpp.core import varlen
from megatron.dpp.core.varlen import Bounds
from megatron.dpp.errors import ConfigError
from megatron.dpp_train.model import packed
from megatron.dpp_train.model.layers import SdpaAttention
from megatron.dpp_train.model.packed import Documents, documents_of, packed_params, positions

LENGTHS = [3, 1, 0, 5]
STARTS = torch.tensor([0, 3, 4, 4, 9], dtype=torch.int32)
TOKENS = 9


def drawn(heads: int = 4, groups: int = 2, size: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(TOKENS, 1, n, size, generator=generator, requires_grad=True)
        for n in (heads, groups, groups)
    ]


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> torch.Tensor:
    """Attention written out, with a mask over all tokens."""
    k, v = (each.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for each in (k, v))
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * scale
    document = torch.tensor([0, 0, 0, 1, 3, 3, 3, 3, 3])
    seen = document[:, None] == document
    seen = seen.tril() if causal else seen
    weights = scores.masked_fill(~seen, -math.inf).softmax(dim=-1)
    return torch.einsum("bnst,tbnd->sbnd", weights, v).reshape(len(q), 1, -1)


def test_positions_begin_anew_in_each_document() -> None:
    assert positions(STARTS, TOKENS).tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]
    assert positions(STARTS[:-1], TOKENS).tolist()[4:] == [0, 1, 2, 3, 4], "tokens behind the last"


def test_a_mask_of_either_kind_is_kept_for_itself() -> None:
    documents = Documents(STARTS, 5)
    for causal in (True, False, True):
        seen = documents.allowed(TOKENS, causal=causal)
        lengths = [1, 2, 3, 1, 1, 2, 3, 4, 5] if causal else [3, 3, 3, 1, 5, 5, 5, 5, 5]
        assert seen.sum(dim=1).tolist() == lengths


@pytest.mark.parametrize(
    "mask_type", [AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.no_mask]
)
def test_each_document_sees_itself_alone(mask_type: AttnMaskType) -> None:
    """On a CPU one document at a time; on a GPU without a kernel for it, by a mask."""
    causal = mask_type != AttnMaskType.no_mask
    inputs, documents = drawn(), Documents(STARTS, 5)
    context = packed.attend(*inputs, documents, scale=0.3, mask_type=mask_type)
    expected = dense(*inputs, causal=causal, scale=0.3)
    torch.testing.assert_close(context, expected)
    probe = torch.randn_like(expected)
    gradients = (torch.autograd.grad(out, inputs, probe) for out in (context, expected))
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted)
    q, k, v = (each.permute(1, 2, 0, 3) for each in inputs)
    masked = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=documents.allowed(TOKENS, causal=causal), scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(masked.permute(2, 0, 1, 3).reshape(TOKENS, 1, -1), expected)


def old_varlen(q: Any, k: Any, v: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int,
               is_causal: bool = False, return_aux: Any = None) -> torch.Tensor:  # fmt: skip
    """Like PyTorch 2.10's: no scale, and as many groups as heads."""
    assert q.shape == k.shape
    assert max_q == max_k == 5
    assert is_causal
    scale = 1.0 / math.sqrt(q.shape[-1])
    return dense(*(each[:, None] for each in (q, k, v)), causal=True, scale=scale).view_as(q)


def new_varlen(q: Any, k: Any, v: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
               return_aux: Any = None, scale: float | None = None,
               window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False
               ) -> torch.Tensor:  # fmt: skip
    """Like PyTorch 2.12's."""
    assert window_size == (-1, 0)
    assert enable_gqa
    assert scale is not None
    return dense(*(each[:, None] for each in (q, k, v)), causal=True, scale=scale).view_as(q)


def flash(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, dropout_p: float,
          softmax_scale: float, causal: bool) -> torch.Tensor:  # fmt: skip
    """Like flash-attention's."""
    assert causal
    assert dropout_p == 0.0
    tensors = (each[:, None] for each in (q, k, v))
    return dense(*tensors, causal=True, scale=softmax_scale).view_as(q)


@pytest.mark.parametrize("function", [old_varlen, new_varlen, flash])
def test_every_kernel_is_called_as_it_wants(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    monkeypatch.setattr(varlen, "imported", lambda module, name: function)
    call = varlen.KERNELS["flash" if function is flash else "torch"]
    inputs = drawn()
    q, k, v = (each.squeeze(1) for each in inputs)
    options: dict[str, Any] = {"causal": True, "scale": 0.3, "dropout": 0.0}
    context = call(q, k, v, Bounds(STARTS, STARTS, 5, 5), **options)
    torch.testing.assert_close(
        context.reshape(TOKENS, 1, -1), dense(*inputs, causal=True, scale=0.3)
    )


@pytest.mark.parametrize("causal", [True, False])
def test_every_kernel_is_told_the_mask_and_flash_attention_the_dropout(
    monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    given: list[dict[str, Any]] = []

    def old(q: Any, *_: Any, is_causal: bool) -> Any:
        given.append({"is_causal": is_causal})
        return q

    def new(q: Any, *_: Any, scale: float, window_size: tuple[int, int]) -> Any:
        given.append({"window_size": window_size})
        return q

    def flash(q: Any, *_: Any, **options: Any) -> Any:
        given.append(options)
        return q

    q = torch.zeros(TOKENS, 4, 8)
    for function in (old, new, flash):
        monkeypatch.setattr(varlen, "imported", lambda *_, function=function: function)
        call = varlen.KERNELS["flash" if function is flash else "torch"]
        dropout = 0.25 if function is flash else 0.0
        call(q, q, q, Bounds(STARTS, STARTS, 5, 5), causal=causal, scale=0.5, dropout=dropout)
    window = (-1, 0) if causal else (-1, -1)
    of_flash = {"dropout_p": 0.25, "softmax_scale": 0.5, "causal": causal}
    assert given == [{"is_causal": causal}, {"window_size": window}, of_flash]


@pytest.mark.parametrize(
    ("there", "dtype", "dropout", "expected"),
    [
        ({"varlen_attn", "flash_attn_varlen_func"}, torch.bfloat16, 0.0, ["torch", "flash"]),
        ({"varlen_attn", "flash_attn_varlen_func"}, torch.bfloat16, 0.1, ["flash"]),
        ({"flash_attn_varlen_func"}, torch.float16, 0.0, ["flash"]),
        ({"varlen_attn"}, torch.bfloat16, 0.1, []),
        ({"varlen_attn"}, torch.float32, 0.0, []),
        (set(), torch.bfloat16, 0.0, []),
    ],
)
def test_the_kernels_that_are_there(
    monkeypatch: pytest.MonkeyPatch,
    there: set[str],
    dtype: torch.dtype,
    dropout: float,
    expected: list[str],
) -> None:
    monkeypatch.setattr(varlen, "imported", lambda _, name: print if name in there else None)
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    query: Any = SimpleNamespace(shape=(9, 1, 4, 64), dtype=dtype, device="cuda", is_cuda=True)
    for size, capability[0], found in (
        (64, (9, 0), expected), (60, (9, 0), []), (264, (9, 0), []), (256, (9, 0), expected),
        (256, (8, 0), expected), (256, (7, 5), []),
    ):  # fmt: skip
        query.shape = (9, 1, 4, size)
        assert varlen.kernels_for(query, dropout) == found
    query.is_cuda, query.shape = False, (9, 1, 4, 64)
    assert varlen.kernels_for(query, dropout) == []


def test_all_layers_share_the_documents() -> None:
    params = packed_params(STARTS, 7)
    assert params.cu_seqlens_q is params.cu_seqlens_kv is STARTS
    assert params.max_seqlen_q == params.max_seqlen_kv == 7
    assert documents_of(params) is documents_of(params)
    assert documents_of(params).bounds(TOKENS) == [(0, 3), (3, 4), (4, 4), (4, 9)]
    assert documents_of(packed_params(STARTS, 5)) is not documents_of(params)
    given = Documents(STARTS, 7)
    assert documents_of(packed_params(STARTS, 7, given)) is given
    assert documents_of(copy.copy(params)) is documents_of(params), "each layer has a copy"


def test_megatron_cores_attention_gets_each_document_without_the_mask_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[list[float], Any]] = []

    def forward(_: Any, q: torch.Tensor, k: Any, v: Any, mask: Any, *rest: Any) -> torch.Tensor:
        assert torch.equal(q, k) and torch.equal(k, v) and rest == ("type",)
        seen.append((q.flatten().tolist(), mask))
        return 2 * q

    monkeypatch.setattr(packed.DotProductAttention, "forward", forward)
    attention = packed.PackedDotProductAttention.__new__(packed.PackedDotProductAttention)
    torch.nn.Module.__init__(attention)
    tokens, mask = torch.arange(float(TOKENS)).view(TOKENS, 1, 1), torch.ones(1)
    given = (tokens, tokens, tokens, mask, "type")
    found = attention.forward(*given, packed_seq_params=packed_params(STARTS, 5))
    assert torch.equal(found, 2 * tokens[:, None])
    assert seen == [([0.0, 1.0, 2.0], None), ([3.0], None), ([4.0, 5.0, 6.0, 7.0, 8.0], None)]
    seen.clear()
    attention.forward(*given)
    assert len(seen) == 1 and seen[0][1] is mask


@pytest.mark.parametrize(
    ("starts", "longest", "tokens"),
    [([0, 3, 9], 5, 9), ([0, 3, 8], 5, 9), ([1, 3, 9], 6, 9), ([0, 6, 3, 9], 6, 9)],
)
def test_documents_of_another_microbatch(starts: list[int], longest: int, tokens: int) -> None:
    documents = Documents(torch.tensor(starts, dtype=torch.int32), longest)
    with pytest.raises(ConfigError, match=f"max_seqlen {longest} and {tokens} tokens"):
        documents.bounds(tokens)


def test_what_packing_excludes() -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, attention_dropout=0.0,
        cuda_graph_scope=[],
    )  # fmt: skip
    q = torch.randn(9, 2, 2, 4)
    params = packed_params(STARTS, 5)
    attention = SdpaAttention(config, 1, AttnMaskType.causal, "self")
    with pytest.raises(ConfigError, match="--micro-batch-size 2"):
        attention(q, q, q, None, packed_seq_params=params)
    own = SdpaAttention(config, 1, AttnMaskType.causal, "self", own_masks=True)
    with pytest.raises(ConfigError, match="--reset-attention-mask"):
        own(q[:, :1], q[:, :1], q[:, :1], None, packed_seq_params=params)
    with pytest.raises(ConfigError, match="attention bias"):
        attention(q, q, q, None, attention_bias=q)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_of_a_gpu(dtype: torch.dtype) -> None:
    """bfloat16 runs a variable-length kernel, float32 the masked attention."""
    inputs = [each.detach().cuda().to(dtype).requires_grad_() for each in drawn(size=64)]
    context = packed.attend(*inputs, Documents(STARTS.cuda(), 5), scale=0.125)
    exact = [each.detach().float().cpu().requires_grad_() for each in inputs]
    expected = dense(*exact, causal=True, scale=0.125)
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(context.float().cpu(), expected, rtol=bound, atol=bound)
    probe = torch.randn_like(expected)
    got = torch.autograd.grad(context, inputs, probe.cuda().to(dtype))
    for one, other in zip(got, torch.autograd.grad(expected, exact, probe), strict=True):
        torch.testing.assert_close(one.float().cpu(), other, rtol=2 * bound, atol=2 * bound)
