"""The search for stragglers: ranks, stages and links that are slow themselves.

Waiting never makes a culprit. What counts is the time that work itself takes: a cell's (rank,
chunk) undisturbed time per microbatch against the typical cell of the same chunk, a link's delay
against the typical link, and how far a rank's task times lie above their own undisturbed ones.

- ``slow-rank``: every chunk of the rank is slow by about the same factor, its replicas are not.
- ``heavy-stage``: one chunk is slow on all replicas (the last one carries the LM head); layers
  should move.
- ``slow-link``: messages between two ranks take much longer than between others, or than they
  should.
- ``transient``: one rank is slow now and then.
- ``jitter``: all ranks are slow now and then.
- ``uneven-microbatches``: the same microbatches are slow everywhere.

With one chunk per rank and one replica a slow last rank and a heavy last stage look alike; the
stage is named then, since the last stage is expected to carry more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.dpp.report.analysis.link_times import ENOUGH, Link, LinkSamples, merge_links
from megatron.dpp.report.analysis.work import Cell, JobShape, Work

_SLOW = 1.15
_SLOW_LINK = 3.0
_LINK_SHARE = 0.05
_LONELY_LINK_SHARE = 0.25
_OFTEN = 0.7
_SPREAD_TAIL, _SPREAD_MEAN = 1.2, 1.05
_SHARED = 0.6


@dataclass(frozen=True)
class Culprit:
    """One finding.

    Args:
        kind: as listed above.
        rank, chunk: where, for ranks and stages.
        link: the two ranks, for links.
        factor: times slower than expected; of an only link, than a quarter of a forward.
        share: part of the iterations in which it was.
        since: first iteration of those in which it was slow from then on.
        victims: ranks that waited most meanwhile.
    """

    kind: str
    factor: float
    share: float
    since: int
    rank: int | None = None
    chunk: int | None = None
    link: Link | None = None
    victims: tuple[int, ...] = field(default=())

    @property
    def name(self) -> str:
        """Short text for tables."""
        if self.link is not None:
            return f"link {self.link[0]}-{self.link[1]}"
        if self.rank is None:
            return "all ranks"
        return f"rank {self.rank}" + ("" if self.chunk is None else f", chunk {self.chunk}")


def _low_median(values: Sequence[float]) -> float:
    return statistics.median_low(values) if values else 0.0


def cell_factors(work: Work, shape: JobShape) -> dict[Cell, float]:
    """Work of each cell per microbatch, relative to the typical cell of its chunk."""
    times = {cell: work.per_microbatch(cell) for cell in work.tasks}
    chunks = {chunk for _, chunk in times}
    expected = {
        chunk: _low_median([t for (_, c), t in times.items() if c == chunk]) for chunk in chunks
    }
    return {cell: time / expected[cell[1]] for cell, time in times.items() if expected[cell[1]]}


def _history(flags: list[tuple[int, bool]]) -> tuple[float, int]:
    """Share of iterations flagged, and the first of them after which most are."""
    share = sum(flag for _, flag in flags) / len(flags)
    for index, (number, flag) in enumerate(flags):
        later = [f for _, f in flags[index:]]
        if flag and sum(later) / len(later) >= 0.75:
            return share, number
    return share, flags[-1][0]


class StragglerSearch:
    """Looks for culprits over the iterations of a run.

    Args:
        shape: the job's.
        works: recorded work per iteration, without the first ones, which build kernels and pools.
        links: link samples per iteration, in the same order.
        waits: per rank, time waited for messages in ns, to name the victims.
        threshold: factor above the expected time that counts as slow.
    """

    def __init__(
        self,
        shape: JobShape,
        works: Sequence[Work],
        links: Sequence[dict[Link, LinkSamples]],
        waits: dict[int, int],
        *,
        threshold: float = _SLOW,
    ) -> None:
        self._shape, self._works, self._links = shape, works, links
        self._waits, self._threshold = waits, threshold
        self._factors = [cell_factors(work, shape) for work in works]
        self._numbers = [work.number for work in works]

    def find(self) -> list[Culprit]:
        """Ranks and stages first, then links, then unsteadiness; worst first in each group."""
        if not self._works:
            return []
        cells = sorted(self._cells(), key=lambda c: -c.factor)
        links = sorted(self._slow_links(), key=lambda c: -c.factor)
        return cells + links + self._unsteady({c.rank for c in cells})

    def _victims(self, culprits: set[int]) -> tuple[int, ...]:
        others = [rank for rank in self._waits if rank not in culprits]
        return tuple(sorted(others, key=lambda rank: -self._waits[rank])[:3])

    def _slow(self, cell: Cell) -> tuple[float, float, int] | None:
        """Factor, share and since of a cell that is often slow."""
        values = [factors.get(cell, 1.0) for factors in self._factors]
        flags = [(n, v > self._threshold) for n, v in zip(self._numbers, values, strict=True)]
        share, since = _history(flags)
        recent = [flag for number, flag in flags if number >= since]
        if share < _OFTEN and not (len(recent) >= 3 and all(recent)):
            return None
        return (
            statistics.median(v for v, (_, f) in zip(values, flags, strict=True) if f),
            share,
            since,
        )

    def _cells(self) -> list[Culprit]:
        slow: dict[Cell, tuple[float, float, int]] = {}
        for cell in sorted({cell for factors in self._factors for cell in factors}):
            found = self._slow(cell)
            if found is not None:
                slow[cell] = found
        culprits: list[Culprit] = []
        for rank in sorted({rank for rank, _ in slow}):
            own = {chunk: found for (r, chunk), found in slow.items() if r == rank}
            if len(own) == self._shape.num_chunks and not self._is_heavy(rank, slow):
                factor, share, since = min(own.values())
                victims = self._victims({rank})
                culprits.append(Culprit("slow-rank", factor, share, since, rank, victims=victims))
                continue
            for chunk, (factor, share, since) in own.items():
                victims = self._victims({rank})
                culprits.append(
                    Culprit("heavy-stage", factor, share, since, rank, chunk, victims=victims)
                )
        return culprits

    def _is_heavy(self, rank: int, slow: dict[Cell, tuple[float, float, int]]) -> bool:
        """True if a rank with only slow chunks is slow because of its stage's work."""
        shape = self._shape
        place = shape.pipeline[rank]
        peers = [r for r, p in shape.pipeline.items() if p == place and r != rank]
        others = [r for r in peers if shape.replica[r][0] != shape.replica[rank][0]]
        if others:
            return all((r, c) in slow for r in others for c in range(shape.num_chunks))
        return shape.num_chunks == 1 and place == shape.num_ranks - 1

    def _typical_forward(self) -> float:
        work = self._works[-1]
        return statistics.median(work.typical(cell, "F") for cell in work.tasks)

    def _slow_links(self) -> list[Culprit]:
        total = merge_links(self._links)
        pairs = {tuple(sorted(link)) for link in total}
        found: list[Culprit] = []
        for pair in sorted(pairs):
            own = [link for link in total if tuple(sorted(link)) == pair]
            seen = [delay for link in own for delay in total[link].clean]
            slow = [(n, self._link_is_slow(part, own)) for n, part in self._per_iteration()]
            flags = [(n, flag) for n, flag in slow if flag is not None]
            if len(seen) < ENOUGH:
                continue
            other = _delays_of_others(total, own)
            share, since = _history(flags)
            if share >= _OFTEN:
                delay = statistics.median(seen)
                usual = (
                    _low_median(other) if other else _LONELY_LINK_SHARE * self._typical_forward()
                )
                factor = delay / max(usual, 1)
                ends = (int(pair[0]), int(pair[1]))
                victims = self._victims(set())
                found.append(Culprit("slow-link", factor, share, since, link=ends, victims=victims))
        return found

    def _per_iteration(self) -> list[tuple[int, dict[Link, LinkSamples]]]:
        return list(zip(self._numbers, self._links, strict=True))

    def _link_is_slow(self, part: dict[Link, LinkSamples], own: list[Link]) -> bool | None:
        """None where nobody was looking when a message of it came."""
        mine = [delay for link in own if link in part for delay in part[link].clean]
        if not mine:
            return None
        delay, forward = statistics.median(mine), self._typical_forward()
        others = _delays_of_others(part, own)
        if not others:
            return delay > _LONELY_LINK_SHARE * forward
        typical = _low_median(others)
        return delay > _SLOW_LINK * typical and delay - typical > _LINK_SHARE * forward

    def _unsteady(self, explained: set[int | None]) -> list[Culprit]:
        """Spread of task times above what their kind, rank and chunk take undisturbed."""
        ratios: dict[int, list[float]] = {}
        shared: dict[tuple[int, int], list[float]] = {}
        for work in self._works:
            for (rank, chunk), kinds in work.tasks.items():
                for kind, times in kinds.items():
                    typical = work.typical((rank, chunk), kind)
                    for microbatch, time in times.items():
                        ratio = time / typical if typical else 1.0
                        ratios.setdefault(rank, []).append(ratio)
                        log = math.log(max(ratio, 1e-3))
                        shared.setdefault((work.number, microbatch), []).append(log)
        spread = {rank: factor for rank, own in ratios.items() if (factor := _spread(own)) > 1.0}
        everywhere = len(spread) > len(ratios) / 2
        if not spread:
            return []
        first = self._numbers[0]
        if everywhere:
            kind = "uneven-microbatches" if _shared_part(shared) > _SHARED else "jitter"
            return [Culprit(kind, statistics.median(spread.values()), 1.0, first)]
        return [
            Culprit("transient", factor, 1.0, first, rank, victims=self._victims({rank}))
            for rank, factor in sorted(spread.items(), key=lambda item: -item[1])
            if rank not in explained
        ]


def _delays_of_others(part: dict[Link, LinkSamples], own: list[Link]) -> list[int]:
    """Of links with clean samples, or, where there is none, the bounds that the rest have."""
    others = [samples for link, samples in part.items() if link not in own]
    return [s.delay for s in others if s.clean] or [s.delay for s in others]


def _spread(ratios: list[float]) -> float:
    """The 90th percentile over the undisturbed time where the spread matters, else 1."""
    ordered = sorted(ratios)
    tail = ordered[int(len(ordered) * 0.9)]
    mean = statistics.fmean(ordered)
    return tail if tail > _SPREAD_TAIL and mean > _SPREAD_MEAN else 1.0


def _shared_part(shared: dict[tuple[int, int], list[float]]) -> float:
    """Part of the variance of log task times that the microbatch explains."""
    values = [value for group in shared.values() for value in group]
    total = statistics.pvariance(values)
    means = [statistics.fmean(group) for group in shared.values()]
    return statistics.pvariance(means) / total if total else 0.0
