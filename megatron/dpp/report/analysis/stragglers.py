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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.dpp.report.analysis.model import JobShape
from megatron.dpp.report.analysis.times import Cell, Link, LinkDelays, TaskTimes, merge_links

SLOW = 1.15
"""Factor above the expected time from which a rank or stage is slow."""
_SLOW_LINK = 3.0
_LINK_SHARE = 0.05
_LONELY_LINK_SHARE = 0.25
_LEAST_CLEAN = 3
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
        name, text: place and finding in words.
        effect: share of an iteration that it costs; None where it was not simulated.
    """

    kind: str
    factor: float
    share: float
    since: int
    rank: int | None = None
    chunk: int | None = None
    link: Link | None = None
    victims: tuple[int, ...] = ()
    name: str = ""
    text: str = ""
    effect: float | None = None

    def where(self, shape: JobShape) -> str:
        """Rank, stage or link, by places."""
        if self.link is not None:
            return " and ".join(shape.name_of(rank) for rank in self.link)
        if self.rank is None:
            return "all ranks"
        if self.chunk is None:
            return shape.name_of(self.rank)
        chunk = f", chunk {self.chunk}" if shape.num_chunks > 1 else ""
        return f"stage {shape.pipeline[self.rank]}{chunk}"


class _Slowness(NamedTuple):
    """A cell's slowness: ``always`` from the first iteration on, or only since one."""

    factor: float
    share: float
    since: int
    always: bool


def _factors(works: Sequence[TaskTimes], cells: Sequence[Cell]) -> npt.NDArray[np.float64]:
    """By iteration and cell: its work per microbatch over that of the typical cell of its chunk; 1
    where it is unknown.
    """
    times = np.array(
        [[work.per_microbatch(c) if c in work.tasks else 0.0 for c in cells] for work in works]
    )
    chunks = np.array([chunk for _, chunk in cells])
    factors = np.ones_like(times)
    for chunk in set(chunks):
        own = times[:, chunks == chunk]
        typical = np.quantile(own, 0.5, axis=1, keepdims=True, method="lower")
        factors[:, chunks == chunk] = np.divide(own, typical, out=np.ones_like(own), where=own > 0)
    return np.where(np.isfinite(factors), factors, 1.0)


def _noise(factors: npt.NDArray[np.float64]) -> float:
    """Standard deviation of a cell's factor from iteration to iteration, in logarithms; robust
    against the few iterations in which something else is wrong.
    """
    logs, count = np.log(factors), len(factors)
    off = np.abs(logs - np.median(logs, axis=0))
    return float(1.4826 * np.median(off) * math.sqrt(count / (count - 1)))


