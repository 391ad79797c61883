"""The layout planner: layers of each stage, number of chunks, memory cap.

No schedule can beat its busiest rank, so layers must balance the ranks, embedding and head
included. For each number of chunks the planner balances the ranks, then moves single layers as long
as the simulated iteration gets shorter. Of the result and Megatron's own layout it takes the better
one that fits. ``--dpp-plan`` and ``megatron-dpp plan`` call it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron.dpp.errors import ConfigError
from megatron.dpp.schedule import Action, Kind, LastRank, Memory
from megatron.dpp.sim.costs import Shape
from megatron.dpp.sim.measured import MeasuredCosts
from megatron.dpp.sim.result import Result
from megatron.dpp.sim.schedules import ScheduleConfig
from megatron.dpp_train.cost.model_costs import ModelCosts, SliceCosts, from_measured
from megatron.dpp_train.cost.shape import LayerLayout

CAPS = ("strict", "megatron", "1.5p", "2p")
_WORTH_MEMORY = 0.01
"""Share of an iteration that a higher cap must gain."""
_WORTH = 0.002
"""Share of an iteration that a change of layout must gain."""


@dataclass(frozen=True)
class Prediction:
    """A simulated iteration: times in seconds, memory in bytes by rank. ``bubble`` is the share of
    it that ranks wait, on average; ``key_bytes`` the part of ``peak_bytes`` that keys, values and
    their gradients take, ``slot_bytes`` that of CUDA graphs' slots.
    """

    layout: LayerLayout
    cap: str
    seconds: float
    busiest_seconds: float
    peak_bytes: tuple[float, ...]
    bubble: float
    key_bytes: tuple[float, ...]
    slot_bytes: tuple[float, ...]


def from_run(measured: MeasuredCosts, layers: Sequence[int]) -> tuple[ModelCosts, float]:
    """The parts of a model whose run had ``layers[s]`` layers on stage ``s``, and the factor by
    which their times were lengthened.

    With the factor the run, simulated with its own layout and the default cap, takes as long as
    measured. So predictions include what a simulation does not know: hiccups, launches, late
    decisions. The factor is 1.0 where the run's time is not known.

    Raises:
        DataError: as :func:`~megatron.dpp_train.cost.model_costs.from_measured`.
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
    settings = ("auto", "auto") if run.dynamic else ("megatron", "megatron")
    factor = run.seconds / planner.predict(layout, *settings).seconds
    return model.lengthened(factor), factor


