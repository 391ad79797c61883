"""The planner of orders: simulates orders of a replica's microbatches, a step ahead.

:func:`plan_order` depends on the lengths and the model of the pipeline alone, so all ranks of a
replica plan the same. It runs in a process of its own; this module is that process's program.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any

from megatron.dpp.schedule import Kind
from megatron.dpp.sim.costs import Shape
from megatron.dpp.sim.lengths import LengthCosts
from megatron.dpp.sim.packing import orders
from megatron.dpp.sim.schedules import find_schedule, run_static

Lengths = Sequence[Sequence[int]]
"""Lengths of each microbatch's sequences."""

_HOP = 0.01
"""Time of a message in mean chunk forwards."""
_MOST_TASKS = 100_000
"""Tasks of a step, above which no order is simulated: planning would take longer than the step."""
_MARGIN = 0.002
"""Share of the time that another order or policy must gain."""


@dataclass(frozen=True, kw_only=True)
class PipelineModel:
    """A pipeline as the planner simulates it.

    Args:
        longest: most tokens of a microbatch.
        policy: of the dynamic schedule; None for a static one.
        cap: as ``activation_cap``, not in bytes.
        costs: time of a stage's tasks.
        overhead: time from a task's end to the next one's start at least, in the unit of ``costs``.
    """

    num_ranks: int
    num_chunks: int
    longest: int
    policy: str | None
    cap: str = "auto"
    split_backward: bool = True
    costs: LengthCosts = field(default_factory=LengthCosts)
    overhead: float = 0.0

    def seconds(self, microbatches: Lengths, policy: str | None = None) -> float:
        """Time of a step with these microbatches in this order, in the unit of ``costs``.

        Args:
            policy: in place of the model's; of a dynamic schedule.
        """
        costs = self.costs.of(
            microbatches, num_ranks=self.num_ranks, num_chunks=self.num_chunks, hop=_HOP
        )
        sizes = tuple(sum(lengths) for lengths in microbatches)
        shape = Shape(self.num_ranks, self.num_chunks, len(sizes), sizes, self.longest)
        unit = statistics.fmean(self.costs.time(Kind.F, lengths) for lengths in microbatches)
        if self.overhead:
            each = dict.fromkeys(range(self.num_ranks), self.overhead / unit)
            costs = replace(costs, overhead=each)
        if self.policy is None:
            name = "1f1b" if self.num_chunks == 1 else "interleaved"
            return unit * run_static(name, shape, costs).makespan
        schedule = find_schedule(
            policy or self.policy, cap=self.cap, split_backward=self.split_backward
        )
        return unit * schedule.run(shape, costs).makespan


@dataclass(frozen=True)
class PlannedOrder:
    """The order of a replica's microbatches, its name, and the policy that runs it fastest; None
    for that of the run."""

    order: list[int]
    name: str
    policy: str | None = None


def plan_order(model: PipelineModel, microbatches: Lengths) -> PlannedOrder:
    """The named order with the least simulated time, the drawn one if none gains.

    With the policies ``auto`` and ``dynamic`` both the dynamic order and Megatron's, with weight
    gradients in the gaps, are weighed: on long sorted batches Megatron's is sometimes faster.
    """
    found = orders([model.costs.total(each) for each in microbatches], model.num_ranks)
    drawn = PlannedOrder(found["drawn"], "drawn")
    tasks = len(Kind) * len(microbatches) * model.num_ranks * model.num_chunks
    if model.num_ranks == 1 or tasks > _MOST_TASKS:
        return drawn
    others = {"dynamic": "megatron", "auto": "dynamic" if model.num_ranks == 2 else "megatron"}
    policies = [None, *filter(None, [others.get(model.policy or "")])]
    times = {
        (name, policy): model.seconds([microbatches[i] for i in order], policy)
        for name, order in found.items()
        for policy in policies
    }
    name, policy = min(times, key=lambda key: times[key])
    if times[name, policy] > times["drawn", None] * (1.0 - _MARGIN):
        return drawn
    if times[name, policy] > times[name, None] * (1.0 - _MARGIN):
        policy = None
    return PlannedOrder(found[name], name, policy)


class OrderPlanner:
    """Plans in another process, so that the step goes on meanwhile.

    ``waited`` counts the seconds that callers of :meth:`take` have waited.
    """

    def __init__(self, model: PipelineModel) -> None:
        self._model = model
        self._process: subprocess.Popen[str] | None = None
        self._asked: list[int] = []
        self._answers: dict[int, PlannedOrder] = {}
        self.waited = 0.0

    def ask(self, key: int, microbatches: Lengths) -> None:
        """Begin to plan; asked once for each key."""
        if key in self._asked or key in self._answers:
            return
        self._asked.append(key)
        _write(self._input(), [list(each) for each in microbatches])

    def take(self, key: int, microbatches: Lengths) -> PlannedOrder:
        """The plan of a key; it is made now if nobody has asked for it."""
        self.ask(key, microbatches)
        start = time.perf_counter()
        while key not in self._answers:
            line = self._read()
            if not line:  # the process is gone: the same plan, at this process's expense
                self._asked.clear()
                self._answers[key] = plan_order(self._model, microbatches)
                break
            self._answers[self._asked.pop(0)] = PlannedOrder(**json.loads(line))
        self.waited += time.perf_counter() - start
        while len(self._answers) > 8:
            del self._answers[next(iter(self._answers))]
        return self._answers[key]

    def close(self) -> None:
        """End the process. May be called twice."""
        process, self._process = self._process, None
        self._asked.clear()
        if process is not None:
            process.kill()
            process.communicate()

    def _input(self) -> IO[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert self._process.stdin is not None
            _write(self._process.stdin, asdict(self._model))
        assert self._process.stdin is not None
        return self._process.stdin

    def _read(self) -> str:
        if self._process is None or self._process.stdout is None:
            return ""
        return self._process.stdout.readline()


def _write(stream: IO[str], value: Any) -> None:
    with contextlib.suppress(OSError):  # it is gone, which reading tells
        stream.write(json.dumps(value) + "\n")
        stream.flush()


def _model_of(values: Mapping[str, Any]) -> PipelineModel:
    costs = LengthCosts(
        fixed=values["costs"]["fixed"],
        per_token=tuple(values["costs"]["per_token"]),  # JSON has lists
        per_square=tuple(values["costs"]["per_square"]),
    )
    return PipelineModel(**{**values, "costs": costs})


def serve(source: IO[str], target: IO[str]) -> None:
    """Answers each line of microbatches with a plan, until the source ends."""
    model = _model_of(json.loads(source.readline()))
    for line in source:
        _write(target, asdict(plan_order(model, json.loads(line))))


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