class StragglerSearch:
    """Looks for culprits over the iterations of a run.

    Args:
        shape: the job's.
        works: recorded work per iteration, without the first ones, which build kernels and pools.
        links: link samples per iteration, in the same order.
        waits: per rank, time waited for messages, to name the victims.
        threshold: factor above the expected time that counts as slow.
    """

    def __init__(
        self,
        shape: JobShape,
        works: Sequence[TaskTimes],
        links: Sequence[LinkDelays],
        waits: Mapping[int, float],
        *,
        threshold: float = SLOW,
    ) -> None:
        self._shape, self._works, self._links = shape, works, links
        self._waits, self._threshold = waits, threshold
        self._numbers = [work.number for work in works]

    def find(self) -> list[Culprit]:
        """Ranks and stages first, then links, then unsteadiness; worst first in each group."""
        if len(self._works) < _LEAST_ITERATIONS:
            return []
        ranks = sorted(self._slow_ranks(), key=lambda culprit: -culprit.factor)
        links = sorted(self._slow_links(), key=lambda culprit: -culprit.factor)
        return ranks + links + self._unsteady({culprit.rank for culprit in ranks})

    def _victims(self, culprits: Collection[int]) -> tuple[int, ...]:
        others = [rank for rank in self._waits if rank not in culprits]
        return tuple(sorted(others, key=lambda rank: -self._waits[rank])[:3])

    def _history(self, flags: Sequence[bool]) -> tuple[float, int]:
        """Share of iterations flagged, and the place of the first after which most are."""
        share = sum(flags) / len(flags)
        for index, flag in enumerate(flags):
            if flag and sum(flags[index:]) / (len(flags) - index) >= 0.75:
                return share, index
        return share, len(flags) - 1

    def _slow_cells(self) -> dict[Cell, _Slowness]:
        """The cells whose slowness noise does not explain."""
        cells = sorted({cell for work in self._works for cell in work.tasks})
        factors = _factors(self._works, cells)
        noise, slow = _noise(factors), {}
        for cell, values in zip(cells, factors.T, strict=True):
            flags = [bool(flag) for flag in values > self._threshold]
            share, begin = self._history(flags)
            recent = flags[begin:]
            least = max(_LEAST_RECENT, _RECENT_SHARE * len(flags))
            always = share >= _OFTEN
            if not always and not (len(recent) >= least and all(recent)):
                continue
            seen = values if always else values[begin:]
            if math.log(np.median(seen)) >= _ERRORS * noise * math.sqrt(_LINKED / len(seen)):
                factor = float(np.median(values[flags]))
                slow[cell] = _Slowness(factor, share, self._numbers[begin], always)
        return slow

    def _slow_ranks(self) -> list[Culprit]:
        slow = self._slow_cells()
        heavy: dict[Cell, Culprit] = {}
        ranks: list[Culprit] = []
        for rank in sorted({rank for rank, _ in slow}):
            own = {chunk: found for (r, chunk), found in slow.items() if r == rank}
            always = all(found.always for found in own.values())
            if len(own) == self._shape.num_chunks and not (always and self._is_heavy(rank, slow)):
                least = min(own.values(), key=lambda found: found.factor)
                victims = self._victims({rank})
                ranks.append(Culprit("slow-rank", *least[:3], rank, victims=victims))
                continue
            for chunk, found in own.items():
                if found.always:  # the ranks of a stage have the same work: one finding
                    victims = self._victims(self._shape.stage_of(rank))
                    culprit = Culprit("heavy-stage", *found[:3], rank, chunk, victims=victims)
                    heavy.setdefault((self._shape.pipeline[rank], chunk), culprit)
        return ranks + list(heavy.values())

    def _is_heavy(self, rank: int, slow: Collection[Cell]) -> bool:
        """True if a rank with only slow chunks is slow because of its stage's work."""
        shape = self._shape
        replica = shape.replica[rank][0]
        others = [r for r in shape.stage_of(rank) if shape.replica[r][0] != replica]
        if others:
            return all((r, c) in slow for r in others for c in range(shape.num_chunks))
        return shape.num_chunks == 1 and shape.pipeline[rank] == shape.num_ranks - 1

    def _slow_links(self) -> list[Culprit]:
        work, total = self._works[-1], merge_links(self._links)
        forward = statistics.median(work.typical(cell, "F") for cell in work.tasks)
        found: list[Culprit] = []
        for a, b in sorted({(min(link), max(link)) for link in total}):
            verdicts = [_link_is_slow(links, (a, b), forward) for links in self._links]
            flags = [verdict for verdict in verdicts if verdict is not None]
            delays, others = _delays(total, (a, b))
            if len(delays) < _LEAST_CLEAN or len(flags) < _LEAST_ITERATIONS:
                continue
            share, begin = self._history(flags)
            if share >= _OFTEN:
                usual = statistics.median_low(others) if others else _LONELY_LINK_SHARE * forward
                numbers = [
                    number
                    for number, verdict in zip(self._numbers, verdicts, strict=True)
                    if verdict is not None
                ]
                what = (statistics.median(delays) / max(usual, 1), share, numbers[begin])
                victims = self._victims(())
                found.append(Culprit("slow-link", *what, link=(a, b), victims=victims))
        return found

    def _unsteady(self, explained: set[int | None]) -> list[Culprit]:
        """Spread of task times above what their kind, rank and chunk take undisturbed."""
        ratios = {rank: self._ratios(rank) for rank in self._leaders()}
        ratios = {rank: own for rank, own in ratios.items() if own}
        spread = {}
        for rank, own in ratios.items():
            share = sum(_spread(one) > 1.0 for one in own) / len(own)
            factor = _spread(list(itertools.chain(*own)))
            if factor > 1.0 and share >= 0.5:
                spread[rank] = factor, share
        if len(spread) > len(ratios) / 2:
            factor = statistics.median(factor for factor, _ in spread.values())
            return [Culprit("jitter", factor, 1.0, self._numbers[0])]
        tails = [_tail(list(itertools.chain(*own))) for own in ratios.values()]
        return [
            Culprit("transient", *what, self._numbers[0], rank, victims=self._victims({rank}))
            for rank, what in sorted(spread.items(), key=lambda item: -item[1][0])
            if rank not in explained and what[0] - 1 > _APART * (statistics.median(tails) - 1)
        ]

    def _leaders(self) -> list[int]:
        """One rank of each tensor-parallel group: its ranks meet in each layer."""
        first: dict[tuple[int, int], int] = {}
        for rank in sorted(self._shape.pipeline):
            first.setdefault((self._shape.replica[rank][0], self._shape.pipeline[rank]), rank)
        return list(first.values())

    def _ratios(self, rank: int) -> list[list[float]]:
        """Times of a rank's tasks over their undisturbed time, by iteration."""
        ratios = [
            [
                time / typical
                for cell, kinds in work.tasks.items()
                if cell[0] == rank
                for kind, times in kinds.items()
                if (typical := work.typical(cell, kind))
                for time in times.values()
            ]
            for work in self._works
        ]
        return [own for own in ratios if own]


def _delays(links: LinkDelays, pair: Link) -> tuple[list[int], list[int]]:
    """Clean delays between two ranks, and the other links' own: of those with clean samples, or,
    where there is none, the bounds that the rest have.
    """
    clean = [ns for link, samples in links.items() if {*link} == {*pair} for ns in samples.clean]
    others = [samples for link, samples in links.items() if {*link} != {*pair}]
    return clean, [s.delay for s in others if s.clean] or [s.delay for s in others]


def _link_is_slow(links: LinkDelays, pair: Link, forward: float) -> bool | None:
    """The verdict of one iteration; None where nobody was looking when a message came."""
    clean, others = _delays(links, pair)
    if not clean:
        return None
    delay = statistics.median(clean)
    if not others:
        return delay > _LONELY_LINK_SHARE * forward
    typical = statistics.median_low(others)
    return delay > _SLOW_LINK * typical and delay - typical > _LINK_SHARE * forward


def _tail(ratios: Sequence[float]) -> float:
    """The 90th percentile."""
    return sorted(ratios)[int(len(ratios) * 0.9)]


def _spread(ratios: Sequence[float]) -> float:
    """The 90th percentile over the undisturbed time where the spread matters, else 1."""
    tail = _tail(ratios)
    return tail if tail > _SPREAD_TAIL and statistics.fmean(ratios) > _SPREAD_MEAN else 1.0
