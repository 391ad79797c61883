"""The search for stragglers: ranks, stages and links that are slow themselves.

Waiting never makes a culprit. What counts is the time that work itself takes: a cell's (rank,
chunk) undisturbed time per microbatch against the typical cell of the same chunk, a link's delay
against the typical link, and how far a rank's task times lie above their own undisturbed ones.

- ``slow-rank``: every chunk of the rank is slow by about the same factor, its replicas are not.
- ``heavy-stage``: one chunk is slow on all replicas (the last one carries the LM head), from the
  first iteration on. With one chunk per rank and one replica a slow last rank looks alike.
- ``slow-link``: messages between two ranks take much longer than between others.
- ``transient``: one rank is slow now and then; ``jitter``: most ranks are.

A finding is one that noise does not reach. A rank or stage must be slow in most iterations, five
at least, or in all of the last quarter. Its slowness exceeds several standard errors of what times
vary from iteration to iteration. Ranks of a tensor-parallel group meet in each layer and count
once.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from megatron.dpp.report.analysis.link_times import ENOUGH, Link, LinkSamples, merge_links
from megatron.dpp.report.analysis.places import place_name
from megatron.dpp.report.analysis.work import Cell, JobShape, Work

_SLOW = 1.15
_SLOW_LINK = 3.0
_LINK_SHARE = 0.05
_LONELY_LINK_SHARE = 0.25
_OFTEN = 0.7
_LEAST_ITERATIONS, _LEAST_RECENT, _RECENT_SHARE = 5, 5, 0.25
_ERRORS = 4.0
"""Standard errors that the slowness of a rank exceeds."""
_LINKED = 5.0
"""Neighbouring iterations that vary together, as a busy machine slows several."""
_SPREAD_TAIL, _SPREAD_MEAN = 1.2, 1.05
_APART = 2.0
"""Spread of a rank that is slow now and then, over that of the others."""


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

    def where(self, shape: JobShape) -> str:
        """Rank, stage or link, by places."""
        if self.link is not None:
            return " and ".join(shape.name_of(rank) for rank in self.link)
        if self.rank is None:
            return "all ranks"
        if self.chunk is None:
            return shape.name_of(self.rank)
        stage = place_name(shape.pipeline[self.rank], None, None)
        return stage if shape.num_chunks == 1 else f"{stage}, chunk {self.chunk}"


@dataclass(frozen=True)
class _Slow:
    """A cell's slowness: ``always`` from the first iteration on, or only since one."""

    factor: float
    share: float
    since: int
    always: bool


def _low_median(values: Sequence[float]) -> float:
    return statistics.median_low(values) if values else 0.0