class Planner:
    """Searches layouts of one model on ``num_ranks`` ranks.

    Args:
        num_microbatches: of an iteration.
        memory_bytes: of each rank, for weights, optimizer and activations; None is no limit.
        split_backward: ``W`` are tasks of their own; static schedules have a fused backward.
        most_simulated: microbatches that are simulated; each further one adds the busiest rank's
            own work on it. None simulates all.
        seeds: iterations to average over where task times vary.
        policy: of the schedule.
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
        policy: str = "auto",
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
        self.num_simulated = min(num_microbatches, most_simulated or num_microbatches)
        self._seeds = list(range(seeds)) if model.sigma else [None]
        self._max_tasks = max_tasks
        self.policy = policy

    def predict(self, layout: LayerLayout, cap: str, policy: str | None = None) -> Prediction:
        """Simulate ``layout`` with this cap and policy, by default the planner's."""
        shape = self._shape(layout)
        config = ScheduleConfig(
            policy=policy or self.policy,
            cap=cap,
            split_backward=self._split,
            w_pieces=layout.layers,
            memory=self._memory(layout.layers),
            kappa=self._kappa(),
        )
        runs = [
            config.run(shape, self.model.costs(shape, layout.layers, seed)) for seed in self._seeds
        ]
        times = [self._whole(run) for run in runs]
        peaks, keys, slots = self._peak_bytes(layout, config, runs[0])
        return Prediction(
            layout,
            cap,
            statistics.fmean(seconds for seconds, _, _ in times),
            statistics.fmean(busiest for _, busiest, _ in times),
            peaks,
            statistics.fmean(1 - own / seconds for seconds, _, own in times),
            keys,
            slots,
        )

    @property
    def _per_microbatch(self) -> int:
        """Units of a microbatch."""
        return len(self.model.slices.tokens) if self.model.slices else 1

    def _shape(self, layout: LayerLayout) -> Shape:
        """The units that are simulated."""
        shape = Shape(self.num_ranks, layout.num_chunks, self.num_simulated)
        slices = self.model.slices
        if slices is None:
            return shape
        return dataclasses.replace(
            shape,
            num_microbatches=self.num_simulated * len(slices.tokens),
            sizes=self.num_simulated * slices.tokens,
            largest=sum(slices.tokens),
            groups=self.num_simulated * (len(slices.tokens),),
        )

    def _kappa(self) -> float:
        """Memory of a microbatch's keys, values and their gradients over its activations'."""
        slices = self.model.slices
        if slices is None:
            return 0.0
        keys = slices.key_bytes + slices.gradient_bytes
        return keys * slices.tokens[0] / sum(slices.tokens) / self.model.layer.activation_bytes

    def _whole(self, run: Result) -> tuple[float, float, float]:
        """Seconds of a whole iteration of which ``run`` has the first microbatches, and of the
        busiest and the average rank's own work in it.
        """
        times = self.num_microbatches / self.num_simulated
        busiest, own = max(run.own), statistics.fmean(run.own)
        return run.makespan + (times - 1) * busiest, times * busiest, times * own

    def default_layout(self, num_chunks: int) -> LayerLayout | None:
        """Megatron's own, the same number of layers on every stage; None if they do not divide."""
        num_stages = self.num_ranks * num_chunks
        if self.model.num_layers % num_stages:
            return None
        return LayerLayout(self.num_ranks, (self.model.num_layers // num_stages,) * num_stages)

    def best(
        self, chunks: Iterable[int], caps: Sequence[str] = CAPS, *, within: float = math.inf
    ) -> list[Prediction]:
        """The best layout and cap for each number of chunks that fits, the fastest first.

        Args:
            caps: the smallest first. A number of chunks for which one is too small is left out.
            within: leaves out a number of chunks whose balanced layout cannot come this near to the
                fastest so far, as a share of its time.

        Raises:
            ConfigError: none fits; says why.
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
        """The result of the search and, where it may be better, the default layout: single moves do
        not reach every layout, and ignore memory.
        """
        layout = self.improve(self.balanced(num_chunks))
        tried = self._with_caps(layout, caps)
        default = self.default_layout(num_chunks)
        fastest = min((p.seconds for p in tried if self.fits(p)), default=math.inf)
        if default is not None and default != layout and self.least_seconds(default) < fastest:
            tried += self._with_caps(default, caps)
        return tried

    def _with_caps(self, layout: LayerLayout, caps: Sequence[str]) -> list[Prediction]:
        """``layout`` with each cap, until no higher cap can be better."""
        tried = []
        enough = self.least_seconds(layout) * (1 + _WORTH)
        for cap in caps:
            tried.append(self.predict(layout, cap))
            if tried[-1].seconds <= enough:
                break
        return tried

    def fits(self, prediction: Prediction) -> bool:
        """Every rank's peak is within the memory."""
        return self.memory_bytes is None or max(prediction.peak_bytes) <= self.memory_bytes

    def balanced(self, num_chunks: int) -> LayerLayout:
        """Deals layers out one by one, each to the rank, and there the stage, with the least
        work."""
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

    def improve(self, layout: LayerLayout) -> LayerLayout:
        """Moves single layers between stages as long as the simulated iteration gets shorter."""
        units = self.num_simulated * self._per_microbatch
        tasks = units * (2 * len(layout.layers) + self.model.num_layers) * len(self._seeds)
        left = self._max_tasks // tasks
        best = self.predict(layout, "auto")
        while left > 0:
            aim = best.seconds * (1 - _WORTH)
            moves = [move for move in self.moves(best.layout) if self.least_seconds(move) < aim]
            del moves[left:]
            left -= len(moves)
            tried = [self.predict(move, "auto") for move in moves]
            better = min(tried, key=lambda p: p.seconds, default=best)
            if better.seconds >= aim:
                break
            best = better
        return best.layout

    def least_seconds(self, layout: LayerLayout) -> float:
        """Lower bound of any schedule of ``layout``: a rank's own work, which starts when the first
        input has passed the stages before it.
        """
        forward, backward, weight = self._stage_times(layout.layers)
        units = self.num_microbatches * self._per_microbatch
        more = self.model.slices.more[0][Kind.F] if self.model.slices else 0.0
        least = begins = 0.0
        for rank in range(self.num_ranks):
            stages = slice(rank, None, self.num_ranks)
            each = sum(forward[stages]) + sum(backward[stages]) + sum(weight[stages])
            least = max(least, begins + units * each)
            begins += forward[rank] + layout.layers[rank] * more + self.model.hop
        return least

    def moves(self, layout: LayerLayout) -> list[LayerLayout]:
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
        """Each rank's memory as training measures it: of whole microbatches, cut or not. Slots are
        kept whole until the last ``W``.
        """
        model, found = self.model, []
        tokens = model.slices.tokens if model.slices else (1,)
        whole_row = sum(tokens) / tokens[0]
        sizes, deferred = model.activation_bytes(layers), model.deferred_bytes(layers)
        for rank in range(self.num_ranks):
            own = slice(rank, None, self.num_ranks)
            last = LastRank.of(sizes[own], layers[own])
            is_last = rank == self.num_ranks - 1
            activation, kept = last.activation_bytes if is_last else max(sizes[own]), deferred[own]
            slots = self.model.slot_layers is not None
            whole = self._slot_bytes(layers, rank) if slots else 0.0
            found.append(
                Memory(
                    activation_bytes=whole_row * (whole or activation),
                    deferred_bytes=whole_row * (whole or max(kept)),
                    head_room=last.head_room,
                    last_layers=last.layers,
                    slots=slots,
                )
            )
        return tuple(found)

    def _slot_bytes(self, layers: Sequence[int], rank: int) -> float:
        return self.model.slot_bytes(layers[rank :: self.num_ranks])

    def _peak_bytes(
        self, layout: LayerLayout, config: ScheduleConfig, run: Result
    ) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """Peak memory of each rank, and what of it keys and slots take."""
        model, layers = self.model, layout.layers
        state = model.state_bytes(layers, self.num_ranks)
        slots = [0.0] * self.num_ranks
        if model.slot_layers is not None:
            model, numbers = model.without_layers(), self._num_slots(layout, config, run)
            slots = [n * self._slot_bytes(layers, rank) for rank, n in enumerate(numbers)]
        held, keys = zip(*self._held_bytes(model, layout, run), strict=True)
        return tuple(map(sum, zip(state, held, slots, strict=True))), keys, tuple(slots)

    def _num_slots(self, layout: LayerLayout, config: ScheduleConfig, run: Result) -> list[float]:
        """CUDA-graph slots of each rank. They are never freed, and the steps in which graphs are
        captured are so uneven that a rank fills its cap; a fixed order does not.
        """
        if config.policy == "megatron" and not self._split:
            return run.peak_held
        caps = config.caps(Shape(self.num_ranks, layout.num_chunks, self.num_simulated))
        most = self.num_microbatches * layout.num_chunks
        return [min(math.floor(cap), most) for cap in caps]

    def _held_bytes(
        self, model: ModelCosts, layout: LayerLayout, run: Result
    ) -> list[tuple[float, float]]:
        """Peak of each rank's activations and keys, and the keys at that time. ``B`` frees an
        activation, but for what its layers' ``W`` need, of which each piece frees a layer's share.
        """
        sizes = model.activation_bytes(layout.layers)
        deferred = model.deferred_bytes(layout.layers) if self._split else [0.0] * len(sizes)
        peaks = []
        for rank, slots in enumerate(run.slots):
            held = keys = 0.0
            peak = (0.0, 0.0)
            for action, _, _ in slots:
                stage = action.chunk * self.num_ranks + rank
                share, more = _of_slice(model.slices, action)
                keys += more * layout.layers[stage]
                if action.kind == Kind.W:
                    held -= share * deferred[stage] / layout.layers[stage]
                elif action.kind == Kind.B:
                    held += share * (deferred[stage] - sizes[stage])
                else:
                    held += share * sizes[stage]
                peak = max(peak, (held + keys, keys))
            peaks.append(peak)
        return peaks


def best_of(
    planners: Mapping[int, Planner], caps: Sequence[str] = CAPS, *, within: float = math.inf
) -> list[Prediction]:
    """:meth:`Planner.best` of numbers of chunks that each have a planner, or share one: what a
    microbatch is cut into may depend on their number.
    """
    found: list[Prediction] = []
    refused: list[ConfigError] = []
    for planner in {id(each): each for each in planners.values()}.values():
        own = [number for number, each in planners.items() if each is planner]
        try:
            found += planner.best(own, caps, within=within)
        except ConfigError as problem:
            refused.append(problem)
    if not found:
        raise refused[0]
    return sorted(found, key=lambda p: p.seconds)


def _of_slice(slices: SliceCosts | None, action: Action) -> tuple[float, float]:
    """A unit's tokens over the largest's, and the bytes of a layer's keys that its task takes."""
    if slices is None:
        return 1.0, 0.0
    last = len(slices.tokens) - 1
    place, more = action.microbatch % (last + 1), 0.0
    if action.kind is Kind.F and place == 0:
        more = slices.key_bytes
    elif action.kind is Kind.B and place == last:
        more = slices.gradient_bytes
    elif action.kind is Kind.B and place == 0:
        more = -(slices.key_bytes + slices.gradient_bytes)
    return slices.tokens[place] / slices.tokens[0], more
