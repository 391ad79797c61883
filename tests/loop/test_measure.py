"""The comparison of an estimate with a run: when it is made, and of which ranks."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp_train.loop import measure
from megatron.dpp_train.loop.measure import Comparison


def comparison(*, begun: int = 0, train_iters: int = 100, estimate: bool = True) -> Comparison:
    made = Comparison.__new__(Comparison)
    args = argparse.Namespace(estimate=False, train_iters=train_iters, world_size=3)
    run: Any = SimpleNamespace(
        args=args, iteration=begun, device=torch.device("cpu"), said=[], rank=0
    )
    run.say = run.said.append
    made.__init__(run, SimpleNamespace(), "gpt")  # type: ignore[misc, arg-type]
    if estimate:
        memory = SimpleNamespace(state=100, activations=30, workspace=10)
        made._found = SimpleNamespace(  # type: ignore[assignment]
            ranks=[memory, memory], seconds=2.0, flops_per_device=6e12, bubble=0.25
        )
    return made


@pytest.mark.parametrize(
    ("begun", "train_iters", "at"), [(0, 100, 2), (50, 100, 52), (0, 2, 1), (99, 100, 99)]
)
def test_an_iteration_after_the_warm_up_is_measured(begun: int, train_iters: int, at: int) -> None:
    made = comparison(begun=begun, train_iters=train_iters)
    run: Any = made._run
    due = []
    for run.iteration in range(begun, train_iters):
        if made._due:
            due.append(run.iteration)
    assert due == [at]
    assert not comparison(estimate=False)._due


RANKS = [
    {"stage": 0, "state": 80, "peak": 130, "seconds": 1.0},
    {"stage": 0, "state": 90, "peak": 120, "seconds": 4.0},
    {"stage": 1, "state": 200, "peak": None, "seconds": 3.0},
]


def test_a_stages_largest_rank_is_compared() -> None:
    found: Any = comparison()._found
    assert measure._rows(found, RANKS) == [
        ("stage 0, state", 100, 90), ("stage 0, activations", 40, 50),
        ("stage 1, state", 100, 200), ("stage 1, activations", 40, None),
        ("seconds", 2.0, 4.0),
    ]  # fmt: skip


def test_the_comparison_is_said_once_with_the_rate_of_the_slowest_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = comparison()
    run: Any = made._run
    written: list[dict[str, Any]] = []
    metrics: Any = SimpleNamespace(write=lambda **values: written.append(values))
    monkeypatch.setattr(measure.mpu, "get_pipeline_model_parallel_rank", lambda: 1)
    monkeypatch.setattr(measure, "state_bytes", lambda trainee: 200)

    def gather(ranks: list[Any], mine: dict[str, Any]) -> None:
        assert mine == {**RANKS[2], "stage": 1}
        ranks[:] = RANKS

    monkeypatch.setattr(measure.dist, "all_gather_object", gather)
    for run.iteration in range(6):
        made.after_iteration(3.0, metrics)
    assert len(run.said) == len(written) == 1
    assert "useful work: 3 TFLOP/s per device" in run.said[0]  # 6 TFLOP/s for 2 s, done in 4 s
    assert written[0]["iteration"] == 3 and written[0]["bubble"] == 0.25
    assert written[0]["estimate"]["seconds"] == [2.0, 4.0]


def test_the_error_is_that_of_the_estimate() -> None:
    assert measure._line("seconds", 1.5, 1.0).endswith(
        "1500.0 ms estimated, 1000.0 ms measured (+50.0%)"
    )
    assert "not measured without a GPU" in measure._line("stage 0, activations", 1.0, None)
    assert measure._line("stage 0, state", 5.0, 0).endswith("(-)")


def test_the_state_of_a_rank_is_its_weights_gradients_moments_and_copies() -> None:
    weight = torch.nn.Parameter(torch.zeros(8))  # 32 bytes
    chunk = torch.nn.Module()
    chunk.weight = weight
    buffered: Any = SimpleNamespace(
        parameters=lambda: [weight], buffers=[SimpleNamespace(grad_data=torch.zeros(100))]
    )
    moments = {"exp_avg": torch.zeros(8), "step": torch.zeros(()), "kind": "adam"}

    def optimizer(**copies: Any) -> Any:
        return SimpleNamespace(optimizer=SimpleNamespace(state={weight: moments}), **copies)

    def total(chunk: Any, *optimizers: Any) -> int:
        one: Any = optimizers[0]
        if len(optimizers) > 1:
            one = SimpleNamespace(chained_optimizers=list(optimizers))
        return measure.state_bytes(SimpleNamespace(chunks=[chunk], optimizer=one))  # type: ignore[arg-type]

    assert total(chunk, optimizer()) == 32 + 32 + 32
    assert total(buffered, optimizer()) == 32 + 400 + 32
    assert total(chunk, optimizer(), optimizer()) == 32 + 32 + 64
    plain = optimizer(fp32_from_float16_groups=[[torch.zeros(4)]])
    shared = optimizer(shard_fp32_from_float16_groups=[[torch.zeros(2), None]])
    assert total(chunk, plain) == 96 + 16 and total(chunk, shared) == 96 + 8


def test_the_gradients_of_deepspeeds_engine_are_those_that_it_tells() -> None:
    weight = torch.zeros(8)
    chunk = SimpleNamespace(parameters=lambda: [weight], gradient_bytes=lambda: 7)
    optimizer = SimpleNamespace(optimizer=SimpleNamespace(state={}))
    trainee: Any = SimpleNamespace(chunks=[chunk], optimizer=optimizer)
    assert measure.state_bytes(trainee) == 32 + 7


class Sharded(torch.Tensor):
    """Stands for a DTensor, whose size is that of all ranks' parts together."""

    def to_local(self) -> torch.Tensor:
        return torch.zeros(len(self) // 4)


def test_only_a_ranks_own_part_of_a_tensor_is_its_state() -> None:
    """Fully sharded data parallelism keeps weights, gradients and moments in parts."""
    chunk = SimpleNamespace(parameters=lambda: [torch.zeros(8).as_subclass(Sharded)])
    state = {"weight": {"exp_avg": torch.zeros(16).as_subclass(Sharded)}}
    optimizer = SimpleNamespace(optimizer=SimpleNamespace(state=state))
    trainee: Any = SimpleNamespace(chunks=[chunk], optimizer=optimizer)
    assert measure.state_bytes(trainee) == 8 + 8 + 16


def test_a_run_without_a_gpu_is_estimated_for_ranks_that_share_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "cpu_device", lambda ranks: f"{ranks} ranks")
    run: Any = SimpleNamespace(args=SimpleNamespace(world_size=3), device=torch.device("cpu"))
    found: Any = measure._device(run)
    assert found == "3 ranks"


