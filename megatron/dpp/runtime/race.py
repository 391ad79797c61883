"""The race of whole steps: of all ways to run a training step the fastest one stays.

The ways are megatron-core's own schedule as the host configured it, and ours with fused and with
split backwards. All give the same numbers, so a race changes none. Each way runs one step untimed
and then some that are timed. A step counts as long as its slowest rank takes, so all ranks find the
same times and choose alike. CUDA graphs are captured in the turn of the last way.

A race is run again when steps have become slower or faster, and after many steps, among the ways
that were close to the best one.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.dpp.config import Backward, DppConfig
from megatron.dpp.core.call import StepCall, can_run, counted
from megatron.dpp.core.graphs.slots import WARM_UP_STEPS
from megatron.dpp.errors import Text, setting
from megatron.dpp.runtime.prepared import Prepared
from megatron.dpp.runtime.stage_group import StageGroup

_TIMED, _TIMED_UNLIKE = 2, 4
"""Timed steps of a way; the latter where steps are of unlike work."""
_LONGEST_TURN = 24
"""Most steps of a way, as those in which graphs are captured do not count."""
_TIE, _BEHIND = 0.01, 0.05
"""Shares of a step's time: within the first an earlier way is preferred, and a way that is further
behind than the second is not raced again."""
_WINDOW, _DRIFT, _AGAIN = 20, 0.03, 2000
"""Steps whose median is watched, its change that begins another race, and steps that do."""

Way = Backward | None
"""How a step's backwards run under our schedule, or None for megatron-core's own one."""
SPLIT, FUSED = Backward(), Backward(split=False)


@dataclass
class _Turn:
    """The steps of one way in a race."""

    way: Way
    num_steps: int = 0
    timed: list[float] = field(default_factory=list)
    least: float = math.inf
    """Seconds of the shortest step that did not count, or did."""

    @property
    def seconds(self) -> float:
        """Seconds of a step that nothing else has slowed down."""
        return statistics.median_low(self.timed) if self.timed else self.least


class Race:
    """Chooses the way of each step of a model, by races where the settings leave it open.

    Args:
        config: leaves megatron-core's own schedule open with ``auto`` for all that asks for ours,
            and fused or split backwards with ``auto`` for them. A replay keeps what was recorded.
        log: called with the line of each race.
        prepared: has the weight gradients and graphs of the model.
        free: frees links, weight gradients and graphs of our schedule.
    """

    def __init__(
        self,
        config: DppConfig,
        log: Callable[[str], None],
        prepared: Prepared,
        free: Callable[[], None],
    ) -> None:
        asked = {
            config.policy, config.activation_cap, config.split_backward, config.head_in_forward,
            config.transport, config.length_buckets,
        }  # fmt: skip
        studies = config.inject or config.record or config.replay
        self._takes_own = asked == {"auto"} and not studies and config.cuda_graphs != "on"
        self._asked = SPLIT if config.replay else Backward.of(config.split_backward)
        self._log, self._prepared, self._free = log, prepared, free
        self._model: Sequence[torch.nn.Module] = ()
        self._numbers: set[int] = set()
        """Numbers of microbatches of the model's steps."""
        self._ways: list[Way] = [SPLIT]
        self._ours = SPLIT
        """The way of ours before a race, and where megatron-core's schedule cannot run a step."""
        self._chosen = self._won = self._graphed = self._ways[0]
        self.binds_graphs = False
        """CUDA graphs are captured or replayed in the step that runs."""
        self._num_steps = 0
        """Training steps since the model came, or since a race began anew."""
        self._turns: list[_Turn] = []
        self._place = 0
        self._timed = _TIMED
        self._spoilt = False
        """The step before does not count."""
        self._steps: list[tuple[float, float]] = []
        """Seconds and work of the steps that ranks have not compared yet."""
        self._tokens: list[int] = []
        self._work = self._unit = self._usual = self._began = 0.0
        self._drift = _DRIFT
        self.record: dict[str, float] = {}
        """Counters of a trace: ms of a step of each way in the last race, and 1 for its winner."""

    @property
    def _races(self) -> bool:
        return self._place < len(self._turns)

    def leaves(self, call: StepCall) -> bool:
        """True if a step goes to megatron-core's own schedule, which has won."""
        return self._model == call.model and not self._races and self._chosen is None

    @contextlib.contextmanager
    def step(self, call: StepCall, keywords: Mapping[str, Any]) -> Iterator[Way]:
        """Give the way of a step with these keywords, and time it. In some training steps this is
        a collective of all ranks that train the model. Evaluations keep ours during a race, and
        then follow the winner.
        """
        if call.forward_only:
            yield None if self.leaves(call) and can_run(call, keywords) else FUSED
            return
        way = self._next(call, keywords)
        self.binds_graphs = way == self._graphed
        runs = way is not None or can_run(call, keywords)
        captures, begin = self._prepared.num_captures, time.perf_counter()
        yield way if runs else self._ours
        self._work = sum(self._tokens) if call.varies else call.num_microbatches
        self._tokens.clear()
        if self._races:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            took = time.perf_counter() - begin if runs else math.inf
            self._steps.append((took, self._work))
            self._spoilt = not runs or self._prepared.num_captures != captures

    def counted(self, call: StepCall) -> StepCall:
        """The call, in whose forward steps tokens are counted where lengths are unlike."""
        watched = len(self._ways) > 1 and not call.forward_only and call.varies
        return counted(call, self._tokens.append) if watched else call

    def _next(self, call: StepCall, keywords: Mapping[str, Any]) -> Way:
        if self._model != call.model:
            self._model, self._drift = call.model, _DRIFT
            self._numbers.clear()
            self._begin(self._all_ways(call))
            self._graphed = self._ours
        self._num_steps += 1
        self._numbers.add(call.num_microbatches)
        if len(self._ways) == 1 or self._num_steps <= WARM_UP_STEPS:
            return self._chosen
        if not self._turns:
            self._draw_up(call, keywords)
        elif self._races:
            self._count(call)
        else:
            self._watch(call)
        return self._turns[self._place].way if self._races else self._chosen

    def _all_ways(self, call: StepCall) -> list[Way]:
        """The ways that settings leave open. Layers that are recomputed whole have fused backwards:
        a deferred weight gradient keeps what they have freed.
        """
        ours: list[Way] = [self._asked] if self._asked else [FUSED, SPLIT]
        if not self._asked and getattr(call.config, "recompute_granularity", None) == "full":
            ours = [FUSED]
            off = setting("split_backward", "off")
            why = "recompute_granularity='full' asks for little memory"
            self._log(Text(f"dynamic pipeline: {off} is chosen: {why}", off))
        return [None, *ours] if self._takes_own else ours

    def _begin(self, ways: list[Way]) -> None:
        """Begin a race after some steps of ours."""
        self._ways, self._turns, self._place, self._num_steps = ways, [], 0, 0
        self._steps.clear()
        self._usual, self._ours = 0.0, ways[-1] or SPLIT
        self._chosen = self._ours

    def _draw_up(self, call: StepCall, keywords: Mapping[str, Any]) -> None:
        """Agree on the ways that can run on all ranks. Fused backwards are not tried where nothing
        is deferred, and where all ranks replay CUDA graphs, which launch W as fast as B.
        """
        number, varied = call.num_microbatches, call.varies or len(self._numbers) > 1
        own, defer = can_run(call, keywords), any(self._prepared.num_pieces)
        cannot, most, minus_fewest, unlike, defers, eager = _largest(
            call, not own, number, -number, varied, defer, not self._prepared.settles(call)
        )
        ways = list(self._ways)
        if None in ways and (cannot or most != -minus_fewest):
            ways.remove(None)
        if FUSED in ways and SPLIT in ways and not (defers and eager):
            ways.remove(FUSED)
        self._timed, self._unit = _TIMED_UNLIKE if unlike else _TIMED, 0.0
        self._ways = ways
        if len(ways) > 1:
            self._turns = [_Turn(way) for way in ways]
        else:
            self._chosen = ways[0]

    def _agreed(self, call: StepCall) -> tuple[list[float], bool]:
        """The seconds of each kept step on its slowest rank, for work like the race's first, and
        whether the last one does not count on some rank.
        """
        values = [value for step in self._steps for value in step]
        spoilt, *found = _largest(call, self._spoilt, *values)
        self._steps.clear()
        times = []
        for seconds, work in zip(found[::2], found[1::2], strict=True):
            self._unit = self._unit or work
            times.append(seconds * self._unit / work if work else seconds)
        return times, bool(spoilt)

    def _count(self, call: StepCall) -> None:
        """Count the step before, and go on to the next turn or to the race's end."""
        turn = self._turns[self._place]
        (seconds,), spoilt = self._agreed(call)
        turn.num_steps += 1
        turn.least = min(turn.least, seconds)
        if turn.num_steps > 1 and not spoilt:
            turn.timed.append(seconds)
        if len(turn.timed) == self._timed or turn.num_steps == _LONGEST_TURN:
            self._place += 1
            if not self._races:
                self._decide()

    def _decide(self) -> None:
        """Keep the fastest way, say so, and free what the others need."""
        best = min(turn.seconds for turn in self._turns)
        way = next(turn.way for turn in self._turns if turn.seconds <= (1.0 + _TIE) * best)
        graphs = self._prepared.replays
        names = [_name(t.way, graphs=graphs and t.way == self._graphed) for t in self._turns]
        times = {name: 1e3 * t.seconds for name, t in zip(names, self._turns, strict=True)}
        winner = names[self._ways.index(way)]
        each = ", ".join(f"{name} {ms:.4g} ms" for name, ms in times.items())
        self._log(f"dynamic pipeline: raced: {each}: {winner} runs")
        self.record = {f"race: {name}": ms for name, ms in times.items()} | {f"runs: {winner}": 1}
        if way != self._won:
            self._won, self._drift = way, _DRIFT
        if way is None:
            self._free()
        elif way != self._graphed:
            self._prepared.drop_graphs()
        self._chosen, self._began = way, time.perf_counter()

    def _watch(self, call: StepCall) -> None:
        """Begin another race among close ways if steps have become slower or faster."""
        now = time.perf_counter()
        self._steps.append((now - self._began, self._work))
        self._began = now
        if len(self._steps) < _WINDOW:
            return
        median = statistics.median(self._agreed(call)[0])
        self._usual = self._usual or median
        drift = abs(median / self._usual - 1.0)
        if drift > self._drift:
            self._drift *= 2.0  # unless another way wins: times of some runs never rest
        elif self._num_steps < _AGAIN:
            return
        best = min(turn.seconds for turn in self._turns)
        near = [t.way for t in self._turns if t.seconds <= (1.0 + _BEHIND + drift) * best]
        if len(near) > 1:
            self._free()
            self._begin(near)


def _name(way: Way, *, graphs: bool) -> str:
    """A way in words."""
    if way is None:
        return "megatron-core"
    return f"ours ({'split' if way.split else 'fused'}{', graphs' if graphs else ''})"


def _largest(call: StepCall, *values: float) -> list[float]:
    """The largest of each value over all ranks that train the model; a collective of them."""
    groups, found = call.pg_collection, list(values)
    for group in (groups.tp, groups.pp, groups.dp_cp):
        if group.size() > 1:
            ranks = StageGroup(group=group)
            found = ranks.largest(*found, device=call.boundary_example().device)
    return found
