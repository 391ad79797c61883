"""Microbatches of unlike size: the figures of known cases, no deadlock, memory below the cap."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.dpp.direction import Direction
from megatron.dpp.errors import ConfigError, ScheduleError
from megatron.dpp.schedule import (
    Action,
    Allowance,
    Budget,
    Geometry,
    Kind,
    MemoryLimit,
    Reference,
    Scheduler,
    StaticSizes,
    parse_cap,
    peak_size,
    reference_order,
)
from megatron.dpp.sim.clock import simulate
from megatron.dpp.sim.costs import Costs, Hop, Shape
from megatron.dpp.sim.schedules import ScheduleConfig, run_static
from tests.schedule.test_properties import Pipeline, allowed

MIXED = (500, 1200, 700, 3000, 16000, 800, 1000, 400, 2500, 900, 6000, 1100, 300, 1500, 2000, 10000)
# (p, v, lengths): interleaved; Megatron's order with W; cap by count; cap by size with its peaks;
# cap R_r with its peaks; R_r. F = B = W = tokens / 1000 / v, no hops.
KNOWN = [
    (
        (2, 2, (1000, 8000, 2000, 1000)),
        (55.5, 45, 45, 43.5, 45),
        (24000, 23000),
        (20000, 17000),
        (20000, 17000),
    ),
    (
        (2, 1, (3000, 1000, 9000, 1000, 2000, 5000)),
        (106, 80, 90, 66, 89),
        (18000, 18000),
        (10000, 9000),
        (10000, 9000),
    ),
    (
        (4, 2, (1000, 2000, 8000, 1000, 4000, 1000, 16000, 2000)),
        (230.5, 164.5, 154, 154, 174),
        (64000, 64000, 56000, 50000),
        (56000, 53000, 44000, 39000),
        (57000, 53000, 44000, 39000),
    ),
    (
        (4, 2, MIXED),
        (334.4, 235.25, 242.05, 177.15, 233.2),
        (91000, 91000, 88000, 88000),
        (45800, 39800, 36400, 34200),
        (45800, 39900, 38000, 34200),
    ),
]


@pytest.mark.parametrize(("case", "makespans", "peaks", "tight_peaks", "least"), KNOWN)
def test_known_cases(case, makespans, peaks, tight_peaks, least):
    p, v, lengths = case
    shape, equal = Shape(p, v, len(lengths), lengths), Shape(p, v, len(lengths))
    rows = [[tokens / 1000 / v for tokens in lengths] for _ in range(p * v)]
    costs = Costs((rows, rows, rows), [Hop(0, 0)] * (p * v - 1))
    known = {"cap": "megatron", "sizes_at_start": True}
    ours = ScheduleConfig(**known).run(shape, costs)
    found = peak_sizes(p, v, lengths)
    lanes = schedulers(p, v, lengths, caps=found)
    tight = simulate(lanes, costs, split_backward=True)
    assert found == list(least)
    assert [
        run_static("interleaved" if v > 1 else "1f1b", shape, costs).makespan,
        ScheduleConfig(policy="megatron", **known).run(shape, costs).makespan,
        ScheduleConfig(cap="megatron").run(equal, costs).makespan,
        ours.makespan,
        tight.makespan,
    ] == pytest.approx(makespans)
    longest = max(lengths)
    assert [held * longest for held in ours.peak_held] == pytest.approx(peaks)
    assert [held * longest for held in tight.peak_held] == pytest.approx(tight_peaks)


def peak_sizes(p, v, lengths):
    """``R_r`` of each rank."""
    geometries = [Geometry(p, rank, v, len(lengths)) for rank in range(p)]
    return [peak_size(reference_order(geometry), lengths) for geometry in geometries]


def schedulers(p, v, lengths, caps, **more):
    """One per rank, with the sizes known at the start and caps in tokens."""
    longest = max(lengths)
    return [
        Scheduler(
            Geometry(p, rank, v, len(lengths)),
            cap=cap / longest,
            largest=longest,
            sizes=lengths,
            **more,
        )
        for rank, cap in enumerate(caps)
    ]


def heads_of(v):
    """Weights of chunks under which only the last one's activations count."""
    return (*[0.0] * (v - 1), 1.0)


