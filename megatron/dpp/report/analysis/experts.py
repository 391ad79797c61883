"""The load of experts, and the time that its imbalance costs.

Ranks of an expert-parallel group meet in each layer, so all take as long as the one with the most
tokens; the others wait inside of their tasks, which looks like work. A layer's time per token is
the slope of a straight line through its ranks' times over their tokens.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.dpp.report.analysis.model import Iteration
from megatron.dpp.report.analysis.report_data import LayerRow
from megatron.dpp.report.analysis.work import Cell

_MS = 1e6


class Line:
    """Sums of a straight line through points (tokens, time in ns)."""

    def __init__(self) -> None:
        self.count = self.tokens = self.times = self.squares = self.products = 0

    def add(self, tokens: int, time: int) -> None:
        """Take a point."""
        self.count += 1
        self.tokens += tokens
        self.times += time
        self.squares += tokens * tokens
        self.products += tokens * time

    def ns_per_token(self) -> float:
        """The slope: at least 0, at most the mean of time over that of tokens; 0 where all points
        have one number of tokens.
        """
        spread = self.count * self.squares - self.tokens**2
        if not spread:
            return 0.0
        slope = (self.count * self.products - self.tokens * self.times) / spread
        return min(max(slope, 0.0), self.times / self.tokens)

    @classmethod
    def through(cls, lines: Iterable[Line]) -> Line:
        """The line through the points of several."""
        whole = cls()
        for line in lines:
            for name, value in vars(line).items():
                setattr(whole, name, getattr(whole, name) + value)
        return whole


@dataclass(slots=True)
class Forwards:
    """Sums over the forwards of one layer's experts on the ranks of a group, ``cells``: tokens of
    the rank with the most less the mean, and over the mean where there are any.
    """

    layer: int
    cells: tuple[Cell, ...]
    count: int = 0
    excess: float = 0.0
    filled: int = 0
    ratio: float = 0.0

    def add(self, tokens: Sequence[int]) -> None:
        """Take a forward by the tokens of each rank."""
        mean = statistics.fmean(tokens)
        self.count += 1
        self.excess += max(tokens) - mean
        if mean:
            self.filled += 1
            self.ratio += max(tokens) / mean


@dataclass(frozen=True, slots=True)
class Loads:
    """Load of one iteration's experts. ``imbalance[layer]`` is the tokens of a layer's fullest
    expert over the mean, of layers that had any; ``lines[layer]`` has its ranks' times.
    """

    imbalance: dict[int, float]
    lines: dict[int, Line]
    forwards: list[Forwards]


def loads_of(iteration: Iteration) -> Loads:
    """The loads of all ranks in one iteration."""
    experts: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    lines: dict[int, Line] = defaultdict(Line)
    meetings: dict[tuple[int, int, int], list[tuple[Cell, int]]] = defaultdict(list)
    for rank in iteration.ranks.values():
        for run in rank.experts:
            for expert, count in enumerate(run.tokens, run.first):
                experts[run.layer][expert] += count
            tokens = sum(run.tokens)
            lines[run.layer].add(tokens, run.end - run.start)
            key = run.layer, run.group, run.microbatch
            meetings[key].append(((rank.rank, run.chunk), tokens))
    found: dict[tuple[int, tuple[Cell, ...]], Forwards] = {}
    for (layer, _, _), members in meetings.items():
        cells = tuple(cell for cell, _ in members)
        found.setdefault((layer, cells), Forwards(layer, cells)).add([n for _, n in members])
    imbalance = {
        layer: max(counts.values()) / statistics.fmean(counts.values())
        for layer, counts in experts.items()
        if any(counts.values())
    }
    return Loads(imbalance, dict(lines), list(found.values()))


def _by_layer(loads: Sequence[Loads]) -> dict[int, tuple[float, list[Forwards]]]:
    """Per layer: ns per token, and all forwards."""
    layers: dict[int, list[Forwards]] = defaultdict(list)
    for one in loads:
        for forwards in one.forwards:
            layers[forwards.layer].append(forwards)
    lines = {
        layer: Line.through(one.lines[layer] for one in loads if layer in one.lines)
        for layer in layers
    }
    return {layer: (lines[layer].ns_per_token(), layers[layer]) for layer in sorted(layers)}


def lost_per_forward(loads: Sequence[Loads]) -> dict[Cell, float]:
    """Per (rank, chunk): ns by which the experts of a forward would be faster if all ranks of their
    group had as many tokens.
    """
    lost: dict[Cell, float] = defaultdict(float)
    for slope, layer in _by_layer(loads).values():
        excess: dict[Cell, float] = defaultdict(float)
        count: dict[Cell, int] = defaultdict(int)
        for forwards in layer:
            for cell in forwards.cells:
                excess[cell] += forwards.excess
                count[cell] += forwards.count
        for cell, own in excess.items():
            lost[cell] += slope * own / count[cell]
    return dict(lost)


def layer_rows(loads: Sequence[Loads]) -> list[LayerRow]:
    """A row per layer with experts, in the order of layers."""
    rows = []
    for layer, (slope, found) in _by_layer(loads).items():
        steps = [one.imbalance[layer] for one in loads if layer in one.imbalance]
        if not steps:
            continue
        rows.append(
            LayerRow(
                layer=layer,
                ranks=sorted({rank for forwards in found for rank, _ in forwards.cells}),
                group_size=len(found[0].cells),
                imbalance=statistics.fmean(steps),
                worst=max(steps),
                rank_imbalance=sum(f.ratio for f in found) / sum(f.filled for f in found),
                lost_ms=slope * sum(f.excess for f in found) / sum(f.count for f in found) / _MS,
            )
        )
    return rows
