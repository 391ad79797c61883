"""PyTorch's attention over documents of unlike length, called as PyTorch wants it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.core import varlen
from megatron.dpp.core.varlen import DocumentBounds

STARTS = torch.tensor([0, 3, 4, 4, 9], dtype=torch.int32)
TOKENS = 9


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention written out, with a mask over all tokens."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    scores = torch.einsum("snd,tnd->nst", q, k) * scale
    document = torch.tensor([0, 0, 0, 1, 3, 3, 3, 3, 3])
    seen = (document[:, None] == document).tril()
    weights = scores.masked_fill(~seen, -math.inf).softmax(dim=-1)
    return torch.einsum("nst,tnd->snd", weights, v)


def kernel(q: Any, k: Any, v: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
           return_aux: Any = None, scale: float | None = None,
           window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False
           ) -> torch.Tensor:  # fmt: skip
    """Like PyTorch 2.12's."""
    assert window_size == (-1, 0) and max_q == max_k == 5
    assert enable_gqa is (q.shape[1] != k.shape[1])
    assert scale is not None
    return dense(q, k, v, scale)


@pytest.mark.parametrize("groups", [2, 4])
def test_documents_attend_within_themselves(monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    monkeypatch.setattr(varlen, "kernel", lambda: kernel)
    drawn = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(TOKENS, n, 8, generator=drawn) for n in (4, groups, groups))
    found = varlen.attend_documents(q, k, v, DocumentBounds(STARTS, STARTS, 5, 5), scale=0.3)
    torch.testing.assert_close(found, dense(q, k, v, 0.3))


def test_the_kernel_is_pytorchs_in_its_later_form(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = SimpleNamespace(varlen_attn=kernel)
    monkeypatch.setattr(varlen.importlib, "import_module", lambda name: module)
    try:
        for function, expected in ((kernel, kernel), (lambda q, is_causal: q, None)):
            module.varlen_attn = function
            varlen.kernel.cache_clear()
            assert varlen.kernel() is expected
    finally:
        varlen.kernel.cache_clear()


@pytest.mark.parametrize(
    ("there", "dtype", "dropout", "expected"),
    [
        (True, torch.bfloat16, 0.0, True), (True, torch.float16, 0.0, True),
        (True, torch.bfloat16, 0.1, False), (True, torch.float32, 0.0, False),
        (False, torch.bfloat16, 0.0, False),
    ],
)  # fmt: skip
def test_queries_that_the_kernel_can_take(
    monkeypatch: pytest.MonkeyPatch, there: bool, dtype: torch.dtype, dropout: float, expected: bool
) -> None:
    monkeypatch.setattr(varlen, "kernel", lambda: kernel if there else None)
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    query: Any = SimpleNamespace(shape=(9, 1, 4, 64), dtype=dtype, device="cuda", is_cuda=True)
    for size, capability[0], found in (
        (64, (9, 0), expected), (60, (9, 0), False), (264, (9, 0), False), (256, (9, 0), expected),
        (256, (8, 0), expected), (256, (7, 5), False),
    ):  # fmt: skip
        query.shape = (9, 1, 4, size)
        assert varlen.can_take(query, dropout) == found
    query.is_cuda, query.shape = False, (9, 1, 4, 64)
    assert not varlen.can_take(query, dropout)
