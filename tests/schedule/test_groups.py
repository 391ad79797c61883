"""Linked microbatches: forwards in order, backwards of a group in reverse, no deadlock at the least
memory cap.
"""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.dpp.errors import ConfigError, ReplayError, ScheduleError
from megatron.dpp.schedule import (
    Action,
    Budget,
    DecisionRecorder,
    Geometry,
    Kind,
    Recording,
    Reference,
    Scheduler,
    StaticSizes,
    group_sizes,
    key_sizes,
    parse_cap,
    peak_size,
    reference_order,
    sliced_allowance,
)
from megatron.dpp.sim.conditions import uniform
from megatron.dpp.sim.costs import Shape
from megatron.dpp.sim.schedules import ScheduleConfig
from tests.schedule.test_properties import Pipeline, allowed

CUTS = [
    cut for number in (2, 3) for cut in itertools.product((1, 2, 3), repeat=number) if max(cut) > 1
]


def with_keys(sizes, groups, kappa):
    """The sizes that the budget counts."""
    keys = key_sizes(groups, sizes, kappa)
    return [size + keys.get(unit, 0) for unit, size in enumerate(sizes)]


class Linked(Pipeline):
    """A pipeline whose ranks have the least cap of their sizes and keys."""

    def __init__(self, p, v, groups, sizes, *, kappa=0.0, **settings):
        self.groups, self.sizes, self.kappa = tuple(groups), tuple(sizes), kappa
        super().__init__(p, v, len(sizes), **settings)

    def scheduler(self, rank, *, policy="dynamic", split=True, w_pieces=None, beta=0.0):
        geometry = Geometry(self.p, rank, self.v, self.m, w_pieces=w_pieces, groups=self.groups)
        held = with_keys(self.sizes, self.groups, self.kappa)
        largest = max(self.sizes)
        return Scheduler(
            geometry, policy=policy, cap=peak_size(reference_order(geometry), held) / largest,
            split_backward=split, beta=beta, largest=largest, sizes=self.sizes, kappa=self.kappa,
        )  # fmt: skip

    def check(self, pieces):
        units = Geometry(self.p, 0, self.v, self.m, groups=self.groups).backward_units
        for rank, ran in enumerate(self.ran):
            for chunk, kind in itertools.product(range(self.v), Kind):
                order = [a[2:] for a in ran if a.kind == kind and a.chunk == chunk]
                each = pieces[chunk] if kind is Kind.W else 1
                expected = range(self.m) if kind is Kind.F else units
                assert order == [(i, k) for i in expected for k in range(each)]
            assert self.ranks[rank].held == 0


def test_units_backwards_and_those_due_of_a_cut():
    geometry = Geometry(2, 0, 1, 6, groups=(3, 1, 2))
    assert geometry.backward_units == (2, 1, 0, 3, 5, 4)
    assert geometry.due == (0, 0, 0, 3, 4, 4, 6)
    assert [geometry.position(Kind.B, unit) for unit in range(6)] == [2, 1, 0, 3, 5, 4]
    assert [geometry.position(Kind.F, unit) for unit in range(6)] == list(range(6))
    assert geometry.uncut == Geometry(2, 0, 1, 3)


def test_groups_of_one_are_no_groups():
    """So schedulers, recordings and orders are those of an uncut iteration."""
    cut, uncut = Geometry(2, 0, 1, 3, groups=(1, 1, 1)), Geometry(2, 0, 1, 3)
    assert cut == uncut and hash(cut) == hash(uncut) and cut.uncut is cut
    assert uncut.backward_units == (0, 1, 2) and uncut.due == (0, 1, 2, 3)


@pytest.mark.parametrize("groups", [(2,), (2, 2), (3, 0), (4, -1)])
def test_groups_that_are_not_the_microbatches_are_refused(groups):
    with pytest.raises(ConfigError, match=r"groups .* sum 3, the number of microbatches"):
        Geometry(2, 0, 1, 3, groups=groups)