class Sized(Pipeline):
    """A pipeline whose ranks learn sizes at the start, before a forward, or after it.

    Args:
        weights: of each chunk.
        heads: bound the last chunk's activations, too, as in Megatron's order.
        target: a soft limit in sizes.
    """

    def __init__(self, p, v, sizes, *, know, weights=(), heads=False, target=None, **settings):
        self.sizes, self.know, self.target = sizes, know, target
        self.weights, self.heads = tuple(weights), heads
        super().__init__(p, v, len(sizes), **settings)

    def scheduler(self, rank, **settings):
        """At ``R_r`` of the sizes that are known or assumed at the start."""
        largest, order = max(self.sizes), reference_order(Geometry(self.p, rank, self.v, self.m))
        sizes = self.sizes if self.know == "start" else None
        assumed = sizes or [largest] * self.m
        settings["cap"] = peak_size(order, assumed, self.weights) / largest
        limits = []
        if self.heads:
            of_head = heads_of(self.v)
            most = peak_size(order, assumed, of_head) / largest
            limits.append(MemoryLimit(most, of_head, deferred=False))
        if self.target is not None:
            limits.append(
                MemoryLimit(
                    self.target / largest,
                    self.weights,
                    assumed=1 + largest // 3,
                    soft=True,
                    unlike=True,
                )
            )
        return super().scheduler(
            rank, largest=largest, sizes=sizes, weights=self.weights, limits=limits, **settings
        )

    def deliver(self, key):
        direction, stage = key
        if self.know == "arrival" and direction != Direction.BACKWARD and stage < self.p:
            number = self.delivered.get(key, 0)
            self.ranks[stage % self.p].learn(number, self.sizes[number])
        super().deliver(key)

    def step(self, rank):
        moved = super().step(rank)
        if moved:
            (kind, chunk, microbatch, _), scheduler = self.ran[rank][-1], self.ranks[rank]
            assert scheduler.held <= scheduler.view.cap + 1e-6
            late = self.know == "forward" or (self.know == "arrival" and rank == 0)
            if late and kind == Kind.F and chunk == 0:
                scheduler.learn(microbatch, self.sizes[microbatch])
        return moved


def sized_cases(data):
    rng = data.draw(st.randoms(use_true_random=False))
    p, v = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    settings = {
        "know": data.draw(st.sampled_from(["start", "arrival", "forward"])),
        "weights": data.draw(
            st.one_of(st.just(()), st.lists(st.floats(0, 4), min_size=v, max_size=v))
        ),
        "heads": data.draw(st.booleans()),
        "target": data.draw(st.one_of(st.none(), st.integers(0, 200))),
    }
    return rng, p, v, tuple(sizes), settings


@settings(max_examples=150)
@given(st.data())
def test_any_choice_at_any_time_ends(data):
    """Drawn sizes, shares, pieces and choices at the tightest cap; nothing is held at the end."""
    rng, p, v, sizes, bounds = sized_cases(data)
    split = data.draw(st.booleans())
    pieces = tuple(data.draw(st.integers(0, 3)) for _ in range(v))
    beta = data.draw(st.floats(0, 1))

    def wild(view):
        options = allowed(view)
        return rng.choice(options) if options else None

    pipeline = Sized(p, v, sizes, policy=wild, split=split, w_pieces=pieces, beta=beta, **bounds)
    pipeline.finish(rng.randrange)
    pipeline.check(pieces if split else (0,) * v)


@settings(max_examples=60)
@given(st.data(), st.sampled_from(["dynamic", "depth-first", "megatron"]))
def test_built_in_policies_end(data, policy):
    rng, p, v, sizes, bounds = sized_cases(data)
    pipeline = Sized(p, v, sizes, policy=policy, **bounds)
    pipeline.finish(rng.randrange)
    pipeline.check((1,) * v)


def run_at_random(seed):
    """One pipeline of a seed's shape and sizes at the tightest cap."""
    rng = random.Random(seed)
    p, v, m = rng.randint(2, 4), rng.randint(1, 3), rng.randint(2, 8)
    sizes = tuple(rng.choice((1, 3, 10)) for _ in range(m))

    def forward_first(view):
        options = allowed(view)
        forwards = [action for action in options if action.kind == Kind.F]
        return rng.choice(forwards or options) if options else None

    Sized(p, v, sizes, know="start", policy=forward_first).finish(rng.randrange)


