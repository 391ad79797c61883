"""The layout planner: which layers on which stage, how many chunks, how much memory.

No schedule can beat its busiest rank, so layers have to lie where they balance, the embedding and
the head counted. For each number of chunks the planner balances the ranks, then moves single layers
as long as the simulated iteration gets shorter; of what that ends with and Megatron's own layout it
takes the better that fits. Called by ``--dpp-plan`` and ``profiling/plan.py``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.dpp.errors import ConfigError
from megatron.dpp.plan.model_costs import ModelCosts, from_measured
from megatron.dpp.plan.shape import LayerLayout
from megatron.dpp.schedule import Kind, Memory, head_room
from megatron.dpp.sim.costs import Shape
from megatron.dpp.sim.measured import MeasuredCosts
from megatron.dpp.sim.result import Result
from megatron.dpp.sim.schedules import ScheduleConfig

CAPS = ("strict", "megatron", "1.5p", "2p")
_WORTH_MEMORY = 0.01
"""What a higher cap has to gain."""
_WORTH = 0.002
"""A change of layout that gains less than this share is noise: the simpler one stays."""


@dataclass(frozen=True)
class Prediction:
    """A simulated iteration; times in seconds, memory in bytes by rank. ``bubble`` is the share of
    the iteration that a rank waits, on average over ranks.
    """

    layout: LayerLayout
    cap: str
    seconds: float
    busiest_seconds: float
    peak_bytes: tuple[float, ...]
    bubble: float


def from_run(measured: MeasuredCosts, layers: Sequence[int]) -> tuple[ModelCosts, float]:
    """The parts of a model whose run had ``layers[s]`` layers on stage ``s``, and by how much they
    were lengthened: so much that the run, simulated with its own layout and the default cap, takes
    as long as it did. What a simulation does not know (hiccups, launches, how late a schedule
    decides) then counts in its predictions, too. 1.0 where the run's time is not known.

    Raises:
        DataError: as :func:`~megatron.dpp.plan.model_costs.from_measured`.
    """
    model, run = from_measured(measured, layers), measured.run
    if run is None:
        return model, 1.0
    planner = Planner(
        model,
        measured.num_ranks,
        run.num_microbatches,
        split_backward=run.dynamic and measured.split,
    )
    layout = LayerLayout(measured.num_ranks, tuple(layers))
    words = ("auto", "dynamic") if run.dynamic else ("megatron", "megatron")
    factor = run.seconds / planner.predict(layout, *words).seconds
    return model.lengthened(factor), factor


class Planner:
    """Searches layouts of one model on ``num_ranks`` ranks.

    Args:
        model: what its parts cost.
        num_microbatches: of an iteration.
        memory_bytes: of each rank, for weights, optimizer and activations; None is no limit.
        split_backward: ``W`` apart from ``B``, as in training; static schedules have it fused.
        most_simulated: microbatches that are simulated; of those beyond, each takes what the
            busiest rank's own work on it does. None simulates all.
        seeds: iterations to average over where task times vary.
        max_tasks: bound of the search for each number of chunks, in simulated tasks; 100,000 take
            a second.
    """

    def __init__(
        self,
        model: ModelCosts,
        num_ranks: int,
        num_microbatches: int,
        *,
        memory_bytes: float | None = None,
        split_backward: bool = True,
        most_simulated: int | None = None,
        seeds: int = 3,
        max_tasks: int = 500_000,
    ) -> None:
        if num_ranks < 1 or num_microbatches < 1:
            raise ConfigError(
                f"{num_ranks} ranks, {num_microbatches} microbatches: both must be at least 1"
            )
        self.model = model
        self.num_ranks = num_ranks
        self.num_microbatches = num_microbatches
        self.memory_bytes = memory_bytes
        self._split = split_backward
        self._num_simulated = min(num_microbatches, most_simulated or num_microbatches)
        self._seeds = list(range(seeds)) if model.sigma else [None]
        self._max_tasks = max_tasks

    def predict(self, layout: LayerLayout, cap: str, policy: str = "dynamic") -> Prediction:
        """Simulate ``layout``."""
        shape = Shape(self.num_ranks, layout.num_chunks, self._num_simulated)
        plan = ScheduleConfig(
            policy=policy,
            cap=cap,
            split_backward=self._split,
            w_pieces=layout.layers,
            memory=self._memory(layout.layers),
        )
        runs = [
            plan.run(shape, self.model.costs(shape, layout.layers, seed)) for seed in self._seeds
        ]
        times = [self._whole(run) for run in runs]
        return Prediction(
            layout,
            cap,
            statistics.fmean(seconds for seconds, _, _ in times),
            statistics.fmean(busiest for _, busiest, _ in times),
            self._peak_bytes(layout, plan, runs[0]),
            statistics.fmean(1 - own / seconds for seconds, _, own in times),
        )

    def _whole(self, run: Result) -> tuple[float, float, float]:
        """Seconds of an iteration of which ``run`` has the first microbatches, and of the busiest
        and the average rank's own work in it."""
        times = self.num_microbatches / self._num_simulated
        busiest, own = max(run.own), statistics.fmean(run.own)
        return run.makespan + (times - 1) * busiest, times * busiest, times * own

    def default_layout(self, num_chunks: int) -> LayerLayout | None:
        """Megatron's own: the same number of layers on every stage; None where that does not work
        out.
        """
        num_stages = self.num_ranks * num_chunks
        if self.model.num_layers % num_stages:
            return None
        return LayerLayout(self.num_ranks, (self.model.num_layers // num_stages,) * num_stages)

    def best(
        self, chunks: Iterable[int], caps: Sequence[str] = CAPS, *, within: float = math.inf
    ) -> list[Prediction]:
        """The best layout and cap for each number of chunks that fits, the fastest first.

        Args:
            caps: the smallest first; some may be too small for some number of chunks, which is left
                out then.
            within: a number of chunks is left out, too, if its balanced layout cannot come this
                near to the fastest of the numbers before it, as a share of that.

        Raises:
            ConfigError: none fits; says what is missing.
        """
        found: list[Prediction] = []
        refused = []
        for num_chunks in chunks:
            if self.model.num_layers < self.num_ranks * num_chunks - 2:
                refused.append(f"{num_chunks} chunks need more layers")
                continue
            fastest = min((p.seconds for p in found), default=math.inf)
            if self.least_seconds(self.balanced(num_chunks)) > fastest * (1 + within):
                continue
            try:
                tried = self._tried(num_chunks, caps)
            except ConfigError as problem:
                refused.append(f"{num_chunks} chunks: {problem}")
                continue
            fitting = [p for p in tried if self.fits(p)]
            if not fitting:
                need = min(max(p.peak_bytes) for p in tried)
                refused.append(f"{num_chunks} chunks need {need / 2**30:.1f} GiB on a rank")
                continue
            fastest = min(p.seconds for p in fitting)
            found.append(next(p for p in fitting if p.seconds <= fastest * (1 + _WORTH_MEMORY)))
        if not found:
            raise ConfigError("no layout fits: " + "; ".join(refused))
        return sorted(found, key=lambda p: p.seconds)

    def _tried(self, num_chunks: int, caps: Sequence[str]) -> list[Prediction]:
        """What the search ends with and, where that may be better, the default layout: single moves
        do not lead everywhere, and they do not look at memory.
        """
        layout = self.improve(self.balanced(num_chunks))
        tried = self._with_caps(layout, caps)
        default = self.default_layout(num_chunks)
        fastest = min((p.seconds for p in tried if self.fits(p)), default=math.inf)
        if default is not None and default != layout and self.least_seconds(default) < fastest:
            tried += self._with_caps(default, caps)
        return tried

    def _with_caps(self, layout: LayerLayout, caps: Sequence[str]) -> list[Prediction]:
        """``layout`` with each cap, up to one that no higher cap can beat."""
        tried = []
        enough = self.least_seconds(layout) * (1 + _WORTH)
        for cap in caps:
            tried.append(self.predict(layout, cap))
            if tried[-1].seconds <= enough:
                break
        return tried

    def fits(self, prediction: Prediction) -> bool:
        """Whether every rank's peak is within the memory."""
        return self.memory_bytes is None or max(prediction.peak_bytes) <= self.memory_bytes

    def balanced(self, num_chunks: int) -> LayerLayout:
        """Layers dealt out one by one to the rank, and there the stage, that has least work."""
        num_stages = self.num_ranks * num_chunks
        layers = [1] * num_stages
        layers[0] = layers[-1] = 0
        if num_stages == 1:
            return LayerLayout(self.num_ranks, (self.model.num_layers,))
        if num_stages > 2 and self.model.num_layers < num_stages - 2:
            raise ConfigError(
                f"{self.model.num_layers} layers on {num_stages} stages: each but the first and "
                "the last needs one"
            )
        layer = sum(self.model.layer.times)
        stage = [sum(times) for times in zip(*self._stage_times(layers), strict=True)]
        rank = [sum(stage[r :: self.num_ranks]) for r in range(self.num_ranks)]
        for _ in range(self.model.num_layers - sum(layers)):
            least = min(range(self.num_ranks), key=lambda r: rank[r])
            target = min(range(least, num_stages, self.num_ranks), key=lambda s: stage[s])
            layers[target] += 1
            stage[target] += layer
            rank[least] += layer
        return LayerLayout(self.num_ranks, tuple(layers))

    def improve(self, layout: LayerLayout, cap: str = "auto") -> LayerLayout:
        """Move single layers between stages as long as the simulated iteration gets shorter."""
        once = self._num_simulated * (2 * len(layout.layers) + self.model.num_layers)
        tasks = once * len(self._seeds)
        left = self._max_tasks // tasks
        best = self.predict(layout, cap)
        while left > 0:
            aim = best.seconds * (1 - _WORTH)
            moves = [move for move in self._moves(best.layout) if self.least_seconds(move) < aim]
            del moves[left:]
            left -= len(moves)
            tried = [self.predict(move, cap) for move in moves]
            better = min(tried, key=lambda p: p.seconds, default=best)
            if better.seconds >= aim:
                break
            best = better
        return best.layout

    def least_seconds(self, layout: LayerLayout) -> float:
        """What no schedule of ``layout`` can beat: a rank's own work, which begins when the first
        input has come through the stages before it.
        """
        forward, backward, weight = self._stage_times(layout.layers)
        least = begins = 0.0
        for rank in range(self.num_ranks):
            stages = slice(rank, None, self.num_ranks)
            each = sum(forward[stages]) + sum(backward[stages]) + sum(weight[stages])
            least = max(least, begins + self.num_microbatches * each)
            begins += forward[rank] + self.model.hop
        return least

    def _moves(self, layout: LayerLayout) -> list[LayerLayout]:
        """Layouts with one layer elsewhere, those that relieve the busiest ranks first."""
        work = [sum(times) for times in zip(*self._stage_times(layout.layers), strict=True)]
        rank = [sum(work[r :: self.num_ranks]) for r in range(self.num_ranks)]
        last, moves = len(layout.layers) - 1, []
        for source, count in enumerate(layout.layers):
            if count <= (0 if source in (0, last) else 1):
                continue
            for target in range(last + 1):
                gain = rank[source % self.num_ranks] - rank[target % self.num_ranks]
                if source != target and gain >= 0:
                    moves.append((-gain, source, target))
        found = []
        for _, source, target in sorted(moves):
            layers = list(layout.layers)
            layers[source] -= 1
            layers[target] += 1
            found.append(LayerLayout(self.num_ranks, tuple(layers)))
        return found

    def _stage_times(self, layers: Sequence[int]) -> list[list[float]]:
        return [self.model.stage_times(layers, kind) for kind in Kind]

    def _memory(self, layers: Sequence[int]) -> tuple[Memory, ...]:
        """As training measures it: of slots all of it is kept until the last ``W``."""
        sizes, deferred = self.model.activation_bytes(layers), self.model.deferred_bytes(layers)
        found = []
        for rank in range(self.num_ranks):
            own = slice(rank, None, self.num_ranks)
            activation, kept = max(sizes[own]), max(deferred[own])
            if self.model.slot_layers is not None:
                activation = kept = self._slot_bytes(layers, rank)
            room = head_room(sizes[own], layers[own])
            found.append(Memory(activation_bytes=activation, deferred_bytes=kept, head_room=room))
        return tuple(found)

    def _slot_bytes(self, layers: Sequence[int], rank: int) -> float:
        return self.model.slot_bytes(layers[rank :: self.num_ranks])

    def _peak_bytes(
        self, layout: LayerLayout, plan: ScheduleConfig, run: Result
    ) -> tuple[float, ...]:
        """Peak of each rank."""
        model, layers = self.model, layout.layers
        state = model.state_bytes(layers, self.num_ranks)
        if model.slot_layers is None:
            held = self._held_bytes(model, layout, run)
            return tuple(map(sum, zip(state, held, strict=True)))
        outside = self._held_bytes(model.without_layers(), layout, run)
        return tuple(
            state[rank] + held + slots * self._slot_bytes(layers, rank)
            for rank, (held, slots) in enumerate(
                zip(outside, self._num_slots(layout, plan, run), strict=True)
            )
        )

    def _num_slots(self, layout: LayerLayout, plan: ScheduleConfig, run: Result) -> list[float]:
        """Slots of each rank. They are never given back, and the steps in which graphs are captured
        are so uneven that in one of them a rank fills its cap; an order that is fixed does not.
        """
        if plan.policy == "megatron" and not self._split:
            return run.peak_held
        caps = plan.caps(Shape(self.num_ranks, layout.num_chunks, self._num_simulated))
        most = self.num_microbatches * layout.num_chunks
        return [min(math.floor(cap), most) for cap in caps]

    def _held_bytes(self, model: ModelCosts, layout: LayerLayout, run: Result) -> list[float]:
        """The most that activations take on each rank: ``B`` frees one, or leaves what its layers'
        ``W`` need, of which each piece frees a layer's.
        """
        sizes = model.activation_bytes(layout.layers)
        deferred = model.deferred_bytes(layout.layers) if self._split else [0.0] * len(sizes)
        peaks = []
        for rank, slots in enumerate(run.slots):
            held = peak = 0.0
            for action, _, _ in slots:
                stage = action.chunk * self.num_ranks + rank
                if action.kind == Kind.W:
                    held -= deferred[stage] / layout.layers[stage]
                elif action.kind == Kind.B:
                    held += deferred[stage] - sizes[stage]
                else:
                    held += sizes[stage]
                peak = max(peak, held)
            peaks.append(peak)
        return peaks
