"""The values that a log writes for TensorBoard and others, and when it resets timers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp_train.loop import logs
from megatron.dpp_train.loop.writers import Writers
from megatron.dpp_train.options.run_config import Settings
from tests.loop.test_log import Log


class Board:
    """TensorBoard's writer; keeps what it is given."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.written: list[tuple[str, Any, int]] = []

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        self.written.append((name, value, step))

    def close(self) -> None:
        self.written.append(("closed", None, 0))


def test_values_are_written_over_iterations_and_over_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", Board)
    args = Settings.of({"tensorboard_dir": "there", "tensorboard_queue_size": 3})
    run: Any = SimpleNamespace(args=args, is_last=True, iteration=7, consumed_train_samples=56)
    writers = Writers(run)
    board: Any = writers.board
    assert board.options == {"log_dir": "there", "max_queue": 3}
    writers.add("a", 1.0)
    writers.add("b", 2.0, samples=True)
    writers.close()
    assert board.written == [
        ("a", 1.0, 7), ("b", 2.0, 7), ("b vs samples", 2.0, 56), ("closed", None, 0)
    ]  # fmt: skip
    assert Writers(SimpleNamespace(args=args, is_last=False)).board is None  # type: ignore[arg-type]


def test_a_line_writes_its_throughput_and_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Log(monkeypatch, log_interval=2)
    log.run.recorder = SimpleNamespace(scalars=lambda: {"bubble": 0.25})
    log.add(3.0, 5.0)
    found = {name: value for _, name, value in log.written}
    assert found["throughput"] == 20 * 2 / 4 and found["bubble"] == 0.25
    assert {"loss-scale", "world-size"}.isdisjoint(found)
    log = Log(monkeypatch, log_loss_scale_to_tensorboard=True, log_world_size_to_tensorboard=True)
    log.add(3.0, 5.0)
    found = {name: value for _, name, value in log.written}
    assert (found["loss-scale"], found["world-size"]) == (1.0, 4)


def test_only_a_loss_above_zero_has_a_place_in_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Megatron-LM's."""
    log = Log(monkeypatch, log_interval=1)
    log.add(-2.0, 0.0, 2.0)
    assert ["lm loss" in line for line in log.lines] == [False, False, True]


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("to_board", [True, False])
def test_timers_are_reset_once_by_the_line_that_prints_them(
    level: int, to_board: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line that keeps its totals keeps them, and TensorBoard's values come before both."""
    told: list[Any] = []
    log = Log(monkeypatch, log_timers_to_tensorboard=to_board, timing_log_level=level)

    class Timers:
        def __call__(self, name: str) -> Any:
            return SimpleNamespace(elapsed=lambda **_: 6.0)

        def write(self, names: Any, board: Any, at: int, *, normalizer: int, reset: bool) -> None:
            told.append(("write", board, at, normalizer, reset))

        def get_all_timers_string(self, names: Any, *, normalizer: int, reset: bool) -> str | None:
            told.append(("print", normalizer, reset))
            return None if reset else "times"

    log.run.timers, log.run.say_last = Timers(), told.append
    writers: Any = log.made.writers
    writers.board = "board"
    for at, count, reset in ((1, 1, False), (3, 3, True)):
        told.clear()
        log.add(*[1.0] * (at - log.run.iteration))
        written = [("write", "board", at, count, False)] * to_board
        printed = [("print", count, reset), *["times"] * (not reset)]
        assert told == written + (printed if level else [])


def test_memory_is_written_by_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = {
        "reserved_bytes.all.current": 1, "allocated_bytes.all.current": 2,
        "allocated_bytes.all.peak": 3, "allocation.all.current": 4,
    }  # fmt: skip
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: statistics)
    names = ["mem-reserved-bytes", "mem-allocated-bytes", "mem-max-allocated-bytes",
             "mem-allocated-count"]  # fmt: skip
    for device, asked in (("cuda", True), ("cpu", True), ("cuda", False)):
        log = Log(monkeypatch, log_memory_to_tensorboard=asked, tensorboard_log_interval=1)
        log.run.device = torch.device(device)
        log.add(1.0)
        found = {name: value for _, name, value in log.written if name.startswith("mem-")}
        expected = dict(zip(names, (1, 2, 3, 4), strict=True))
        assert found == (expected if device == "cuda" and asked else {})


@pytest.mark.parametrize("perplexity", [True, False])
def test_an_evaluation_writes_its_perplexity_if_asked_to(perplexity: bool) -> None:
    written: list[tuple[str, bool]] = []
    run: Any = SimpleNamespace(
        args=Settings.of({"log_validation_ppl_to_tensorboard": perplexity}),
        say_last=lambda text: None,
    )
    writers: Any = SimpleNamespace(
        add=lambda name, value, *, samples=False: written.append((name, samples)),
        flush=lambda: None,
    )
    logs.print_evaluation(run, "here", {"lm loss": torch.tensor(1.0)}, writers)
    expected = ["lm loss validation", *["lm loss validation ppl"] * perplexity]
    assert written == [(name, True) for name in expected]


@pytest.mark.parametrize("held", [[3.0, 1.5], [0.0, 0.0]])
def test_peaks_are_those_of_the_ranks_of_a_pipeline(
    held: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other replicas have peaks of their own."""

    def gather(peaks: list[Any], own: float, *, group: str) -> None:
        assert (own, group) == (held[0], "pipeline")
        peaks[:] = held

    monkeypatch.setattr(
        logs.parallel_state, "get_pipeline_model_parallel_group", lambda: "pipeline"
    )
    monkeypatch.setattr(logs.dist, "get_world_size", lambda group: {"pipeline": 2}[group])
    monkeypatch.setattr(logs.dist, "all_gather_object", gather)
    said: list[str] = []
    logs.print_peaks(SimpleNamespace(say=said.append), held[0])  # type: ignore[arg-type]
    told = "dynamic pipeline: most chunk activations held: pipeline rank 0 3, pipeline rank 1 1.5"
    assert said == ([told] if any(held) else [])
