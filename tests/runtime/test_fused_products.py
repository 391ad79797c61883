"""Weight gradients that a product adds into ``main_grad``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.core.wgrad import fused


@pytest.mark.parametrize(("apex", "torch_has_it"), [(True, False), (False, True), (False, False)])
def test_a_fused_product_comes_from_apex_or_pytorch(
    monkeypatch: pytest.MonkeyPatch, apex: bool, torch_has_it: bool
) -> None:
    product = SimpleNamespace(**({"dtype_out": None} if torch_has_it else {}))
    monkeypatch.setattr(fused.compat, "lookup", lambda name: apex)
    monkeypatch.setattr(fused.torch, "ops", SimpleNamespace(aten=SimpleNamespace(addmm=product)))
    assert fused.available() is (apex or torch_has_it)


@pytest.mark.parametrize("apex", [True, False])
def test_only_a_missing_product_is_provided(monkeypatch: pytest.MonkeyPatch, apex: bool) -> None:
    assigned: dict[str, Any] = {}
    monkeypatch.setattr(fused.compat, "lookup", lambda name: assigned.get(name, apex))
    monkeypatch.setattr(fused.compat, "assign", assigned.__setitem__)
    fused.provide()
    fused.provide()
    assert len(assigned) == (0 if apex else 2)


@pytest.mark.parametrize(
    ("kept", "given"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16,) * 2],
)
def test_a_fused_product_adds_into_the_main_gradient(
    monkeypatch: pytest.MonkeyPatch, kept: torch.dtype, given: torch.dtype
) -> None:
    monkeypatch.setattr(fused.compat, "lookup", lambda name: fused)
    asked: list[str] = []
    for name in ("wgrad_gemm_accum_fp16", "wgrad_gemm_accum_fp32"):
        real = getattr(fused, name)
        monkeypatch.setattr(
            fused, name, lambda *a, real=real, name=name: asked.append(name) or real(*a)
        )
    weight: Any = torch.nn.Parameter(torch.zeros(2, 3, dtype=given))
    weight.main_grad = torch.ones(2, 3, dtype=kept)
    tokens, grads = torch.ones(4, 3, dtype=given), torch.full((4, 2), 2.0, dtype=given)
    fused.add_product(weight, tokens, grads)
    assert torch.equal(weight.main_grad, torch.full((2, 3), 9.0, dtype=kept))
    assert asked == [f"wgrad_gemm_accum_fp{32 if kept == torch.float32 else 16}"]