def test_the_reference_leads_by_a_group():
    """With K slices each, one chunk warms up with q + K - 1 forwards; then F and B alternate."""
    order = reference_order(Geometry(2, 0, 1, 6, groups=(3, 3)))
    assert " ".join(map(str, order)) == "0F0 0F1 0F2 0F3 0B2 0F4 0B1 0F5 0B0 0B5 0B4 0B3"
    for p, v, size in itertools.product((1, 2, 4), (1, 2, 3), range(1, 10)):
        groups = (size,) * 2 * p
        for rank in range(p):
            order = reference_order(Geometry(p, rank, v, sum(groups), groups=groups))
            first = next(place for place, action in enumerate(order) if action.kind is Kind.B)
            behind, (rounds, rest) = p - 1 - rank, divmod(size - 1, p)
            more = size - 1 if v == 1 else (v - 1) * p + v * p * rounds + rest
            assert first - 1 >= min((1 + (v > 1)) * behind + more, sum(groups) * v - 1)


def test_the_least_cap_with_one_chunk_is_a_sequence_and_a_slice_per_rank_after():
    groups, sizes, kappa = (4, 4, 4), (10,) * 12, 0.1
    for rank in range(4):
        order = reference_order(Geometry(4, rank, 1, 12, groups=groups))
        peak = peak_size(order, with_keys(sizes, groups, kappa))
        assert 0 <= peak - (44 + 10 * (3 - rank)) <= 10 + 4  # up to a unit and kappa L_2


def test_a_static_order_of_slices_ends(cases=150):
    """Strictly in order with a fused backward: nothing else can unblock a wrong order."""
    rng = random.Random(0)
    for _ in range(cases):
        p, v = rng.randint(1, 6), rng.randint(1, 4)
        groups = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 2 * p)))
        group = rng.choice((None, None, p + 1, 2 * p))
        shape = Shape(p, v, sum(groups), sizes=(1,) * sum(groups), groups=groups)
        plan = ScheduleConfig(policy="megatron", cap="strict", split_backward=False, group=group)
        found = plan.run(shape, uniform(shape))
        for rank, ran in enumerate(found.actions):
            geometry = Geometry(p, rank, v, sum(groups), group=group, groups=groups)
            assert ran == reference_order(geometry)


@pytest.mark.slow
def test_six_thousand_static_orders_of_slices_end():
    test_a_static_order_of_slices_ends(6000)


@settings(max_examples=120)
@given(st.data())
def test_any_choice_at_any_time_ends(data):
    """Drawn cuts, sizes, keys, pieces and choices at the least cap."""
    rng = data.draw(st.randoms(use_true_random=False))
    p, v = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    groups = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    split = data.draw(st.booleans())
    pieces = tuple(data.draw(st.integers(0, 3)) for _ in range(v))
    policy = data.draw(st.sampled_from(["wild", "dynamic", "depth-first", "megatron"]))

    def wild(view):
        options = allowed(view)
        return rng.choice(options) if options else None

    pipeline = Linked(
        p, v, groups, [rng.randint(1, 40) for _ in range(sum(groups))],
        kappa=data.draw(st.sampled_from([0.0, 0.09, 0.35])), beta=data.draw(st.floats(0, 1)),
        policy=wild if policy == "wild" else policy, split=split, w_pieces=pieces,
    )  # fmt: skip
    pipeline.finish(rng.randrange)
    pipeline.check(pieces if split else (0,) * v)


def adversary(seed):
    """Forwards as early as they may run and random delays, at the least cap."""
    rng = random.Random(seed)
    p, v = rng.randint(2, 8), rng.randint(1, 3)
    groups = [rng.choice((1, 1, 2, 3, 5)) for _ in range(rng.randint(2, 6))]
    sizes = [rng.choice((1, 3, 10)) for _ in range(sum(groups))]

    def forward_first(view):
        options = allowed(view)
        forwards = [action for action in options if action.kind == Kind.F]
        return rng.choice(forwards or options) if options else None

    pipeline = Linked(p, v, groups, sizes, policy=forward_first, kappa=rng.choice((0.0, 0.2)))
    pipeline.finish(rng.randrange)
    pipeline.check((1,) * v)


def test_adversarial_choices_end():
    for seed in range(40):
        adversary(seed)


@pytest.mark.slow
def test_a_thousand_adversarial_runs_end():
    for seed in range(1000):
        adversary(seed)


def test_without_the_walk_some_get_stuck(monkeypatch):
    """So the test above can fail."""

    def fits(self, place, after):
        return self.in_flight + self.kept + self._steps[place] <= self.limit

    monkeypatch.setattr(Budget, "fits", fits)
    stuck = 0
    for seed in range(40):
        try:
            adversary(seed)
        except (AssertionError, ScheduleError):
            stuck += 1
    assert stuck > 5


