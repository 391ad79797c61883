"""The choice of ``auto`` between whole sequences and slices, by simulation.

It follows from lengths, settings and costs alone, never from how long a step took: so all ranks, a
replay and a resumed run choose alike, without a message (docs/decisions/0026-auto-slices.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron.dpp.errors import ConfigError
from megatron.dpp.schedule import BUILT_IN, Kind, in_bytes
from megatron.dpp.sim.lengths import LengthCosts
from megatron.dpp.sim.pipeline_model import PipelineModel, Rows, as_row
from megatron.dpp.sim.slices import Row
from megatron.dpp.slice_sizes import LEAST_TOKENS, MOST_TOKENS, sizes_to_weigh, slice_size

MARGIN = 0.10
"""Share of the time of whole sequences that slices must gain: on GPUs they take 9 to 16 % more time
than the simulator says (docs/decisions/0026-auto-slices.md)."""
MOST_TASKS = 50_000
"""Tasks that are simulated for a choice, in some seconds."""
NO_ROOM = "memory does not hold whole sequences"
"""Why slices are not weighed."""
WHOLE = 0
"""In the place of a slice's tokens: no sequence is cut."""
_SHORT = "no sequence has more than 1.5 slices"
_OVERHEAD = 0.01


@dataclass(frozen=True)
class Choice:
    """The choice of ``auto`` for a step.

    Args:
        tokens: of a slice; 0 for whole sequences.
        times: simulated time by tokens of a slice, over that of whole sequences, or of the choice
            where memory does not hold them. Slices that cannot be chosen are not simulated.
        why: the reason, where times are not.
        least: lower bound on the time of slices, where none were simulated.
    """

    tokens: int
    times: Mapping[int, float]
    why: str = ""
    least: float = 0.0

    @property
    def text(self) -> str:
        """The choice, the figures and the reason, for the log."""
        chosen = f"slices of {self.tokens} tokens" if self.tokens else "whole sequences"
        if self.why:
            return f"{chosen}, as {self.why}"
        others = {tokens: time for tokens, time in self.times.items() if tokens}
        if others:
            best = min(others, key=lambda tokens: others[tokens])
            found = f"a step in slices of {best} tokens is simulated to take {others[best]:.3f}"
        else:
            found = f"a step in slices takes at least {self.least:.3f}"
        return (
            f"{chosen}: {found} of the time of whole sequences; {1 - MARGIN:.2f} or less is asked "
            "for"
        )


def with_overheads(model: PipelineModel) -> PipelineModel:
    """The model with times between tasks and of messages, which slices have more of: a measured
    time per task, which is in its costs already, or 1 % of a rank's forward of 4,096 tokens. A
    user's own policy, which might draw by chance, is simulated as ``dynamic``.
    """
    each = model.costs.fixed or _OVERHEAD * model.costs.time(Kind.F, [MOST_TOKENS])
    return dataclasses.replace(
        model,
        policy=model.policy if model.policy in (None, *BUILT_IN) else "dynamic",
        overhead=0.0 if model.costs.fixed else each,
        hop=each,
    )


def why_needed(cap: str) -> str:
    """A reason not to weigh slices under an activation cap; empty where they are weighed. The bytes
    of whole sequences are measured in a step only, and the choice may not follow from it.
    """
    return f"activation_cap={cap!r} limits bytes" if in_bytes(cap) else ""


def least_slice(costs: LengthCosts) -> int:
    """Tokens of the smallest slice that pays."""
    return costs.least_slice or LEAST_TOKENS


def weigh(
    ways: Mapping[int, Rows],
    model: PipelineModel,
    time: Callable[[Rows], float] | None = None,
    least: Callable[[Rows], float] | None = None,
) -> Choice:
    """The way to run a step: whole sequences, unless slices gain 10 %, or memory needs them.

    Where all ways have more than 50,000 tasks, the finest are not weighed. Slices whose lower bound
    tells that they are not chosen are not simulated.

    Args:
        ways: the microbatches by tokens of a slice, coarsest first; without whole sequences where
            memory does not hold them.
        model: the pipeline, with its overheads.
        time: of a step; the model's simulation by default.
        least: lower bound on ``time``; the model's by default.
    """
    time, least = time or model.seconds, least or model.least_seconds
    totals = itertools.accumulate(model.num_tasks(rows) for rows in ways.values())
    few = [tokens for tokens, total in zip(ways, totals, strict=True) if total <= MOST_TASKS]
    cuts = [tokens for tokens in few if tokens != WHOLE]
    if not cuts:
        return _not_weighed(ways)
    base, limit, bounds = math.inf, math.inf, dict[int, float]()
    if WHOLE in few:
        with contextlib.suppress(ConfigError):  # there is no room
            base = time(ways[WHOLE])
            limit = base * (1.0 - MARGIN)
    found = dict[int, float]()
    for tokens in cuts:
        bounds[tokens] = least(ways[tokens])
        if bounds[tokens] <= min([limit, *found.values()]):
            found[tokens] = time(ways[tokens])
    best = min(found, key=lambda tokens: found[tokens], default=WHOLE)
    if base == math.inf:
        times = {tokens: each / found[best] for tokens, each in found.items()}
        return Choice(best, times, NO_ROOM)
    times = {WHOLE: 1.0} | {tokens: each / base for tokens, each in found.items()}
    if not found:
        return Choice(WHOLE, times, least=min(bounds.values()) / base)
    return Choice(best if times[best] <= 1.0 - MARGIN else WHOLE, times)


