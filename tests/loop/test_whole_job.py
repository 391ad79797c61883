"""One job: what it builds, in which order it evaluates and leaves, what is closed at its end."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp_train.loop import job


class Parts:
    """The parts of a job, which note what they do; a training ends as ``complete`` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, complete: bool = True) -> None:
        self.told: list[Any] = []
        told, patch = self.told, monkeypatch.setattr

        class Part:
            def __init__(self, name: str) -> None:
                self.name = name

            def close(self) -> None:
                told.append(f"close {self.name}")

            def __enter__(self) -> Part:
                return self

            def __exit__(self, *_: object) -> None:
                self.close()

            def write(self, **values: Any) -> None:
                told.append(f"write {sorted(values)}")

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

        trainer = SimpleNamespace(
            train=lambda: told.append("train") or complete,
            evaluate=lambda *given: told.append(given[1:]),
        )
        task = SimpleNamespace(build_chunk=None, forward_step=lambda run: None)
        patch(job, "TASKS", {"gpt": task})
        patch(job, "transformer_config", lambda args: None)
        patch(job, "build_trainee", lambda *given: SimpleNamespace(chunks=[]))
        patch(job, "Checkpointer", lambda *given: checkpointer(*given, "ours"))
        patch(job, "EngineCheckpointer", lambda *given: checkpointer(*given, "the engine's"))
        patch(job, "build_iterators", iterators)
        patch(job, "_schedule", lambda run: contextlib.nullcontext())
        patch(job, "Trainer", lambda **parts: trainer)
        patch(job, "Comparison", lambda *given: None)
        patch(job, "gather_hashes", lambda *given: {})
        for name in ("Diagnostics", "Writers", "ExitConditions", "MetricsFile"):
            patch(job, name, lambda _, name=name: Part(name))

    def run(self, **changes: Any) -> list[Any]:
        usual = {"deepspeed_zero_stage": None, "skip_train": False, "metrics_file": None}
        args = argparse.Namespace(**usual | changes)
        run: Any = SimpleNamespace(args=args, is_last=True, iteration=3, say=lambda text: None)
        with contextlib.ExitStack() as stack:
            job._train(run, "gpt", stack)
        return self.told


EVALUATED = [("valid",), ("test", "test")]


def test_random_states_are_set_when_all_is_built_and_everything_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Parts(monkeypatch).run()
    assert told[:5] == ["load ours", "data", "random states", "train", *EVALUATED[:1]]
    assert told[5] == EVALUATED[1]
    closed = [f"close {name}" for name in ("Diagnostics", "ExitConditions", "Writers",
                                           "MetricsFile", "data")]  # fmt: skip
    assert told[6:] == closed


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
def test_deepspeeds_engine_reads_its_own_checkpoints(
    stage: int | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Parts(monkeypatch).run(deepspeed_zero_stage=stage)[0] == f"load {name}"


def test_a_trace_has_the_flags_intervals_and_the_runs_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(job, "open_recorder", lambda *words, **given: opened.append((words, given)))
    args = argparse.Namespace(trace=True, trace_dir="d", trace_iterations="3-4", trace_interval=5)
    run: Any = SimpleNamespace(args=args, rank=2, device=torch.device("cuda", 1))
    job._recorder(run, "layout")  # type: ignore[arg-type]
    (((folder,), given),) = opened
    assert folder == "d" and given["iterations"] == job.parse_iterations("3-4")
    assert (given["rank"], given["layout"], given["interval"]) == (2, "layout", 5)
    assert given["device"] == torch.device("cuda", 1)


def test_settings_lie_in_the_runs_folder_or_beside_what_it_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders: list[str] = []
    monkeypatch.setattr(job.settings, "save", lambda args, folder: folders.append(str(folder)))
    monkeypatch.setenv("RUN_DIR", "run")
    args = argparse.Namespace(save="saved", tensorboard_dir="board", trace=True)
    run: Any = SimpleNamespace(args=args, say=lambda text: None)
    job._save_settings(run, Path("trace"))
    monkeypatch.delenv("RUN_DIR")
    for missing in ("save", "tensorboard_dir", "trace"):
        job._save_settings(run, Path("trace"))
        setattr(args, missing, None)
    job._save_settings(run, Path("trace"))
    assert folders == ["run", "saved", "board", "trace"]


def test_ranks_leave_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """None closes connections while another is in its last collective."""
    told: list[str] = []
    for name in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(job.dist, name, lambda name=name: told.append(name))
    monkeypatch.setattr(job.dist, "is_initialized", lambda: True)
    support = SimpleNamespace(close=lambda: told.append("close"))
    job._leave(SimpleNamespace(cpu_support=support))  # type: ignore[arg-type]
    assert told == ["barrier", "destroy_process_group", "close"]
    monkeypatch.setattr(job.dist, "is_initialized", lambda: False)
    job._leave(SimpleNamespace(cpu_support=None))  # type: ignore[arg-type]
    assert len(told) == 3


@pytest.mark.parametrize("first", [True, False])
def test_one_rank_notes_the_start_and_exports(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process groups are gone before the export, which may take longer than their deadline."""
    told: list[Any] = []
    for name in ("_leave", "export", "_train", "_save_settings", "_link_trace"):
        monkeypatch.setattr(job, name, lambda *_, name=name: told.append(name))
    monkeypatch.setattr(job, "note_progress", lambda run, text: told.append(text))
    args = SimpleNamespace(save_hf="new", trace=False, dpp_plan=None, trace_dir=".")
    run: Any = SimpleNamespace(args=args, is_first=first, say=lambda _: None)
    monkeypatch.setattr(job, "initialize", lambda *_: run)
    monkeypatch.setattr(job.settings, "summary", lambda *_: "")
    monkeypatch.setattr(job, "trace_layout", lambda *_: SimpleNamespace(path=Path))
    for name in ("data", "pipeline_model", "tensor_model"):
        monkeypatch.setattr(job.mpu, f"get_{name}_parallel_rank", lambda: 0)
    job.run_job(args, "gpt", 0, None)  # type: ignore[arg-type]
    assert told == [*["_save_settings", "_link_trace"] * first, "Starting job", "_train", "_leave",
                    *["export"] * first]  # fmt: skip