def sizes_of(groups):
    """Two draws."""
    rng = random.Random(str(groups))
    return [tuple(rng.choice((1, 2, 4)) for _ in range(sum(groups))) for _ in range(2)]


@pytest.mark.parametrize("split", [False, True])
def test_every_state_of_small_pipelines(split):
    """All orders of messages and tasks at the least cap: none is stuck."""
    total = 0
    for p, v, cuts in ((2, 1, CUTS), (3, 1, CUTS[:8]), (2, 2, CUTS[:4])):
        for groups in cuts:
            total += count_states(p, v, groups, sizes_of(groups)[0], split=split)
    assert total > 4_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("p", "v"), [(2, 1), (3, 1), (2, 2), (3, 2)])
def test_every_state_of_all_small_cuts(p, v, split):
    for groups in CUTS:
        for sizes in sizes_of(groups):
            count_states(p, v, groups, sizes, split=split, most=100_000)


def count_states(p, v, groups, sizes, *, split, most=0):
    """Reachable states of a pipeline whose messages arrive at once, or ``most`` of them."""
    geometries = [Geometry(p, rank, v, len(sizes), groups=groups) for rank in range(p)]
    walk = _Walk(geometries, with_keys(sizes, groups, 0.25), split=split)
    start = tuple(((0,) * (2 * v), ()) for _ in range(p))
    seen, todo = {start}, [start]
    while todo and not 0 < most <= len(seen):
        state = todo.pop()
        after = list(walk.moves(state))
        ended = all(n == len(sizes) for counts, _ in state for n in counts)
        assert after or ended, (groups, sizes, state)
        fresh = [one for one in after if one not in seen]
        seen.update(fresh)
        todo += fresh
    return len(seen)


