"""equality_worker.py's cases with task times that a case gives.

backward_worker.py JSON. ``times`` of a case are [time of W apart, of a fused backward, share of
launching] of each rank, where F and B take 1; ``chosen`` is what each must choose by them with
``split_backward="auto"``.
"""

from __future__ import annotations

import itertools
from typing import Any

from tests.runtime import equality_worker

import torch.distributed as dist  # isort: skip

from megatron.dpp import DppSchedule
from megatron.dpp.runtime import session
from megatron.dpp.runtime.timer import HostTimer, Lap

PLAIN_TRAIN = equality_worker.train
CASE: dict[str, Any] = {}


class Told(HostTimer):
    """The timer of a device on which tasks take the times of the case."""

    def __init__(self) -> None:
        super().__init__()
        self._apart, self._fused, self._share = CASE["times"][dist.get_rank()]
        laps = [], [], [("B", self._fused)], [("B", 1.0), ("W", self._apart)]
        self._laps = itertools.chain(laps, itertools.repeat([]))

    def lap(self) -> Lap | None:
        return {(kind, chunk): took for kind, took in next(self._laps) for chunk in range(4)}

    def launch_share(self, chunks: Any) -> float:
        return self._share


class Heard(DppSchedule):
    """Keeps what it logs."""

    def __init__(self, *given: Any, log: Any, **more: Any) -> None:
        self.said: list[str] = []
        super().__init__(*given, log=lambda line: (self.said.append(line), log(line)), **more)


def train(case: dict[str, Any], schedule: Any) -> dict[str, Any]:
    CASE.clear()
    CASE.update(case)
    result = PLAIN_TRAIN(case, schedule)
    if isinstance(schedule, Heard):
        chosen = [line for line in schedule.said if "is chosen" in line]
        measures = schedule.config.split_backward == "auto" and schedule.config.replay is None
        assert len(chosen) == measures, chosen
        wanted = case["chosen"][dist.get_rank()]
        assert not measures or f"'{wanted}') is chosen" in chosen[0], chosen
    return result


if __name__ == "__main__":
    session.timer_for = lambda *, follow: Told()  # type: ignore[assignment]
    equality_worker.DppSchedule = Heard  # type: ignore[misc]
    equality_worker.train = train
    equality_worker.main()
