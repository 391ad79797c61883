"""The comparison of an estimate with a run: when it is made, and of which ranks."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp_train.loop import measure
from megatron.dpp_train.loop.measure import Comparison

RANKS = [
    {"stage": 0, "state": 80, "peak": 130, "seconds": 1.0},
    {"stage": 0, "state": 90, "peak": 120, "seconds": 4.0},
    {"stage": 1, "state": 0, "peak": None, "seconds": 3.0},
]


class Compared:
    """A run's comparison; notes what it says and writes, and what this rank measured."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, begun: int = 0, train_iters: int = 100,
        estimate: bool = True, device: str = "cpu",
    ) -> None:  # fmt: skip
        self.said: list[str] = []
        self.written: list[dict[str, Any]] = []
        self.mine: list[dict[str, Any]] = []
        memory = SimpleNamespace(state=100, activations=20, keys=10, workspace=10)
        found = SimpleNamespace(
            ranks=[memory, memory], seconds=2.0, flops_per_device=6e12, bubble=0.25
        )

        def gather(ranks: list[Any], mine: dict[str, Any]) -> None:
            self.mine.append(mine)
            ranks[:] = RANKS

        self.asked: list[Any] = []
        monkeypatch.setattr(measure, "shape_of", lambda args, **given: self.asked.append(given))
        monkeypatch.setattr(measure, "estimate", lambda shape, device: (
            self.asked.append(device) or found
        ))  # fmt: skip
        monkeypatch.setattr(measure, "lines", lambda found: ["an estimate"])
        monkeypatch.setattr(measure.mpu, "get_pipeline_model_parallel_rank", lambda: 1)
        monkeypatch.setattr(measure, "state_bytes", lambda trainee: 200)
        monkeypatch.setattr(measure.dist, "all_gather_object", gather)
        monkeypatch.setattr(measure, "cpu_device", lambda ranks: f"{ranks} ranks")
        monkeypatch.setattr(measure, "gpu_device", lambda name, memory: (name, memory))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a GPU as {device}")
        monkeypatch.setattr(
            torch.cuda, "get_device_properties",
            lambda device: SimpleNamespace(total_memory=device.index),
        )  # fmt: skip
        args = argparse.Namespace(
            estimate=estimate, train_iters=train_iters, world_size=3, device=device
        )
        self.run: Any = SimpleNamespace(
            args=args, iteration=begun,
            device=torch.device("cuda:3" if device == "cuda" else "cpu"),
            say=self.said.append,
        )  # fmt: skip
        self.made = Comparison(self.run, SimpleNamespace(), "bert")  # type: ignore[arg-type]
        self.first = self.said.copy()
        self.said.clear()

    def iterate(self, last: int) -> list[int]:
        """Iterates until ``last``; the iterations after which it said something."""
        due = []
        for number in range(self.run.iteration, last):
            self.run.iteration = number
            with self.made.memory():
                pass
            self.run.iteration = number + 1
            before = len(self.said)
            self.made.after_iteration(3.0, SimpleNamespace(  # type: ignore[arg-type]
                write=lambda **values: self.written.append(values)
            ))  # fmt: skip
            due += [number] * (len(self.said) - before)
        return due


@pytest.mark.parametrize(
    ("begun", "train_iters", "at"), [(0, 100, 2), (50, 100, 52), (0, 2, 1), (99, 100, 99)]
)
def test_an_iteration_after_the_warm_up_is_measured(
    begun: int, train_iters: int, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = Compared(monkeypatch, begun=begun, train_iters=train_iters)
    assert compared.iterate(train_iters) == [at]
    asked_for_none = Compared(monkeypatch, estimate=False)
    assert asked_for_none.iterate(9) == asked_for_none.first == []


def test_a_stages_largest_rank_is_compared_with_the_rate_of_the_slowest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = Compared(monkeypatch)
    compared.iterate(6)
    assert compared.mine == [{"stage": 1, "state": 200, "peak": None, "seconds": 3.0}]
    (written,) = compared.written
    assert written["estimate"] == {
        "stage 0, state": [100, 90], "stage 0, activations": [40, 50], "stage 1, state": [100, 0],
        "stage 1, activations": [40, None], "seconds": [2.0, 4.0],
    }  # fmt: skip
    assert written["iteration"] == 3 and written["bubble"] == 0.25
    (text,) = compared.said
    assert "useful work: 3 TFLOP/s per device" in text  # 6 TFLOP/s for 2 s, done in 4 s
    assert "2000.0 ms estimated, 4000.0 ms measured (-50.0%)" in text
    lines = text.splitlines()
    assert lines[3].endswith("(-)") and "not measured without a GPU" in lines[4]


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


@pytest.mark.parametrize(("device", "at"), [("cpu", 2), ("cuda", 5)])
def test_graphs_are_captured_before_the_measured_iteration_and_only_a_gpu_has_a_peak(
    device: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak is that of one step, with what graphs hold, which PyTorch counts as free."""
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 1000, "allocated_size": 1},
        {"segment_pool_id": (0, 7), "total_size": 50, "allocated_size": 10},
        {"total_size": 2000, "allocated_size": 1},
    ]
    compared, reset = Compared(monkeypatch, device=device), list[int]()
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda: reset.append(compared.run.iteration)
    )
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 600)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert compared.iterate(10) == [at]
    assert reset == ([] if device == "cpu" else [at])
    assert compared.mine[0]["peak"] == (None if device == "cpu" else 640)


@pytest.mark.parametrize(
    ("device", "expected"), [("cuda", ("a GPU as cuda:3", 3)), ("cpu", "3 ranks")]
)
@pytest.mark.parametrize(("per_node", "ranks"), [("2", 2), (None, 3)])
def test_a_run_is_estimated_for_its_own_device_and_the_ranks_of_a_node(
    device: str, expected: Any, per_node: str | None, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks without a GPU share the machine."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if per_node:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", per_node)
    compared = Compared(monkeypatch, device=device)
    assert compared.asked == [
        {"on_gpu": device == "cuda", "arch": "bert", "per_node": ranks}, expected
    ]  # fmt: skip
    assert "an estimate" in compared.first[0]
