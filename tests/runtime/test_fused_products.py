"""Weight gradients that a product adds into ``main_grad``."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from megatron.dpp.core.wgrad import product
from tests.runtime.launcher import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "profiling"))

import fused_products


@pytest.mark.parametrize("apex", [True, False])
def test_only_a_missing_product_is_provided(monkeypatch: pytest.MonkeyPatch, apex: bool) -> None:
    assigned: dict[str, Any] = {}
    monkeypatch.setattr(fused_products.compat, "lookup", lambda name: assigned.get(name, apex))
    monkeypatch.setattr(fused_products.compat, "assign", assigned.__setitem__)
    fused_products.provide()
    fused_products.provide()
    assert len(assigned) == (0 if apex else 2)


@pytest.mark.parametrize(
    ("kept", "given"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16,) * 2],
)
def test_a_fused_product_adds_into_the_main_gradient(
    monkeypatch: pytest.MonkeyPatch, kept: torch.dtype, given: torch.dtype
) -> None:
    monkeypatch.setattr(product.compat, "lookup", lambda name: fused_products)
    weight: Any = torch.nn.Parameter(torch.zeros(2, 3, dtype=given))
    weight.main_grad = torch.ones(2, 3, dtype=kept)
    tokens, grads = torch.ones(4, 3, dtype=given), torch.full((4, 2), 2.0, dtype=given)
    product.add_product(weight, tokens, grads)
    assert torch.equal(weight.main_grad, torch.full((2, 3), 9.0, dtype=kept))