def test_without_the_walk_some_pipelines_get_stuck(monkeypatch):
    """So the tests above can fail."""
    for seed in range(60):
        run_at_random(seed)

    def fits(self, place, after):
        return self.in_flight + self.kept + self._steps[place] <= self.limit

    monkeypatch.setattr(Budget, "fits", fits)
    stuck = 0
    for seed in range(60):
        try:
            run_at_random(seed)
        except (AssertionError, ScheduleError):
            stuck += 1
    assert stuck > 5


def test_every_state_of_small_pipelines():
    """All orders of messages and tasks with sizes 1 and 3 at the least cap: none is stuck."""
    total = 0
    for p, v, m in ((2, 1, 4), (2, 2, 2), (2, 2, 3), (2, 2, 4), (3, 1, 4), (3, 2, 3), (2, 3, 3)):
        for sizes in itertools.product((1, 3), repeat=m):
            total += count_states(p, v, sizes)
    assert total > 10_000


@pytest.mark.parametrize("weights", [(1, 4), (2.5, 1), (0, 1)])
@pytest.mark.parametrize("heads", [False, True])
def test_every_state_with_chunks_of_unlike_weight(weights, heads):
    """One budget in bytes, or another of the LM head beside it."""
    total = 0
    for m in (2, 3):
        for sizes in itertools.product((1, 3), repeat=m):
            total += count_states(2, 2, sizes, weights, heads=heads)
    assert total > 400


def count_states(p, v, sizes, weights=(), *, heads=False):
    """Reachable states of a fused pipeline whose messages arrive at once."""
    m = len(sizes)
    references = [Reference(Geometry(p, rank, v, m)) for rank in range(p)]
    bounds = [(sizes, weights)] + [(sizes, heads_of(v))] * heads
    start = tuple((0,) * (2 * v) for _ in range(p))
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        after = list(moves(state, references, bounds))
        assert after or all(count == m for rank in state for count in rank), (sizes, state)
        fresh = [one for one in after if one not in seen]
        seen.update(fresh)
        todo += fresh
    return len(seen)


def moves(state, references, bounds):
    """The states after each task that may run; counts of a rank are F by chunk, then B."""
    p, v, m = len(state), len(state[0]) // 2, len(bounds[0][0])
    for rank, counts in enumerate(state):
        for slot in range(2 * v):
            done, (backward, chunk) = counts[slot], divmod(slot, v)
            if done == m or not has_input(state, rank, chunk, backward, done, p, v):
                continue
            reference = references[rank]
            if not backward and not all(fits(reference, counts, chunk, *one) for one in bounds):
                continue
            ran = (*counts[:slot], done + 1, *counts[slot + 1 :])
            yield (*state[:rank], ran, *state[rank + 1 :])


