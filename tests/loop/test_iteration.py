"""The training loop around each iteration: saves, hooks, checks, measurement."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp_train.loop import loop
from megatron.dpp_train.loop.loop import Trainer
from tests.loop.test_trainer import OVERLAP, Told, alone, step, trainer

__all__ = ["alone"]


def with_hooks(told: Told, **changes: Any) -> tuple[Trainer, list[str]]:
    """A trainer that overlaps the gathers, and what ran while its forward hooks were off."""
    made, alone_with_whole = trainer(told, num_chunks=1, **OVERLAP, **changes), list[str]()

    def note(name: str) -> None:
        switched = [t[0] for t in told if "hook" in t[0]]
        assert switched and switched[-1] == "disable_forward_pre_hook", f"{name} read parts"
        alone_with_whole.append(f"{name} {made.run.iteration}")

    made.checkpointer.save = lambda: (
        note("save")
        or setattr(  # type: ignore[method-assign]
            made.checkpointer, "last_saved", made.run.iteration
        )
    )
    made.evaluate = lambda *given: note("evaluation")  # type: ignore[method-assign]
    return made, alone_with_whole


def test_whole_parameters_are_gathered_for_all_that_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the batch grows (3), where due, and at the end."""
    told: Told = []
    made, read = with_hooks(
        told, save="x", save_interval=4, eval_interval=2,
        check_weight_hash_across_dp_replicas_interval=5,
    )  # fmt: skip

    def compare(chunks: Any, *, cross_check: bool) -> bool:
        assert [t[0] for t in told if "hook" in t[0]][-1] == "disable_forward_pre_hook"
        read.append(f"comparison {made.run.iteration}")
        return True

    monkeypatch.setattr(loop, "check_param_hashes_across_dp_replicas", compare)
    made.train()
    assert read == ["evaluation 2", "save 3", "evaluation 4", "save 4", "comparison 5", "save 5"]
    assert [t for t in told if "hook" in t[0]][-1] == ("disable_forward_pre_hook", 0, True)


def test_saves_in_the_background_are_committed_between_iterations() -> None:
    told: Told = []
    made, polled = trainer(told, train_iters=3), list[int]()
    made.checkpointer.poll = lambda: polled.append(made.run.iteration)  # type: ignore[method-assign]
    made.train()
    assert polled == [0, 1, 2]


def test_a_step_is_profiled_from_before_its_start_and_compared_when_it_is_counted() -> None:
    told: list[Any] = []
    made: Any = trainer([], train_iters=2)
    made.diagnostics.before_step = lambda: told.append(("begin", made.run.iteration))
    made.comparison.after_iteration = lambda seconds, metrics: told.append(
        ("compare", made.run.iteration, metrics)
    )
    made.diagnostics.after_step = lambda step: told.append(("end", made.run.iteration))
    made.train()
    both = [[("begin", n), ("compare", n + 1, made.metrics), ("end", n + 1)] for n in (0, 1)]
    assert told == both[0] + both[1]


def test_losses_and_norms_are_checked_before_the_step_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradients of a step are looked at late, by the checks of this run."""
    told: Told = []
    made = trainer(told)

    @contextlib.contextmanager
    def late() -> Iterator[None]:
        told.append("late")
        yield
        told.append("collected")

    monkeypatch.setattr(made.checks, "late", late)
    monkeypatch.setattr(
        loop, "check_step", lambda run, checks: told.append(("step", checks is made.checks))
    )
    monkeypatch.setattr(loop, "check_norm", lambda run, norm: told.append(("norm", norm)))
    step(made)
    kinds = told[told.index("late") :]
    assert kinds == ["late", ("run", False, [0, 1]), "collected", "update", ("step", True),
                     ("norm", 1.0), ("rate", 4)]  # fmt: skip


@pytest.mark.parametrize("barrier", [True, False])
def test_the_optimizers_timer_waits_for_the_ranks_if_asked_to(barrier: bool) -> None:
    made: Any = trainer([], barrier_with_L1_time=barrier)
    timed: list[Any] = []

    def note(name: str, **options: Any) -> contextlib.AbstractContextManager[None]:
        timed.append((name, options))
        return contextlib.nullcontext()

    made.run.timed = note
    step(made)
    assert timed == [("optimizer", {"level": 1, "barrier": barrier})]


@pytest.mark.parametrize(
    ("level", "device", "emptied"), [(0, "cuda", 0), (1, "cuda", 1), (2, "cuda", 1), (1, "cpu", 0)]
)
def test_unused_memory_is_given_back_after_the_backwards(
    level: int, device: str, emptied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: Told = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("empty"))
    step(trainer(told, empty_unused_memory_level=level, device=device))
    assert told.count("empty") == emptied
    if emptied:
        assert told.index("empty") == told.index("update") - 1


def test_a_decoder_may_have_a_length_of_its_own() -> None:
    made, given = trainer([], decoder_seq_length=5), list[Any]()
    made.schedule = lambda **keywords: given.append(keywords["decoder_seq_length"]) or []
    step(made)
    made.evaluate("here", None)
    assert given == [5, 5, 5]


@pytest.mark.parametrize("skipped", [True, False])
def test_the_metrics_of_a_skipped_step_have_no_loss(
    skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = trainer([], metrics_file="x")
    made.trainee.optimizer.step = lambda: (not skipped, 1.0, None)
    written: list[dict[str, Any]] = []
    made.metrics.write = lambda **values: written.append(values)
    monkeypatch.setattr(loop, "mean_losses", lambda reduced: {"lm loss": torch.tensor(2.0)})
    monkeypatch.setattr(loop, "peak_memory_bytes", lambda run: 3)
    times = iter([1.0, 1.5])
    clock = SimpleNamespace(perf_counter=lambda: next(times), strftime=str)
    monkeypatch.setattr(loop, "time", clock)
    step(made)
    assert ("lm loss" in written[0]) is not skipped
    assert (written[0]["skipped"], written[0]["seconds"]) == (int(skipped), 0.5)