def _not_weighed(ways: Mapping[int, Rows]) -> Choice:
    """The choice where no slices can be simulated: as few and large units as there may be."""
    if list(ways) == [WHOLE]:
        return Choice(WHOLE, {}, _SHORT)
    return Choice(next(iter(ways)), {}, f"slices have more than {MOST_TASKS} tasks to simulate")


@functools.lru_cache(maxsize=256)
def weigh_fixed(
    model: PipelineModel,
    length: int,
    num_microbatches: int,
    *,
    rows: int = 1,
    multiple: int = 1,
    needed: str = "",
) -> Choice:
    """The choice for microbatches that all have the same length.

    So many are simulated that they have ``4 p`` units, or as many as the bound on tasks allows, but
    ``p + 1`` at least; each further one takes as long as one of their second half.

    Args:
        model: without overheads.
        length: tokens of a sequence.
        rows: sequences of a microbatch.
        multiple: as of :func:`slice_size`.
        needed: why whole sequences are not weighed; empty where they are.
    """
    model = with_overheads(dataclasses.replace(model, longest=length))
    model = dataclasses.replace(model, costs=model.costs.times(rows))
    total = length * rows * num_microbatches
    sizes = sizes_to_weigh(
        total, model.num_ranks, least=least_slice(model.costs), multiple=multiple
    )
    each: dict[int, int] = {WHOLE: length} | {n: slice_size(length, n, multiple) for n in sizes}
    rows_of = {
        tokens: [_row(length, size)]
        for tokens, size in each.items()
        if size < length or (tokens == WHOLE and not needed)
    }
    if not rows_of:
        return Choice(WHOLE, {}, _SHORT)

    tasks = sum(map(model.num_tasks, rows_of.values()))
    most = min(4 * model.num_ranks, MOST_TASKS // tasks)
    ways = {
        tokens: [row] * min(num_microbatches, max(model.num_ranks + 1, most // len(row.ends)))
        for tokens, (row,) in rows_of.items()
    }

    def time(microbatches: Rows) -> float:
        row, number = as_row(microbatches[0]), len(microbatches)
        took, further = _simulated(model, row, number), num_microbatches - number
        if not further:
            return took
        half = number - number // 2
        later = (took - _simulated(model, row, half)) / (number - half)
        return took + further * max(later, model.busy_seconds([row]))

    def least(microbatches: Rows) -> float:
        further = num_microbatches - len(microbatches)
        return model.least_seconds(microbatches) + further * model.busy_seconds(microbatches[:1])

    found = weigh(ways, model, time, least)
    return dataclasses.replace(found, why=needed) if needed else found


@functools.lru_cache(maxsize=256)
def _simulated(model: PipelineModel, row: Row, number: int) -> float:
    """Time of so many equal rows."""
    return model.seconds([row] * number)


@functools.lru_cache(maxsize=8)
def weigh_rows(
    model: PipelineModel,
    rows: tuple[tuple[int, ...], ...],
    *,
    multiple: int = 1,
    needed: str = "",
) -> Choice:
    """The choice for packed rows, of which the long ones are cut wherever a cut falls.

    Args:
        model: without overheads.
        rows: tokens of the sequences of each row, in the order of the step.
        multiple, needed: as in :func:`weigh_fixed`.
    """
    model = with_overheads(model)
    sizes = sizes_to_weigh(
        sum(map(sum, rows)), model.num_ranks, least=least_slice(model.costs), multiple=multiple
    )
    ways = {} if needed else {WHOLE: [_packed_row(row, sum(row)) for row in rows]}
    for tokens in sizes:
        cut = [_packed_row(row, slice_size(sum(row), tokens, multiple)) for row in rows]
        if any(len(row.ends) > 1 for row in cut):
            ways[tokens] = cut
    if not ways:
        return Choice(WHOLE, {}, _SHORT)
    found = weigh(ways, model)
    return dataclasses.replace(found, why=needed) if needed else found


def _row(length: int, size: int) -> Row:
    return _packed_row((length,), size)


def _packed_row(lengths: Sequence[int], size: int) -> Row:
    total = sum(lengths)
    return Row(tuple(range(len(lengths))), tuple(lengths), (*range(size, total, size), total))