def _cell_factors(work: Work) -> dict[Cell, float]:
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
        self._factors = [_cell_factors(work) for work in works]
        self._numbers = [work.number for work in works]
        self._noise = _noise(self._factors)

    def find(self) -> list[Culprit]:
        """Ranks and stages first, then links, then unsteadiness; worst first in each group."""
        if len(self._works) < _LEAST_ITERATIONS:
            return []
        cells = sorted(self._cells(), key=lambda c: -c.factor)
        links = sorted(self._slow_links(), key=lambda c: -c.factor)
        return cells + links + self._unsteady({c.rank for c in cells})

    def _victims(self, culprits: set[int]) -> tuple[int, ...]:
        others = [rank for rank in self._waits if rank not in culprits]
        return tuple(sorted(others, key=lambda rank: -self._waits[rank])[:3])

    def _slow(self, cell: Cell) -> _Slow | None:
        """The slowness of a cell that noise does not explain."""
        values = [factors.get(cell, 1.0) for factors in self._factors]
        flags = [(n, v > self._threshold) for n, v in zip(self._numbers, values, strict=True)]
        share, since = _history(flags)
        recent = [flag for number, flag in flags if number >= since]
        least = max(_LEAST_RECENT, _RECENT_SHARE * len(flags))
        always = share >= _OFTEN
        if not always and not (len(recent) >= least and all(recent)):
            return None
        seen = values if always else values[-len(recent) :]
        error = self._noise * math.sqrt(_LINKED / len(seen))
        if math.log(statistics.median(seen)) < _ERRORS * error:
            return None
        factor = statistics.median(v for v, (_, f) in zip(values, flags, strict=True) if f)
        return _Slow(factor, share, since, always)

    def _cells(self) -> list[Culprit]:
        slow: dict[Cell, _Slow] = {}
        for cell in sorted({cell for factors in self._factors for cell in factors}):
            found = self._slow(cell)
            if found is not None:
                slow[cell] = found
        heavy: dict[Cell, Culprit] = {}
        ranks: list[Culprit] = []
        for rank in sorted({rank for rank, _ in slow}):
            own = {chunk: found for (r, chunk), found in slow.items() if r == rank}
            whole = len(own) == self._shape.num_chunks
            if whole and not (self._is_heavy(rank, slow) and all(s.always for s in own.values())):
                least = min(own.values(), key=lambda each: each.factor)
                what = (least.factor, least.share, least.since)
                ranks.append(Culprit("slow-rank", *what, rank, victims=self._victims({rank})))
                continue
            for chunk, one in own.items():
                if one.always:  # the ranks of a stage have the same work: one finding
                    what = (one.factor, one.share, one.since)
                    others = self._victims(set(self._shape.stage_of(rank)))
                    found_here = Culprit("heavy-stage", *what, rank, chunk, victims=others)
                    heavy.setdefault((self._shape.pipeline[rank], chunk), found_here)
        return ranks + list(heavy.values())

    def _is_heavy(self, rank: int, slow: Collection[Cell]) -> bool:
        """True if a rank with only slow chunks is slow because of its stage's work."""
        shape = self._shape
        place = shape.pipeline[rank]
        peers = shape.stage_of(rank)
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
            if len(seen) < ENOUGH or len(flags) < _LEAST_ITERATIONS:
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
        ratios = {rank: self._ratios(rank) for rank in self._leaders()}
        tails = {rank: _tail(list(itertools.chain(*own))) for rank, own in ratios.items() if own}
        spread = {}
        for rank, own in ratios.items():
            share = sum(_spread(each) > 1.0 for each in own) / len(own) if own else 0.0
            factor = _spread(list(itertools.chain(*own))) if own else 1.0
            if factor > 1.0 and share >= 0.5:
                spread[rank] = factor, share
        if not spread:
            return []
        first = self._numbers[0]
        if len(spread) > len(ratios) / 2:
            factor = statistics.median(factor for factor, _ in spread.values())
            return [Culprit("jitter", factor, 1.0, first)]
        usual = statistics.median(tails.values())
        return [
            Culprit("transient", factor, share, first, rank, victims=self._victims({rank}))
            for rank, (factor, share) in sorted(spread.items(), key=lambda item: -item[1][0])
            if rank not in explained and factor - 1 > _APART * (usual - 1)
        ]

    def _leaders(self) -> list[int]:
        """One rank of each tensor-parallel group: its ranks meet in each layer."""
        first: dict[tuple[int, int], int] = {}
        for rank in sorted(self._shape.pipeline):
            first.setdefault((self._shape.replica[rank][0], self._shape.pipeline[rank]), rank)
        return list(first.values())

    def _ratios(self, rank: int) -> list[list[float]]:
        """Times of a rank's tasks over their undisturbed time, by iteration."""
        found = []
        for work in self._works:
            own = [
                time / typical
                for cell, kinds in work.tasks.items()
                if cell[0] == rank
                for kind, times in kinds.items()
                if (typical := work.typical(cell, kind))
                for time in times.values()
            ]
            found += [own] if own else []
        return found


def _noise(factors: Sequence[dict[Cell, float]]) -> float:
    """Standard deviation of a cell's factor from iteration to iteration, in logarithms; robust
    against the few iterations in which something else is wrong.
    """
    off: list[float] = []
    for cell in {cell for each in factors for cell in each}:
        own = [math.log(each[cell]) for each in factors if cell in each]
        middle = statistics.median(own)
        off += [abs(value - middle) for value in own]
    if not off or len(factors) < 2:
        return 0.0
    return 1.4826 * statistics.median(off) * math.sqrt(len(factors) / (len(factors) - 1))


def _delays_of_others(part: dict[Link, LinkSamples], own: list[Link]) -> list[int]:
    """Of links with clean samples, or, where there is none, the bounds that the rest have."""
    others = [samples for link, samples in part.items() if link not in own]
    return [s.delay for s in others if s.clean] or [s.delay for s in others]


def _tail(ratios: Sequence[float]) -> float:
    """The 90th percentile."""
    ordered = sorted(ratios)
    return ordered[int(len(ordered) * 0.9)]


def _spread(ratios: Sequence[float]) -> float:
    """The 90th percentile over the undisturbed time where the spread matters, else 1."""
    tail = _tail(ratios)
    return tail if tail > _SPREAD_TAIL and statistics.fmean(ratios) > _SPREAD_MEAN else 1.0
