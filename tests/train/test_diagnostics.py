"""Profiles of some iterations, and warnings of losses that jump."""

from __future__ import annotations

import argparse
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.train.diagnostics import Diagnostics, _Profile
from megatron.dpp.train.logs import StepResult


def run_of(said: list[str], **changes: Any) -> Any:
    args = {
        "profile": False, "train_iters": 20, "logging_level": None, "train_sync_interval": None,
        "log_memory_interval": None, "check_for_spiky_loss": True, "profile_ranks": [0],
        "profile_step_start": 2, "profile_step_end": 4,
    }  # fmt: skip
    return SimpleNamespace(
        args=argparse.Namespace(**args | changes), rank=0, iteration=0, is_first=False,
        is_last=True, say_last=said.append,
    )  # fmt: skip


@pytest.mark.parametrize(("ranks", "expected"), [([0], ["open 2", "closed 4"]), ([1], [])])
def test_a_profile_holds_the_asked_iterations_once(
    ranks: list[int], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    profile = _Profile(run_of([], profile_ranks=ranks))

    def start(_: Any) -> contextlib.ExitStack:
        told.append(f"open {now}")
        stack = contextlib.ExitStack()
        stack.callback(lambda: told.append(f"closed {now}"))
        return stack

    monkeypatch.setattr(_Profile, "_start", start)
    for now in (0, 1, 2, 3, 4, 5, 2, 3):
        profile.before(now)
    profile.close()
    assert told == expected


def test_a_loss_above_ten_times_all_before_it_is_told_and_a_skipped_step_has_none() -> None:
    said: list[str] = []
    run = run_of(said)
    with contextlib.closing(Diagnostics(run)) as made:
        for loss, skipped in ((2.0, False), (900.0, True), (20.0, False), (200.5, False)):
            run.iteration += 1
            losses = {"lm loss": torch.tensor(loss)}
            made.after_step(StepResult(losses=losses, skipped=skipped, grad_norm=None))
    assert len(said) == 1
    assert "iteration 4: lm loss 2.005000E+02 is more than 10 times the largest of the 2" in said[0]
