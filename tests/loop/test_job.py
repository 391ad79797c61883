"""The schedule of a job: its random states follow the run, evaluations leave it alone."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.dpp_train.loop import job


class Schedule:
    """Notes how it was made, what it was told, and its calls."""

    def __init__(self, settings: Any, **options: Any) -> None:
        self.made = (settings, options)
        self.iteration, self.policy = -1, "none yet"
        self.announced: list[Any] = []
        self.calls: list[Any] = []
        self.peak_held, self.ended = 3, False

    def announce(self, sizes: Any) -> None:
        self.announced.append(sizes)

    def __call__(self, **keywords: Any) -> str:
        self.calls.append((self.iteration, self.policy, keywords))
        return "losses"

    def __enter__(self) -> Schedule:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = True


def run_of(*, rank: int = 1, **changes: Any) -> Any:
    args = argparse.Namespace(
        **{"deepspeed_zero_stage": None, "use_dpp": True, "dpp": "settings", "seed": 7} | changes
    )
    return SimpleNamespace(args=args, rank=rank, iteration=40, recorder="recorder", say_stage="say")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Schedule]:
    found: list[Schedule] = []

    def make(*given: Any, **options: Any) -> Schedule:
        found.append(Schedule(*given, **options))
        return found[-1]

    monkeypatch.setattr(job, "DppSchedule", make)
    monkeypatch.setattr(job, "StaticSchedule", make)
    monkeypatch.setattr(job, "print_peaks", lambda run, peaks: run.__setattr__("peaks", peaks))
    return found


@pytest.mark.parametrize("rank", [0, 5])
def test_all_ranks_give_their_schedule_the_runs_seed(made: list[Schedule], rank: int) -> None:
    with job._schedule(run_of(rank=rank)):
        pass
    options = {"recorder": "recorder", "seed": 7, "log": "say"}
    assert made[0].made == ("settings", options) and made[0].ended


def test_a_training_step_has_the_number_of_the_run_and_an_evaluation_none(
    made: list[Schedule],
) -> None:
    """A resumed run goes on with its random states."""
    run = run_of()
    with job._schedule(run) as call:
        assert call(forward_only=False, policy="p", sizes=[1], x=1) == "losses"
        run.iteration = 41
        call(forward_only=True, x=2)
        call(forward_only=False, x=3)
    assert made[0].calls == [
        (40, "p", {"forward_only": False, "x": 1}),
        (40, "p", {"forward_only": True, "x": 2}),
        (41, None, {"forward_only": False, "x": 3}),
    ]
    assert made[0].announced == [[1]]
    assert run.peaks == 3


def test_a_static_schedule_has_no_policy(made: list[Schedule]) -> None:
    with job._schedule(run_of(use_dpp=False)) as call:
        call(forward_only=False)
    assert made[0].calls == [(40, "none yet", {"forward_only": False})]


def test_an_engine_needs_no_schedule(made: list[Schedule]) -> None:
    with job._schedule(run_of(deepspeed_zero_stage=1)) as call:
        assert call is job.accumulate
    assert not made


def test_a_trace_has_a_second_name_unless_something_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    args: Any = argparse.Namespace(trace=True)
    trace, elsewhere = Path("run/traces/data-1"), Path("other/data-2")
    for folder in (trace, elsewhere, Path("run/data-3"), Path("benchmark/data-3")):
        folder.mkdir(parents=True)
    monkeypatch.setenv("RUN_DIR", str(tmp_path / "run"))
    for folder in (trace, trace, elsewhere, Path("run/data-3")):
        job._link_trace(args, folder)
    made = sorted(Path("benchmark").iterdir())
    assert [path.name for path in made] == ["data-1", "data-3"]
    assert made[0].resolve() == trace.absolute() and not made[1].is_symlink()
