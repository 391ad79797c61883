"""equality_worker.py's cases in ways that a case gives, or with races.

race_worker.py JSON. ``ways`` of a case are those of its training steps, "own", "fused" or "split";
without them the schedule races. ``captures``: graphs are captured, and run again in each replay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from tests.runtime import equality_worker

from megatron.dpp import DppSchedule  # isort: skip
from megatron.dpp.runtime import dynamic
from megatron.dpp.runtime.race import FUSED, SPLIT, Race
from megatron.dpp.runtime.timer import TaskTimer
from tests.runtime.losses import Rerun

CASE: dict[str, Any] = {}
REPLAYS: list[Rerun] = []
WAYS = {"own": None, "fused": FUSED, "split": SPLIT}
PLAIN_TRAIN, PLAIN_RACE = equality_worker.train, Race


class Forced(Race):
    """Takes the ways of the case, one after the other."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._left = iter(CASE["ways"])
        self._way: Any = SPLIT

    @contextlib.contextmanager
    def step(self, call: Any, keywords: Any) -> Iterator[Any]:
        if not call.forward_only:
            self._way = WAYS[next(self._left)]
            if self._way is None:
                self._free()
        yield self._way


class Heard(DppSchedule):
    """Keeps what it logs."""

    def __init__(self, *given: Any, log: Any, **more: Any) -> None:
        self.said: list[str] = []
        capture = partial(Rerun, replays=REPLAYS) if CASE.get("captures") else None
        super().__init__(
            *given, log=lambda line: (self.said.append(line), log(line)), capture=capture, **more
        )


def train(case: dict[str, Any], schedule: Any) -> dict[str, Any]:
    CASE.clear()
    CASE.update(case)
    REPLAYS.clear()
    result = PLAIN_TRAIN(case, schedule)
    if isinstance(schedule, Heard) and ("ways" in case or "names" in case):
        lines = [line for line in schedule.said if " raced: " in line]
        assert len(lines) == case.get("raced", 0), schedule.said
        for line in lines:
            for name in case["names"]:
                assert f"{name} " in line, line
        assert bool(REPLAYS) == bool(case.get("captures"))
    return result


def race(*given: Any) -> Race:
    return (Forced if "ways" in CASE else PLAIN_RACE)(*given)


def share(timer: TaskTimer, chunks: Any) -> float:
    return 0.9 if CASE.get("captures") else 0.0


if __name__ == "__main__":
    dynamic.Race = race  # type: ignore[assignment,misc]
    TaskTimer.launch_share = share  # type: ignore[method-assign]
    equality_worker.DppSchedule = Heard  # type: ignore[misc]
    equality_worker.train = train
    equality_worker.main()
