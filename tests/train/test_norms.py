"""The norm of the parameters: each counts once, whichever ranks hold it."""

from __future__ import annotations

import pytest
import torch

from megatron.dpp.train import metrics


def test_experts_of_other_ranks_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two expert-parallel ranks has one expert, and both have the other parameters."""
    for name in ("data", "model", "expert_tensor_model_pipeline"):
        monkeypatch.setattr(
            metrics.mpu, f"get_{name}_parallel_group", lambda name=name, **_: name, raising=True
        )
    ranks = {"data": 2, "model": 1, "expert_tensor_model_pipeline": 2}
    monkeypatch.setattr(metrics.dist, "all_reduce", lambda sums, group: sums.mul_(ranks[group]))
    monkeypatch.setattr(metrics, "param_is_not_tensor_parallel_duplicate", lambda parameter: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    chunk = torch.nn.Module()
    chunk.dense = torch.nn.Parameter(torch.tensor([2.0]))
    chunk.expert = torch.nn.Parameter(torch.tensor([3.0, 1.0]))
    chunk.expert.allreduce = False
    assert metrics.parameters_norm([chunk], from_main=False) == pytest.approx((4 + 2 * 10) ** 0.5)
