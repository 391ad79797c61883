"""Kernels of attention over documents of unlike length, each called as its package wants it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.core import varlen
from megatron.dpp.core.varlen import Bounds

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