class _Walk:
    """The moves of all ranks. A rank's state is its F and B by chunk, and its deferred W."""

    def __init__(self, geometries, sizes, *, split):
        self.geometries, self.sizes, self.split = geometries, sizes, split
        self.references = [Reference(geometry) for geometry in geometries]
        self.caps = [peak_size(one.order, sizes) / max(sizes) for one in self.references]
        self.p, self.v = len(geometries), geometries[0].num_chunks
        self.room = {}

    def moves(self, state):
        for rank, (counts, deferred) in enumerate(state):
            ways = [(counts, deferred[1:])] if deferred else []
            for slot in range(2 * self.v):
                backward, chunk = divmod(slot, self.v)
                if not self.may_run(state, rank, chunk, backward):
                    continue
                later = deferred
                if backward and self.split:
                    later += (self.geometries[rank].backward_units[counts[slot]],)
                ways.append(((*counts[:slot], counts[slot] + 1, *counts[slot + 1 :]), later))
            for way in ways:
                yield (*state[:rank], way, *state[rank + 1 :])

    def may_run(self, state, rank, chunk, backward):
        (counts, deferred), geometry = state[rank], self.geometries[rank]
        done, stage = counts[backward * self.v + chunk], chunk * self.p + rank
        if done == geometry.num_microbatches:
            return False
        if not backward:
            before = state[(stage - 1) % self.p][0]
            if stage and before[(stage - 1) // self.p] <= done:
                return False
            key = rank, chunk, counts, sum(self.sizes[i] for i in deferred)
            if key not in self.room:
                self.room[key] = self.fits(*key)
            return self.room[key]
        if geometry.due[counts[chunk]] <= done:
            return False
        after = state[(stage + 1) % self.p][0]
        return stage == self.p * self.v - 1 or after[self.v + (stage + 1) // self.p] > done

    def fits(self, rank, chunk, counts, kept):
        """The real budget at its least cap, brought to the state of these counts."""
        reference, geometry, largest = self.references[rank], self.geometries[rank], max(self.sizes)
        budget = Budget(reference, cap=self.caps[rank], largest=largest)
        for microbatch, size in enumerate(self.sizes):
            budget.learn(microbatch, size, [0] * self.v)
        unrun, end = [], len(reference.order)
        for place, (kind, c, i, _) in enumerate(reference.order):
            if geometry.position(kind, i) >= counts[kind * self.v + c]:
                unrun.append(place)
            elif kind == Kind.F:
                budget.forward(place)
            else:
                budget.backward(place, 0)
        budget.kept = kept
        after = [0] * (end + 1)
        for place, following in zip([end, *unrun], [*unrun, end], strict=True):
            after[place] = following
        return budget.fits(reference.places[0][chunk][counts[chunk]], after)


def test_a_backward_waits_for_its_group_and_says_so():
    scheduler = Scheduler(Geometry(1, 0, 1, 3, groups=(2, 1)), cap=3)
    assert [str(scheduler.next()) for _ in range(2)] == ["0F0", "0F1"]
    with pytest.raises(ScheduleError, match=r"0B0 may not run: 0 of 3 B .*last microbatch"):
        scheduler.run(Action.parse("0B0"))
    for text in ("0B1", "0B0", "0F2"):
        scheduler.run(Action.parse(text))
    middle = Scheduler(Geometry(2, 0, 1, 3, groups=(2, 1)), cap=3)
    middle.run(Action.parse("0F0"))
    with pytest.raises(ScheduleError, match="not all forwards of its group have run"):
        middle.run(Action.parse("0B1"))
    middle.run(Action.parse("0F1"))
    middle.run(Action.parse("0F2"))
    assert "gradient 1 of chunk 0" in middle.stall().text


def test_a_cap_means_the_same_bytes_for_cut_and_uncut_sequences():
    cut = Geometry(4, 1, 1, 8, groups=(4, 2, 1, 1))
    for word in ("auto", "megatron", "static", "strict", "1.5p", "4seq", "9GiB"):
        assert parse_cap(word, cut, 2**30).chunks == parse_cap(word, cut.uncut, 2**30).chunks
    batch = StaticSizes()
    batch.add(cut, (4, 4, 4, 2, 4, 2, 3, 1), ())
    whole = StaticSizes()
    whole.add(cut.uncut, (14, 6, 3, 1), ())
    assert batch.peak(()) == whole.peak(()) and batch.mean == whole.mean
    assert group_sizes((), (1, 2)) == [1, 2]


def test_a_cap_in_sequences_may_be_lower_where_they_are_cut():
    cut = Geometry(4, 0, 2, 8, groups=(4, 4))
    assert parse_cap("1.2seq", cut).chunks == pytest.approx(2.4)
    with pytest.raises(ConfigError, match=r"1\.2 activations of the longest .* at least 2seq"):
        parse_cap("1.2seq", cut.uncut)
    with pytest.raises(ConfigError, match="is not a number"):
        parse_cap("1.2.3seq", cut)


def test_slices_get_what_their_order_needs_and_no_cap_in_bytes_is_passed():
    """Beside the cap of 1 GiB the last of two ranks needs the keys of its sequence."""
    cut, sizes = Geometry(2, 1, 1, 5, groups=(4, 1)), (10,) * 5
    found = sliced_allowance(parse_cap("1seq", cut), cut, sizes, 40, 0.1)
    assert found.chunks == pytest.approx(44 / 40)
    assert sliced_allowance(parse_cap("1.5seq", cut), cut, sizes, 40, 0.1).chunks == 1.5
    with pytest.raises(ConfigError, match=r"1GiB .* slices of this step need 1\.10 there"):
        sliced_allowance(parse_cap("1GiB", cut, 2**30), cut, sizes, 40, 0.1)


def test_a_replay_with_other_groups_stops(tmp_path):
    path = str(tmp_path / "run")
    cut, uncut = Geometry(1, 0, 1, 3, groups=(2, 1)), Geometry(1, 0, 1, 3)
    with DecisionRecorder(path, cut) as recorder:
        for geometry in (cut, uncut):
            recorder.write(geometry, reference_order(geometry), split_backward=False)
    recording = Recording.load(path, 0)
    for index, geometry in enumerate((cut, uncut)):
        recording.replay(index, geometry, split_backward=False)
    other = Geometry(1, 0, 1, 3, groups=(1, 2))
    for index, geometry, was, now in (
        (0, other, r"\[2, 1\]", r"\[1, 2\]"),
        (0, uncut, r"\[2, 1\]", "None"),
        (1, cut, "None", r"\[2, 1\]"),
    ):
        with pytest.raises(ReplayError, match=f"groups was {was} and is {now}"):
            recording.replay(index, geometry, split_backward=False)
