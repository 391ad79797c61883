"""Experts that graphs can capture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.core.graphs.slots import reasons_of_experts

CAPTURED = {
    "num_moe_experts": 4, "moe_pad_expert_input_to_capacity": True,
    "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": ["aux_loss"],
    "moe_input_jitter_eps": None, "moe_router_force_load_balancing": False,
    "moe_shared_expert_overlap": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({}, None),
        ({"moe_router_load_balancing_type": "seq_aux_loss"}, None),
        ({"num_moe_experts": None, "moe_pad_expert_input_to_capacity": False}, None),
        ({"moe_pad_expert_input_to_capacity": False}, "varying shapes"),
        ({"moe_token_dispatcher_type": "allgather"}, "dispatcher alltoall"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
        ({"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]}, "global_aux_loss"),
        ({"moe_input_jitter_eps": 0.1}, "noise of routers"),
        ({"moe_shared_expert_overlap": True}, "stream of their own"),
    ],
)
def test_only_experts_of_fixed_shapes_are_captured(
    setting: dict[str, Any], reason: str | None
) -> None:
    found = reasons_of_experts(SimpleNamespace(**CAPTURED | setting), torch.nn.Identity())
    held = [text for text, holds in found.items() if holds]
    assert len(held) == (reason is not None)
    assert reason is None or reason in held[0]
