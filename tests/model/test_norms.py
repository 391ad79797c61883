"""Norm and hash of the parameters, and the file of metrics."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp_train.loop import metrics


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two context-parallel ranks, which hold experts and shares of the optimizer apart."""
    for name in ("model", "expert_tensor_model_pipeline"):
        monkeypatch.setattr(metrics.mpu, f"get_{name}_parallel_group", lambda name=name: name)

    def data(with_context_parallel: bool = False) -> str:
        return "data and context" if with_context_parallel else "data"

    monkeypatch.setattr(metrics.mpu, "get_data_parallel_group", data)
    sizes = {"data": 1, "data and context": 2, "model": 1, "expert_tensor_model_pipeline": 2}
    monkeypatch.setattr(metrics.dist, "all_reduce", lambda sums, group: sums.mul_(sizes[group]))
    monkeypatch.setattr(metrics, "param_is_not_tensor_parallel_duplicate", lambda parameter: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


def test_experts_of_other_ranks_count(ranks: None) -> None:
    """Each of two expert-parallel ranks has one expert, and both have the other parameters."""
    chunk = torch.nn.Module()
    chunk.dense = torch.nn.Parameter(torch.tensor([2.0]))
    chunk.expert = torch.nn.Parameter(torch.tensor([3.0, 1.0]))
    chunk.expert.allreduce = False
    assert metrics.parameters_norm([chunk], from_main=False) == pytest.approx((4 + 2 * 10) ** 0.5)


def test_main_parameters_count_in_the_place_of_their_copies(ranks: None) -> None:
    """Whole ones on every rank, and shares of which each rank has its own, or none."""
    chunk = torch.nn.Module()
    chunk.whole = torch.nn.Parameter(torch.tensor([2.0]))
    chunk.whole.main_param = torch.tensor([3.0])
    chunk.shared = torch.nn.Parameter(torch.tensor([5.0, 7.0]))
    chunk.shared.main_param, chunk.shared.main_param_sharded = torch.tensor([4.0]), True
    chunk.elsewhere = torch.nn.Parameter(torch.tensor([9.0]))
    chunk.elsewhere.main_param, chunk.elsewhere.main_param_sharded = None, True
    assert metrics.parameters_norm([chunk], from_main=True) == pytest.approx((9 + 2 * 16) ** 0.5)
    copies = 4 + 25 + 49 + 81
    assert metrics.parameters_norm([chunk], from_main=False) == pytest.approx(copies**0.5)


def test_parts_of_tensor_and_pipeline_ranks_are_summed(
    ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"data and context": 1, "model": 3, "expert_tensor_model_pipeline": 2}
    monkeypatch.setattr(metrics.dist, "all_reduce", lambda sums, group: sums.mul_(sizes[group]))
    chunk = torch.nn.Module()
    chunk.part = torch.nn.Parameter(torch.tensor([2.0]))
    assert metrics.parameters_norm([chunk], from_main=False) == pytest.approx((3 * 4) ** 0.5)


def test_equal_bits_under_another_name_have_another_hash() -> None:
    one, other = torch.nn.Module(), torch.nn.Module()
    one.weight = torch.nn.Parameter(torch.ones(2))
    other.bias = torch.nn.Parameter(torch.ones(2))
    hashes = [metrics.parameters_sha256([chunk]) for chunk in (one, other, one)]
    assert hashes[0] == hashes[2] != hashes[1]


def test_a_line_of_the_metrics_can_be_read_at_once(tmp_path: Path) -> None:
    made = metrics.MetricsFile(str(tmp_path / "new" / "file"))
    made.write(loss=torch.tensor(2.0))
    assert (tmp_path / "new" / "file").read_text() == '{"loss": 2.0}\n'
    made.close()
    made.close()


def test_the_peak_of_a_process_is_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux tells KiB."""
    usage = SimpleNamespace(ru_maxrss=3)
    monkeypatch.setattr(metrics.resource, "getrusage", lambda who: usage)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    for device, expected in (("cpu", 3 * 1024), ("cuda", 7)):
        run: Any = SimpleNamespace(device=torch.device(device))
        assert metrics.peak_memory_bytes(run) == expected
