"""One job: what it builds, in which order it evaluates and leaves, what is closed at its end."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp_train.loop import job

Told = list[Any]
USUAL = {
    "dpp_slice_tokens": "off",
    "deepspeed_zero_stage": None, "skip_train": False, "metrics_file": None, "use_dpp": True,
    "dpp": "settings", "seed": 7, "dpp_plan": None, "trace": False, "trace_dir": "traces",
    "trace_iterations": None, "trace_interval": 5, "save": None, "save_hf": None,
    "tensorboard_dir": None,
}  # fmt: skip


class Schedule:
    """Notes how it was made, what it was told, and its calls."""

    def __init__(self, told: Told, settings: Any, **options: Any) -> None:
        self.made, self.told = (settings, options), told
        self.iteration, self.policy = -1, "none yet"
        self.announced: list[Any] = []
        self.calls: list[Any] = []
        self.peak_held = 3

    def announce(self, sizes: Any) -> None:
        self.announced.append(sizes)

    def __call__(self, **keywords: Any) -> str:
        self.calls.append((self.iteration, self.policy, keywords))
        return "losses"

    def __enter__(self) -> Schedule:
        return self

    def __exit__(self, *_: object) -> None:
        self.told.append("close schedule")


class Part:
    """A part that notes when it is closed, and what it writes."""

    def __init__(self, told: Told, name: str) -> None:
        self.told, self.name = told, name

    def close(self) -> None:
        self.told.append(f"close {self.name}")

    def __enter__(self) -> Part:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, **values: Any) -> None:
        self.told.append(f"write {sorted(values)}")


class Parts:
    """The parts of a job, which note what they do. A training calls ``steps`` with the schedule,
    and ends as ``complete`` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, complete: bool = True) -> None:
        self.told: Told = []
        self.schedules: list[Schedule] = []
        self.steps: Callable[[Any, Any], object] = lambda run, schedule: None
        self.training: Any = None
        self.first, self.cpu_support = False, None
        self._replace_parts(monkeypatch, complete=complete)
        self._replace_the_start(monkeypatch)

    def _replace_parts(self, monkeypatch: pytest.MonkeyPatch, *, complete: bool) -> None:
        told, patch = self.told, monkeypatch.setattr

        @contextlib.contextmanager
        def checkpointer(run: Any, trainee: Any, name: str) -> Iterator[Any]:
            yield SimpleNamespace(
                load=lambda: told.append(f"load {name}"),
                restore_random_state=lambda: told.append("random states"),
            )

        def iterators(*_: Any) -> Any:
            told.append("data")
            return SimpleNamespace(
                valid="valid", test="test", has_valid=True, has_test=True, eval_iters=1,
                close=lambda: told.append("close data"),
            )  # fmt: skip

        def schedule(*given: Any, **options: Any) -> Schedule:
            self.schedules.append(Schedule(told, *given, **options))
            return self.schedules[-1]

        def trainer(*, run: Any, schedule: Any, **_: Any) -> Any:
            def train() -> bool:
                told.append("train")
                self.steps(run, schedule)
                return complete

            return SimpleNamespace(train=train, evaluate=lambda *given: told.append(given[1:]))

        task = SimpleNamespace(build_chunk=None, forward_step=lambda run: None)
        patch(job, "TASKS", {"gpt": task})
        patch(job, "transformer_config", lambda args: None)
        patch(job, "build_trainee", lambda *given: SimpleNamespace(chunks=[]))
        patch(job, "Checkpointer", lambda *given: checkpointer(*given, "ours"))
        patch(job, "EngineCheckpointer", lambda *given: checkpointer(*given, "the engine's"))
        patch(job, "build_iterators", iterators)
        patch(job, "DppSchedule", schedule)
        patch(job, "StaticSchedule", schedule)
        patch(job, "print_peaks", lambda run, peaks: run.__setattr__("peaks", peaks))
        patch(job, "Trainer", trainer)
        patch(job, "Comparison", lambda *given: None)
        patch(job, "gather_hashes", lambda *given: {})
        for name in ("Diagnostics", "Writers", "ExitConditions", "MetricsFile"):
            patch(job, name, lambda _, name=name: Part(told, name))

    def _replace_the_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        told, patch = self.told, monkeypatch.setattr
        patch(job.settings, "summary", lambda *_: "")
        patch(job.settings, "save", lambda args, folder: told.append(("settings", str(folder))))
        patch(
            job, "trace_layout", lambda *_: SimpleNamespace(path=lambda folder: Path(folder, "x"))
        )
        patch(job, "note_progress", lambda run, text: told.append(text))
        patch(job, "export", lambda run: told.append("export"))
        patch(job, "initialize", lambda args, rank: self.joined(args, rank))
        for name in ("data", "pipeline_model", "tensor_model"):
            patch(job.mpu, f"get_{name}_parallel_rank", lambda: 0)
        monkeypatch.delenv("RUN_DIR", raising=False)

    def joined(self, args: Any, rank: int) -> Any:
        self.training = SimpleNamespace(
            args=args, rank=rank, is_first=self.first, is_last=True, iteration=40,
            cpu_support=self.cpu_support, device=torch.device("cuda", 1),
            say=lambda text: None, say_stage="say",
        )  # fmt: skip
        return self.training

    def run(self, *, rank: int = 1, **changes: Any) -> Told:
        args: Any = argparse.Namespace(**USUAL | changes)
        job.run_job(args, "gpt", rank, None)
        return self.told


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    return Parts(monkeypatch)


EVALUATED = [("valid",), ("test", "test")]


