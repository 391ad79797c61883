"""The load of experts, and the time that its imbalance costs.

Ranks of an expert-parallel group meet in each layer, so all take as long as the one with the most
tokens; the others wait inside of their tasks, which looks like work. A layer's time per token is
the slope of a straight line through its ranks' times over their tokens.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.dpp.report.analysis.model import TracedIteration
from megatron.dpp.report.analysis.times import Cell

_MS = 1e6


@dataclass(frozen=True)
class LayerRow:
    """Experts of one layer: imbalances are tokens of the fullest over the mean, ``lost_ms`` is per
    forward.
    """

    layer: int
    group_size: int
    imbalance: float
    rank_imbalance: float
    lost_ms: float


@dataclass(slots=True)
class LayerLoad:
    """Sums of one layer's experts, whose size does not grow with the run.

    Args:
        points: number, sums of tokens, times in ns, squares of tokens, and products of both.
        experts: tokens by expert.
        meetings: per group of cells (rank, chunk): forwards, and the sum over them of the fullest
            rank's tokens less the mean rank's.
        ratios: forwards with tokens, and the sum of the fullest rank's over the mean rank's.
    """

    points: list[int] = field(default_factory=lambda: [0] * 5)
    experts: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    meetings: dict[tuple[Cell, ...], list[float]] = field(
        default_factory=lambda: defaultdict(lambda: [0.0, 0.0])
    )
    ratios: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def ns_per_token(self) -> float:
        """The slope: at least 0, at most the mean of time over that of tokens; 0 where all points
        have one number of tokens.
        """
        count, tokens, times, squares, products = self.points
        spread = count * squares - tokens**2
        slope = (count * products - tokens * times) / spread if spread else 0.0
        return min(max(slope, 0.0), times / tokens) if tokens else 0.0


Loads = dict[int, LayerLoad]
"""By layer."""


def _add(sums: list[Any], more: Sequence[float]) -> None:
    sums[:] = [a + b for a, b in zip(sums, more, strict=True)]


def add_loads(loads: Loads, iteration: TracedIteration) -> None:
    """Add the loads of all ranks in one iteration."""
    meetings: dict[tuple[int, int, int], list[tuple[Cell, int]]] = defaultdict(list)
    for rank in iteration.ranks.values():
        for run in rank.experts:
            load = loads.setdefault(run.layer, LayerLoad())
            for expert, count in enumerate(run.tokens, run.first):
                load.experts[expert] += count
            tokens, time = sum(run.tokens), run.end - run.start
            _add(load.points, (1, tokens, time, tokens * tokens, tokens * time))
            key = run.layer, run.group, run.microbatch
            meetings[key].append(((rank.rank, run.chunk), tokens))
    for (layer, _, _), members in meetings.items():
        cells, counts = zip(*members, strict=True)
        mean, most = statistics.fmean(counts), max(counts)
        _add(loads[layer].meetings[cells], (1, most - mean))
        if mean:
            _add(loads[layer].ratios, (1, most / mean))


def lost_per_forward(loads: Loads) -> dict[Cell, float]:
    """Per (rank, chunk): ns by which the experts of a forward would be faster if all ranks of their
    group had as many tokens.
    """
    lost: dict[Cell, float] = defaultdict(float)
    for load in loads.values():
        of_cells: dict[Cell, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for cells, sums in load.meetings.items():
            for cell in cells:
                _add(of_cells[cell], sums)
        for cell, (count, excess) in of_cells.items():
            lost[cell] += load.ns_per_token() * excess / count
    return dict(lost)


def layer_rows(loads: Loads) -> list[LayerRow]:
    """A row per layer whose experts had tokens, in the order of layers."""
    rows = []
    for layer, load in sorted(loads.items()):
        if not any(load.experts.values()):
            continue
        sums = [sum(column) for column in zip(*load.meetings.values(), strict=True)]
        rows.append(
            LayerRow(
                layer=layer,
                group_size=len(next(iter(load.meetings))),
                imbalance=max(load.experts.values()) / statistics.fmean(load.experts.values()),
                rank_imbalance=load.ratios[1] / load.ratios[0],
                lost_ms=load.ns_per_token() * sums[1] / sums[0] / _MS,
            )
        )
    return rows