def test_a_gpu_is_estimated_by_the_name_and_memory_of_the_ranks_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "gpu_device", lambda name, memory: (name, memory))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a GPU as {device}")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties",
        lambda device: SimpleNamespace(total_memory=device.index),
    )  # fmt: skip
    run: Any = SimpleNamespace(device=torch.device("cuda", 3))
    found: Any = measure._device(run)
    assert found == ("a GPU as cuda:3", 3)


@pytest.mark.parametrize(("device", "at"), [("cpu", 2), ("cuda", 5)])
def test_graphs_are_captured_before_the_measured_iteration_and_only_a_gpu_has_a_peak(
    device: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    args = argparse.Namespace(estimate=False, train_iters=100)
    run: Any = SimpleNamespace(args=args, iteration=0, device=torch.device(device))
    made: Any = Comparison(run, SimpleNamespace(), "gpt")  # type: ignore[arg-type]
    made._found = "an estimate"
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: told.append(run.iteration))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 600)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    for run.iteration in range(10):
        assert made._due is (run.iteration == at)
        with made.memory():
            pass
    assert (told, made._peak) == (([], None) if device == "cpu" else ([at], 600))


@pytest.mark.parametrize(("device", "on_gpu"), [("cuda", True), ("cpu", False)])
@pytest.mark.parametrize(("per_node", "expected"), [("2", 2), (None, 3)])
def test_a_run_is_estimated_for_its_devices_and_ranks_of_a_node(
    device: str, on_gpu: bool, per_node: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(measure, "shape_of", lambda args, **given: asked.append(given))
    monkeypatch.setattr(measure, "estimate", lambda shape, device: None)
    monkeypatch.setattr(measure, "lines", lambda found: ["an estimate"])
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if per_node:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", per_node)
    args = argparse.Namespace(estimate=True, train_iters=5, world_size=3, device=device)
    said: list[str] = []
    run: Any = SimpleNamespace(args=args, iteration=0, device=torch.device("cpu"), say=said.append)
    Comparison(run, SimpleNamespace(), "bert")  # type: ignore[arg-type]
    assert asked == [{"on_gpu": on_gpu, "arch": "bert", "per_node": expected}]
    assert "an estimate" in said[0]


def test_the_peak_is_that_of_one_step_with_the_memory_of_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch counts what a graph holds as free."""
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 1000, "allocated_size": 1},
        {"segment_pool_id": (0, 7), "total_size": 50, "allocated_size": 10},
        {"total_size": 2000, "allocated_size": 1},
    ]
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: told.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 600)
    made: Any = comparison()
    made._run.device = torch.device("cuda")
    for made._run.iteration in range(4):
        with made.memory():
            told.append(f"step {made._run.iteration}")
    assert told == ["step 0", "step 1", "reset", "step 2", "step 3"]
    assert made._peak == 600 + 40