def test_random_states_are_set_when_all_is_built_and_everything_is_closed(parts: Parts) -> None:
    told = parts.run()
    assert told[:5] == ["Starting job", "load ours", "data", "random states", "train"]
    assert told[5:7] == EVALUATED
    assert told[7:] == [f"close {name}" for name in (
        "Diagnostics", "ExitConditions", "Writers", "schedule", "MetricsFile", "data")]  # fmt: skip


@pytest.mark.parametrize(("complete", "skips"), [(True, False), (False, False), (False, True)])
def test_a_training_that_was_ended_early_is_not_evaluated(
    complete: bool, skips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Parts(monkeypatch, complete=complete).run(skip_train=skips)
    assert ("train" in told) is not skips
    assert [each for each in told if isinstance(each, tuple)] == (
        EVALUATED if complete or skips else []
    )


@pytest.mark.parametrize(("stage", "name"), [(None, "ours"), (1, "the engine's")])
def test_deepspeeds_engine_reads_its_own_checkpoints_and_needs_no_schedule(
    stage: int | None, name: str, parts: Parts
) -> None:
    used: list[Any] = []
    parts.steps = lambda run, schedule: used.append(schedule)
    assert f"load {name}" in parts.run(deepspeed_zero_stage=stage)
    assert (used == [job.accumulate]) is (stage is not None)
    assert len(parts.schedules) == (stage is None)


@pytest.mark.parametrize("rank", [0, 5])
def test_all_ranks_give_their_schedule_the_runs_seed(rank: int, parts: Parts) -> None:
    parts.run(rank=rank)
    settings, options = parts.schedules[0].made
    assert (settings, options["seed"], options["log"]) == ("settings", 7, "say")
    assert options["recorder"] is parts.training.recorder


def test_a_training_step_has_the_number_of_the_run_and_an_evaluation_none(parts: Parts) -> None:
    """A resumed run goes on with its random states."""

    def steps(run: Any, call: Any) -> None:
        assert call(forward_only=False, policy="p", sizes=[1], x=1) == "losses"
        run.iteration = 41
        call(forward_only=True, x=2)
        call(forward_only=False, x=3)

    parts.steps = steps
    parts.run()
    (made,) = parts.schedules
    assert made.calls == [
        (40, "p", {"forward_only": False, "x": 1}),
        (40, "p", {"forward_only": True, "x": 2}),
        (41, None, {"forward_only": False, "x": 3}),
    ]
    assert made.announced == [[1]]
    assert parts.training.peaks == 3


def test_a_static_schedule_has_no_policy(parts: Parts) -> None:
    parts.steps = lambda run, call: call(forward_only=False)
    parts.run(use_dpp=False)
    assert parts.schedules[0].calls == [(40, "none yet", {"forward_only": False})]


def test_a_trace_has_the_flags_intervals_and_the_runs_device(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []

    def opening(*words: Any, **given: Any) -> Any:
        opened.append((words, given))
        return contextlib.nullcontext("recorder")

    monkeypatch.setattr(job, "open_recorder", opening)
    parts.run(trace=True, trace_dir="d", trace_iterations="3-4", rank=2)
    (((folder,), given),) = opened
    assert folder == "d" and given["iterations"] == job.parse_iterations("3-4")
    assert (given["rank"], given["interval"]) == (2, 5)
    assert given["device"] == torch.device("cuda", 1)
    assert parts.training.recorder == "recorder"


def test_settings_lie_in_the_runs_folder_or_beside_what_it_writes(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts.first = True
    monkeypatch.setattr(job, "open_recorder", lambda *_, **__: contextlib.nullcontext())
    places = {"save": "saved", "tensorboard_dir": "board", "trace": True, "trace_dir": "trace"}
    monkeypatch.setenv("RUN_DIR", "run")
    parts.run(**places)
    monkeypatch.delenv("RUN_DIR")
    for missing in ("save", "tensorboard_dir", "trace"):
        parts.run(**places)
        places[missing] = None
    parts.run(**places)
    folders = [each[1] for each in parts.told if each[0] == "settings"]
    assert folders == ["run", "saved", "board", "trace"]


def test_a_trace_has_a_second_name_unless_something_is_there(
    tmp_path: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts.first = True
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job, "open_recorder", lambda *_, **__: contextlib.nullcontext())
    trace, elsewhere = "run/traces/data-1", "other/data-2"
    for folder in (trace, elsewhere, "run/data-3", "benchmark/data-3"):
        Path(folder).mkdir(parents=True)
    monkeypatch.setenv("RUN_DIR", str(tmp_path / "run"))
    for folder in ("run/data-1", trace, trace, elsewhere, "run/data-3"):
        parts.run(trace=True, trace_dir=folder)
    made = sorted(Path("benchmark").iterdir())
    assert [path.name for path in made] == ["data-1", "data-3"]
    assert made[0].resolve() == Path(trace).absolute() and not made[1].is_symlink()


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_ranks_leave_together_and_one_exports(
    first: bool, joined: bool, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None closes connections while another is in its last collective. The process groups are gone
    before the export, which may take longer than their deadline."""
    told = parts.told
    parts.first = first
    parts.cpu_support = SimpleNamespace(close=lambda: told.append("close"))
    for name in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(job.dist, name, lambda name=name: told.append(name))
    monkeypatch.setattr(job.dist, "is_initialized", lambda: joined)
    parts.run(save_hf="new")
    assert told[told.index("close data") + 1 :] == [
        *["barrier", "destroy_process_group"] * joined, "close", *["export"] * first
    ]  # fmt: skip
