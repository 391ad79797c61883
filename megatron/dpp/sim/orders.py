"""The planner of batches: simulates cuts and orders of a replica's microbatches, a step ahead.

:func:`plan_batch` depends on the lengths and the model of the pipeline alone, so all ranks of a
replica plan the same. It runs in a process of its own; this module is that process's program.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

from megatron.dpp.sim.lengths import LengthCosts
from megatron.dpp.sim.packing import orders
from megatron.dpp.sim.pipeline_model import PipelineModel, Rows, as_row
from megatron.dpp.sim.slices import Row, row_cost
from megatron.dpp.sim.weighing import Choice, weigh, with_overheads

_MOST_TASKS = 100_000
"""Tasks of a step, above which no order is simulated: planning would take longer than the step."""
_MARGIN = 0.002
"""Share of the time that another order or policy must gain."""


@dataclass(frozen=True)
class PlannedOrder:
    """The order of a replica's microbatches.

    Args:
        name: of the order.
        policy: that runs it fastest; None for that of the run.
        choice: the weighed cut; None where there was nothing to choose.
    """

    order: list[int]
    name: str
    policy: str | None = None
    choice: Choice | None = None


@dataclass(frozen=True)
class Question:
    """A batch to plan.

    Args:
        ways: this replica's microbatches by tokens of a slice, 0 for whole sequences.
        weighed: those of the replica by which all choose, coarsest first; empty for this one's.
        named: the order to keep, by its name; ``planned`` weighs all.
        weighs: whole sequences and slices; otherwise there is one way.
    """

    ways: Mapping[int, Rows]
    weighed: Mapping[int, Rows]
    named: str = "planned"
    weighs: bool = False


def plan_batch(model: PipelineModel, question: Question) -> PlannedOrder:
    """The cut of a batch, and the order of this replica's microbatches. Each cut is weighed in the
    order that it would run in."""
    ways, named, choice = question.ways, question.named, None
    tokens = next(iter(ways))
    if any(len(as_row(each).ends) > 1 for rows in ways.values() for each in rows):
        model = with_overheads(model)
    if question.weighs:

        def time(rows: Rows) -> float:
            plan = _ordered(model, rows, named)
            return model.seconds([rows[i] for i in plan.order], plan.policy)

        choice = weigh(question.weighed or ways, model, time)
        tokens = choice.tokens
    return replace(_ordered(model, ways[tokens], named), choice=choice)


def _ordered(model: PipelineModel, rows: Rows, named: str) -> PlannedOrder:
    if named == "planned":
        return plan_order(model, rows)
    return PlannedOrder(_orders(model, rows)[named], named)


def _orders(model: PipelineModel, rows: Rows) -> dict[str, list[int]]:
    return orders([row_cost(as_row(each), model.costs) for each in rows], model.num_ranks)


def plan_order(model: PipelineModel, microbatches: Rows) -> PlannedOrder:
    """The named order with the least simulated time, the given one if none gains.

    With the policies ``auto`` and ``dynamic`` both the dynamic order and Megatron's, with weight
    gradients in the gaps, are weighed: on long sorted batches Megatron's is sometimes faster.
    """
    found = _orders(model, microbatches)
    drawn = PlannedOrder(found["drawn"], "drawn")
    if model.num_ranks == 1 or model.num_tasks(microbatches) > _MOST_TASKS:
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
    """Plans in another process, so that the step goes on meanwhile."""

    def __init__(self, model: PipelineModel) -> None:
        self._model = model
        self._process: subprocess.Popen[str] | None = None
        self._asked: list[int] = []
        self._answers: dict[int, PlannedOrder] = {}

    def ask(self, key: int, question: Question) -> None:
        """Begin to plan; asked once for each key."""
        if key in self._asked or key in self._answers:
            return
        self._asked.append(key)
        _write(self._input(), _question_to(question))

    def take(self, key: int, question: Question) -> PlannedOrder:
        """The plan of a key; it is made now if nobody has asked for it."""
        self.ask(key, question)
        while key not in self._answers:
            line = self._read()
            if not line:  # the process is gone: the same plan, at this process's expense
                self._asked.clear()
                self._answers[key] = plan_batch(self._model, question)
                break
            self._answers[self._asked.pop(0)] = _plan_of(json.loads(line))
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


def _question_to(question: Question) -> dict[str, Any]:
    """For JSON, whose keys are text: pairs; a whole microbatch is the list of its lengths."""

    def encoded(ways: Mapping[int, Rows]) -> list[Any]:
        return [
            [
                tokens,
                [[*map(int, row.lengths)] if len(row.ends) == 1 else asdict(row) for row in rows],
            ]
            for tokens, given in ways.items()
            for rows in [[as_row(each) for each in given]]
        ]

    return {
        **asdict(question),
        "ways": encoded(question.ways),
        "weighed": encoded(question.weighed),
    }


def _question_of(values: Mapping[str, Any]) -> Question:
    def decoded(pairs: Sequence[Any]) -> dict[int, Rows]:
        return {
            tokens: [
                Row(*map(tuple, each.values())) if isinstance(each, dict) else each for each in rows
            ]
            for tokens, rows in pairs
        }

    ways, weighed = (decoded(values[name]) for name in ("ways", "weighed"))
    return Question(**{**values, "ways": ways, "weighed": weighed})


def _plan_of(values: Mapping[str, Any]) -> PlannedOrder:
    choice = values["choice"]
    if choice is not None:
        times = {int(tokens): time for tokens, time in choice["times"].items()}
        choice = Choice(**{**choice, "times": times})
    return PlannedOrder(**{**values, "choice": choice})


def serve(source: IO[str], target: IO[str]) -> None:
    """Answers each line with a batch by a line with its plan, until the source ends."""
    model = _model_of(json.loads(source.readline()))
    for line in source:
        _write(target, asdict(plan_batch(model, _question_of(json.loads(line)))))


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