def has_input(state, rank, chunk, backward, done, p, v):
    stage = chunk * p + rank
    if not backward:
        return stage == 0 or state[(stage - 1) % p][(stage - 1) // p] > done
    if state[rank][chunk] <= done:
        return False
    return stage == p * v - 1 or state[(stage + 1) % p][v + (stage + 1) // p] > done


def fits(reference, counts, chunk, sizes, weights):
    """The real budget at its least cap, brought to the state of these counts."""
    v, end = len(counts) // 2, len(reference.order)
    least = peak_size(reference.order, sizes, weights)
    budget = Budget(reference, cap=least / max(sizes), largest=max(sizes), weights=weights)
    for microbatch, size in enumerate(sizes):
        budget.learn(microbatch, size, [0] * v)
    unrun = []
    for place, (kind, c, i, _) in enumerate(reference.order):
        if i >= counts[kind * v + c]:
            unrun.append(place)
        elif kind == Kind.F:
            budget.forward(place)
        else:
            budget.backward(place, 0)
    after = [0] * (end + 1)
    for place, following in zip([end, *unrun], [*unrun, end], strict=True):
        after[place] = following
    return budget.fits(reference.places[0][chunk][counts[chunk]], after)


def test_held_returns_to_zero_with_odd_shares():
    scheduler = Scheduler(
        Geometry(1, 0, 2, 5, w_pieces=(3, 7)),
        cap=10,
        beta=1 / 3,
        largest=97,
        sizes=(97, 1, 5, 13, 2),
    )
    while scheduler.next() is not None or not scheduler.done:
        scheduler.arrived(Direction.FORWARD, 1, scheduler.view.forwards_run[0])
        scheduler.arrived(Direction.BACKWARD, 0, scheduler.view.backwards_run[1])
    assert scheduler.held == 0


def test_a_small_forward_runs_where_a_large_one_does_not_fit():
    """Of 2.6 activations 1.4 or 1.6 are held: none of size 10 fits, and those of size 2 run."""
    scheduler = Scheduler(Geometry(2, 0, 2, 4), cap=2.6, largest=10, sizes=(10, 2, 2, 2))
    assert [str(scheduler.next()) for _ in range(3)] == ["0F0", "0F1", "0F2"]
    assert scheduler.next() is None and scheduler.held == pytest.approx(1.4)
    scheduler.arrived(Direction.FORWARD, 1, 2)
    assert [str(scheduler.next()) for _ in range(2)] == ["1F0", "1F1"]
    assert scheduler.held == pytest.approx(2.6)


def test_sizes_that_are_refused():
    scheduler = Scheduler(Geometry(2, 0, 1, 3), cap=3, largest=10)
    for microbatch, size, why in (
        (0, 11, "size 11; the memory cap was set for sizes from 0 to 10"),
        (3, 1, "microbatches 0 .. 2"),
    ):
        with pytest.raises(ScheduleError, match=why):
            scheduler.learn(microbatch, size)
    scheduler.learn(0, 4)
    with pytest.raises(ScheduleError, match="size 5, but had size 4 before"):
        scheduler.learn(0, 5)
    assert [str(scheduler.next()) for _ in range(2)] == ["0F0", "0F1"]
    scheduler.learn(1, 2)
    assert scheduler.held == pytest.approx(0.6)
    scheduler.arrived(Direction.BACKWARD, 0, 1)
    scheduler.run(Action.parse("0B0"))
    with pytest.raises(ScheduleError, match="microbatch 0, 3, comes after its first backward"):
        scheduler.learn(0, 3)


def test_a_cap_below_megatrons_order_of_these_sizes_is_refused():
    geometry = Geometry(2, 0, 1, 4)
    Scheduler(geometry, cap=1.4, largest=10, sizes=(10, 4, 4, 4))
    with pytest.raises(ConfigError, match=r"may hold 1.3 .* needs 1.4"):
        Scheduler(geometry, cap=1.3, largest=10, sizes=(10, 4, 4, 4))
    scheduler = Scheduler(geometry, cap=1.4, largest=10, sizes=(10, 4, 4, 4))
    with pytest.raises(ConfigError, match=r"needs 1\.5"):
        scheduler.restart((10, 5, 1, 1))
    with pytest.raises(ConfigError, match="needs 2;"):
        scheduler.restart()
    with pytest.raises(ConfigError, match="3 sizes were given for 4"):
        scheduler.restart((1, 2, 3))


def test_a_limit_below_megatrons_order_is_refused():
    geometry = Geometry(2, 0, 2, 4)
    with pytest.raises(ConfigError, match=r"may hold 4 .* needs 5;"):
        Scheduler(geometry, limits=[MemoryLimit(4.0)])
    Scheduler(geometry, limits=[MemoryLimit(0.0, soft=True)])
    for weights in ((1.0,), (1.0, -1.0)):
        with pytest.raises(ConfigError, match="one of at least 0 is needed for each of 2 chunks"):
            Scheduler(geometry, weights=weights)


def test_chunks_count_with_their_weights():
    scheduler = Scheduler(Geometry(2, 0, 2, 2), cap=9, largest=10, weights=(1, 2.5), beta=0.5)
    scheduler.learn(0, 3)
    assert str(scheduler.next()) == "0F0" and scheduler.held == pytest.approx(0.3)
    scheduler.arrived(Direction.FORWARD, 1, 1)
    scheduler.run(Action.parse("1F0"))
    assert scheduler.held == pytest.approx(0.3 + 0.7), "2.5 * 3, rounded down"
    scheduler.arrived(Direction.BACKWARD, 1, 1)
    scheduler.run(Action.parse("1B0"))
    assert scheduler.held == pytest.approx(0.3 + 0.2), "half of one activation is deferred"


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize(("p", "v"), [(2, 2), (4, 2), (3, 1)])
def test_a_static_cap_holds_no_more_than_the_static_schedule(announced, p, v):
    """Over several batches; where a size is told late, up to one microbatch more."""
    rng = random.Random(p)
    batches = [[min(40, max(1, int(rng.lognormvariate(2, 1)))) for _ in range(12)] for _ in "12345"]
    so_far, least = [StaticSizes() for _ in range(p)], 0
    for number, sizes in enumerate(batches):
        least = max(least, *peak_sizes(p, v, sizes))
        shape = Shape(p, v, 12, tuple(sizes), 40)
        lanes = [static_cap(p, rank, v, sizes, so_far[rank], announced) for rank in range(p)]
        rows = [[float(size) for size in sizes] for _ in range(p * v)]
        costs = Costs((rows, rows, rows), [Hop(0.1, 0)] * (p * v - 1))
        ours = simulate(lanes, costs, split_backward=True)
        interleaved = run_static("interleaved" if v > 1 else "1f1b", shape, costs)
        assert ours.makespan <= interleaved.makespan * 1.001
        most = max(most_held(slots, sizes) for slots in ours.slots)
        assert most <= least if announced else most <= least + 40
        if number and announced:
            assert ours.makespan < 0.97 * interleaved.makespan


@pytest.mark.parametrize(("p", "v"), [(2, 2), (4, 1)])
def test_under_a_static_cap_no_weight_gradient_waits_while_a_forward_of_another_length_runs(p, v):
    """Its tensors would lie between pieces that its B has freed. Equal lengths fit there."""
    for sizes, longest, waits in (
        (MIXED, 16000, False),
        ((4000,) * 16, 4000, True),
        ((4000,) * 16, 16000, True),
    ):
        shape = Shape(p, v, 16, sizes, longest)
        rows = [[float(size) for size in sizes] for _ in range(p * v)]
        costs = Costs((rows, rows, rows), [Hop(1, 0)] * (p * v - 1))
        ran = ScheduleConfig(cap="static", sizes_at_start=True).run(shape, costs)
        assert waits == any(deferred_at_forwards(slots) for slots in ran.slots)
        assert ran.makespan < run_static("interleaved" if v > 1 else "1f1b", shape, costs).makespan


def deferred_at_forwards(slots):
    """The most weight gradients that are deferred where a forward begins."""
    deferred = most = 0
    for action, _, _ in slots:
        deferred += {Kind.F: 0, Kind.B: 1, Kind.W: -1}[action.kind]
        most = max(most, deferred if action.kind is Kind.F else 0)
    return most


@pytest.mark.parametrize("weights", [(), (1.0, 3.0)])
def test_a_static_peak_is_that_of_the_worst_batch_so_far(weights):
    geometry, sizes = Geometry(2, 0, 2, 4), StaticSizes()
    assert sizes.mean == 0, "not known: microbatches count as the largest"
    assert sizes.peak(weights) == 0
    sizes.add(geometry, [1, 9, 2, 1], weights)
    worst = sizes.peak(weights)
    assert worst >= 9 and sizes.mean == 4
    sizes.add(geometry, [1] * 4, weights)
    assert sizes.peak(weights) == worst and sizes.mean == 1


def static_cap(p, rank, v, sizes, so_far, announced):
    """A scheduler with activation_cap="static", which knows all batches up to this one."""
    geometry = Geometry(p, rank, v, len(sizes))
    if announced:
        so_far.add(geometry, sizes, ())
    allowance = Allowance(parse_cap("static", geometry).chunks).with_static(so_far, 40)
    make = Scheduler if announced else Late
    scheduler = make(geometry, cap=allowance.chunks, limits=allowance.limits, largest=40)
    if announced:
        scheduler.restart(sizes)
    scheduler.coming = sizes
    so_far.add(geometry, sizes, ())
    return scheduler


class Late(Scheduler):
    """Learns a size when the microbatch's first forward has begun."""

    def next(self):
        action = super().next()
        if action is not None and action.kind is Kind.F and action.chunk == 0:
            self.learn(action.microbatch, self.coming[action.microbatch])
        return action


def most_held(slots, sizes):
    """The most that a rank holds where a W keeps the whole activation."""
    held = peak = 0
    for action, _, _ in slots:
        change = {Kind.F: 1, Kind.B: 0, Kind.W: -1}[action.kind]
        held += change * sizes[action.microbatch]
        peak = max(peak, held)
    return peak
