"""The load of experts, and the time that its imbalance costs.

Ranks of an expert-parallel group meet in each layer, so all take as long as the one with the most
tokens; the others wait inside of their tasks, which looks like work. A layer's time per token is
the slope of a straight line through its ranks' times over their tokens.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.dpp.trace.analysis.model import Iteration
from megatron.dpp.trace.analysis.work import Cell

_MS = 1e6


class Meeting(NamedTuple):
    """The forward of one layer's experts on all ranks of their group."""

    layer: int
    cells: list[Cell]
    tokens: list[int]
    """Per rank."""
    times: list[int]
    """Per rank, ns."""

    @property
    def excess(self) -> float:
        """Tokens of the rank with the most, less the mean."""
        return max(self.tokens) - statistics.fmean(self.tokens)


@dataclass(frozen=True, slots=True)
class Loads:
    """Load of one iteration's experts: ``tokens[layer][expert]``, and each forward."""

    tokens: dict[int, dict[int, int]]
    meetings: list[Meeting]

    def imbalance(self, layer: int) -> float | None:
        """Tokens of a layer's fullest expert over the mean; None where it had none."""
        counts = self.tokens.get(layer, {}).values()
        mean = statistics.fmean(counts) if counts else 0.0
        return max(counts) / mean if mean else None


def loads_of(iteration: Iteration) -> Loads:
    """The loads of all ranks in one iteration."""
    tokens: dict[int, dict[int, int]] = {}
    found: dict[tuple[int, int, int], Meeting] = {}
    for rank in iteration.ranks.values():
        for run in rank.experts:
            counts = tokens.setdefault(run.layer, defaultdict(int))
            for expert, count in enumerate(run.tokens, run.first):
                counts[expert] += count
            key = run.layer, run.group, run.microbatch
            meeting = found.setdefault(key, Meeting(run.layer, [], [], []))
            meeting.cells.append((rank.rank, run.chunk))
            meeting.tokens.append(sum(run.tokens))
            meeting.times.append(run.end - run.start)
    return Loads(tokens, list(found.values()))


def ns_per_token(meetings: Sequence[Meeting]) -> float:
    """Slope of the line through all (tokens, time): at least 0, at most the mean of time over that
    of tokens.
    """
    tokens = [count for meeting in meetings for count in meeting.tokens]
    times = [time for meeting in meetings for time in meeting.times]
    if len(set(tokens)) < 2:
        return 0.0
    slope = statistics.linear_regression(tokens, times).slope
    return min(max(slope, 0.0), sum(times) / sum(tokens))


def _by_layer(loads: Sequence[Loads]) -> dict[int, list[Meeting]]:
    layers: dict[int, list[Meeting]] = defaultdict(list)
    for one in loads:
        for meeting in one.meetings:
            layers[meeting.layer].append(meeting)
    return dict(sorted(layers.items()))


def lost_per_forward(loads: Sequence[Loads]) -> dict[Cell, float]:
    """Per (rank, chunk): ns by which the experts of a forward would be faster if all ranks of their
    group had as many tokens.
    """
    lost: dict[Cell, float] = defaultdict(float)
    for meetings in _by_layer(loads).values():
        slope = ns_per_token(meetings)
        excess: dict[Cell, list[float]] = defaultdict(list)
        for meeting in meetings:
            for cell in meeting.cells:
                excess[cell].append(meeting.excess)
        for cell, own in excess.items():
            lost[cell] += slope * statistics.fmean(own)
    return dict(lost)


def layer_rows(loads: Sequence[Loads]) -> list[dict[str, Any]]:
    """A row per layer with experts, in the order of layers. Imbalances are tokens of the fullest
    over the mean; ``lost_ms`` is per forward.
    """
    rows = []
    for layer, meetings in _by_layer(loads).items():
        steps = [found for one in loads if (found := one.imbalance(layer)) is not None]
        if not steps:
            continue
        parts = [max(m.tokens) / statistics.fmean(m.tokens) for m in meetings if any(m.tokens)]
        rows.append(
            {
                "layer": layer,
                "ranks": sorted({rank for meeting in meetings for rank, _ in meeting.cells}),
                "group_size": len(meetings[0].cells),
                "imbalance": statistics.fmean(steps),
                "worst": max(steps),
                "rank_imbalance": statistics.fmean(parts),
                "lost_ms": ns_per_token(meetings)
                * statistics.fmean(meeting.excess for meeting in meetings)
                / _MS,
            }
        )
    return rows
