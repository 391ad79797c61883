"""Values of ``activation_cap``, valid and invalid."""

import dataclasses
import random

import pytest

from megatron.dpp.config import Backward, DppConfig
from megatron.dpp.errors import ConfigError
from megatron.dpp.schedule import (
    Allowance,
    Geometry,
    Kind,
    LastRank,
    Memory,
    MemoryLimit,
    Scheduler,
    beside_head,
    parse_cap,
    peak_in_flight,
    sliced_allowance,
)
from megatron.dpp.schedule.caps import StaticSizes
from megatron.dpp.schedule.reference import static_peak
from megatron.dpp.sim.costs import Costs, Hop, Shape, even_costs
from megatron.dpp.sim.schedules import ScheduleConfig, run_static


def geometry(rank=0, num_chunks=2, num_microbatches=16):
    return Geometry(4, rank, num_chunks, num_microbatches)


@pytest.mark.parametrize(
    ("text", "num_chunks", "rank", "chunks"),
    [
        ("auto", 2, 3, 11),
        ("auto", 1, 3, 6),
        ("megatron", 2, 3, 11),
        ("megatron", 1, 3, 4),
        ("strict", 2, 3, 5),
        ("strict", 1, 3, 1),
        ("1.5p", 2, 0, 12),
        ("2p", 1, 0, 8),
        ("6MiB", 1, 0, 6),
        ("5000000B", 1, 0, 5e6 / (1 << 20)),
        ("20 kib", 1, 0, 20 / 1024),
        ("5GB", 1, 0, 5e9 / (1 << 20)),
        ("2TiB", 1, 0, 2 << 20),
    ],
)
def test_values(text, num_chunks, rank, chunks):
    where = geometry(rank, num_chunks)
    if chunks < 1:
        where = dataclasses.replace(where, forward_only=True)  # which needs nothing
    cap = parse_cap(text, where, bytes_per_chunk_activation=1 << 20)
    assert cap.chunks == pytest.approx(chunks)
    assert f"pipeline rank {rank} may hold {cap.chunks:g} chunk activations" in cap.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("half", "expected auto"),
        ("1.2.3p", "expected auto"),
        ("0.5p", "needs 11"),
        ("1MiB", "needs 11"),
        ("0GiB", "above 0"),
        ("20 parsecs", "expected auto"),
    ],
)
def test_refusals(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_cap(text, geometry(), bytes_per_chunk_activation=1 << 20)


@pytest.mark.parametrize(("rank", "num_chunks", "chunks"), [(3, 2, 10), (2, 2, 11), (3, 1, 5)])
def test_the_last_rank_leaves_room_for_a_head_of_unknown_size(rank, num_chunks, chunks):
    where = geometry(rank, num_chunks)
    assert beside_head(parse_cap("auto", where), where).chunks == chunks


SMALL, LARGE = 0.3, 3.0


@pytest.mark.parametrize(
    ("num_ranks", "cap", "room", "slots", "chunks"),
    [
        (4, "auto", SMALL, False, 11),  # Megatron's worst rank holds 11, the last one 5 + 0.3
        (4, "auto", LARGE, False, 11),
        (4, "auto", 9.0, False, 14),  # 4 + 1 + 9: Megatron's own order needs as much here
        (2, "auto", LARGE, False, 6),  # 2 + 1 + 3, rank 0 holds 5
        (4, "1.5p", LARGE, False, 12),
        (4, "auto", 2.4, True, 8),  # 11 - 3
        (4, "auto", 9.0, True, 5),  # I_r
        (4, "auto", 0.0, True, 10),  # one, whatever was measured
        (2, "auto", LARGE, True, 3),  # I_r
        (4, "1.5p", LARGE, True, 11),  # the user has sized it
    ],
)
def test_the_head_counts_in_the_same_bytes(num_ranks, cap, room, slots, chunks):
    """With a vocabulary of 50,000 the last rank holds no more than Megatron's worst rank.
    Simulator and training use the same cap.
    """
    decisions = pytest.importorskip("megatron.dpp.runtime.decisions")
    where = Geometry(num_ranks, num_ranks - 1, 2, 16)
    training = decisions.Decisions(DppConfig(activation_cap=cap), log=lambda line: None)
    memory = Memory(activation_bytes=100, deferred_bytes=60, head_room=room, slots=slots)
    training.measured(memory)
    assert training.scheduler(where, backward=Backward()).cap == pytest.approx(chunks)
    simulated = ScheduleConfig(cap=cap, memory=(memory,) * num_ranks)
    assert simulated.caps(Shape(num_ranks, 2, 16))[-1] == pytest.approx(chunks)
    first = Geometry(num_ranks, 0, 2, 16)
    allowed = beside_head(parse_cap("auto", first), first, memory)
    assert allowed.chunks == parse_cap("auto", first).chunks and not allowed.limits


def test_a_head_of_one_microbatch_at_a_time_is_reserved_once():
    """It then takes a part of the cap, and no activation of the last chunk weighs more for it."""
    where = Geometry(4, 3, 2, 16)
    cap = parse_cap("megatron", where)
    memory = Memory(activation_bytes=100, deferred_bytes=60, head_room=1.5, one_head=True)
    found = beside_head(cap, where, memory)
    assert found.chunks == cap.chunks - 1.5 and set(found.weights) == {1.0}
    slots = beside_head(cap, where, dataclasses.replace(memory, slots=True))
    assert slots.chunks == cap.chunks - 2 and not slots.limits


FREED = {Kind.F: -1.0, Kind.B: 0.0, Kind.W: 1.0}
"""Shares of an activation that a task frees where its W keeps all of it."""


def worst(ranks, room=0.0, freed=FREED, sizes=None):
    """The most that any rank holds; the last chunk of the last rank with its head until its B."""
    peaks = []
    for rank, slots in enumerate(ranks):
        held = peak = 0.0
        for action in (slot.action for slot in slots):
            head = room if rank == len(ranks) - 1 and action.chunk == 1 else 0.0
            held -= freed[action.kind] * (sizes[action.microbatch] if sizes else 1)
            held += {Kind.F: head, Kind.B: -head, Kind.W: 0.0}[action.kind]
            peak = max(peak, held)
        assert held == pytest.approx(0)
        peaks.append(peak)
    return max(peaks)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("room", [SMALL, 1.5, LARGE, 9.0])
def test_no_rank_holds_more_bytes_than_the_static_schedule(num_ranks, room):
    memory = Memory(activation_bytes=100, deferred_bytes=90, head_room=room)
    shape, costs = Shape(num_ranks, 2, 16), even_costs(2 * num_ranks, 16, hop=0.05)
    ours = ScheduleConfig(memory=(memory,) * num_ranks).run(shape, costs)
    static = run_static("interleaved", shape, costs)
    most = worst(static.slots, room, {Kind.F: -1.0, Kind.B: 1.0})
    assert worst(ours.slots, room, {Kind.F: -1.0, Kind.B: 0.1, Kind.W: 0.9}) <= most + 1e-6


def test_the_logits_beside_slots_are_bounded():
    """A slot is counted whole, and of logits as many as in Megatron's order."""
    where = Geometry(2, 1, 2, 8)
    memory = Memory(activation_bytes=100, deferred_bytes=100, head_room=0.5, slots=True)
    found = beside_head(parse_cap("2p", where), where, memory)
    scheduler = Scheduler(where, policy=of_the_last_chunk, cap=found.chunks, limits=found.limits)
    scheduler.arrived(0, 0, 8)
    scheduler.arrived(0, 1, 8)
    assert [str(scheduler.next()) for _ in range(5)] == ["1F0", "1B0", "1F1", "1B1", "1F2"]
    assert scheduler.held == 3, "weight gradients are still deferred"


def of_the_last_chunk(view):
    return view.forward(1) or view.backward(1) or view.weight()


def test_what_the_head_takes_is_told_from_the_other_chunks():
    assert LastRank.of([100, 100, 250], (2, 2, 2)) == (100, 1.0, 3.0)
    assert LastRank.of([100, 150, 200], (2, 3, 0)) == (150, 0.0, pytest.approx(400 / 150))
    assert LastRank.of([40, 100, 250], (0, 2, 2)) == (100, 1.0, 3.0), "an embedding alone"
    assert LastRank.of([100, 110], (2, 2)) == (100, 1.0, pytest.approx(0.2))
    assert LastRank.of([100, 260], (1, 1)) == (100, 1.0, 3.2)
    assert LastRank.of([500], (4,)) == LastRank.of([0, 500], (0, 4)) == (500, 1.0, 1.0)


@pytest.mark.parametrize("p, v, m", [(3, 4, 6), (2, 1, 4), (3, 1, 7), (6, 3, 11)])
def test_what_a_refusal_advises_is_accepted(p, v, m):
    where = Geometry(p, p - 1, v, m)
    with pytest.raises(ConfigError, match="strict") as refused:
        parse_cap("0.01p", where)
    advised = str(refused.value).split()[-3].rstrip(",")
    assert parse_cap(advised, where).chunks >= peak_in_flight(where)
    with pytest.raises(ConfigError, match="breadth-first") as refused:
        Scheduler(where, policy="breadth-first")
    advised = refused.value.settings[1].value
    room = beside_head(parse_cap(advised, where), where).chunks
    assert Scheduler(where, policy="breadth-first", cap=room)


def test_the_least_cap_is_exact():
    """But for rounding: 1.18 x 10 x 5 is a little less than 59."""
    for shape in (*map(geometry, range(4)), Geometry(10, 0, 5, 100)):
        least = peak_in_flight(shape)
        assert Scheduler(shape, cap=least).cap == least
        with pytest.raises(ConfigError, match=f"hold {least - 1} chunk .* own order needs {least}"):
            Scheduler(shape, cap=least - 1)
    assert Scheduler(shape, cap=parse_cap("1.18p", shape).chunks).next() is not None


@pytest.mark.parametrize(
    ("activation", "deferred", "beta"),
    [(100, 60, 0.4), (100, 0, 1.0), (100, 100, 0.0), (100, 140, 0.0), (0, 60, 0.0)],
)
def test_a_backward_frees_what_weight_gradients_do_not_keep(activation, deferred, beta):
    memory = Memory(activation_bytes=activation, deferred_bytes=deferred)
    assert memory.beta == pytest.approx(beta)


def test_bytes_below_the_order_of_the_longest_microbatches_name_what_to_give() -> None:
    shape = Geometry(num_ranks=2, rank=0, num_chunks=2, num_microbatches=16)
    with pytest.raises(ConfigError) as refused:
        parse_cap("4MiB", shape, 2.2 * (1 << 20))
    assert str(refused.value) == (
        "DppConfig(activation_cap=...): 4MiB at 2.2 MiB for each of the longest microbatch is "
        "1.81818 chunk activations on pipeline rank 0, but Megatron's own order "
        "needs 5 there; less could stop the pipeline. Give at least 11MiB, or strict"
    )
    assert parse_cap("11MiB", shape, 2.2 * (1 << 20)).chunks == pytest.approx(5)


def test_bytes_wait_for_a_measurement():
    cap = parse_cap("20GiB", geometry())
    assert cap.needs_measuring and "20GiB" in cap.text
    assert cap.chunks == parse_cap("auto", geometry()).chunks
    with pytest.raises(ConfigError, match=r"4GiB'\): a chunk's activation was measured as 0\.0"):
        parse_cap("4GiB", geometry(), 0.0)


# What the static schedule held


@pytest.mark.parametrize("weights", [(), (1.0, 3.0)])
def test_a_static_peak_is_that_of_the_worst_batch_so_far(weights):
    where, sizes, unlike = Geometry(2, 1, 2, 4), StaticSizes(), []
    assert (sizes.mean, sizes.peak(weights)) == (0, 0)
    for batch in ([1, 9, 2, 1], [1] * 4):
        unlike.append(sizes.unlike)
        sizes.add(where, batch, weights)
    assert sizes.peak(weights) >= static_peak(where, [1, 9, 2, 1]) and sizes.mean == 1
    assert [*unlike, sizes.unlike] == [True, True, False]
    if weights:
        assert sizes.peak(weights) > sizes.peak((5.0, 5.0)) == sizes.peak(())
    heads = MemoryLimit(2.0, (0.0, 1.0), deferred=False)
    found = Allowance(3.0, limits=(heads,)).with_static(sizes, 10)
    worst = MemoryLimit(sizes.peak(()) / 10, (), sizes.mean, soft=True, unlike=False)
    assert (found.chunks, found.limits) == (3.0, (heads, worst))


@pytest.mark.parametrize(("p", "v"), [(2, 2), (4, 2), (3, 1)])
def test_a_static_cap_holds_no_more_than_the_static_schedule_and_is_faster(p, v):
    """No weight gradient waits while a forward of another length runs: its tensors would lie
    between pieces that its B has freed. Equal lengths fit there."""
    rng, static = random.Random(p), "interleaved" if v > 1 else "1f1b"
    unlike = tuple(min(40, max(1, int(rng.lognormvariate(2, 1)))) for _ in range(12))
    for sizes, longest, waits in ((unlike, 40, False), ((4,) * 12, 4, True), ((4,) * 12, 16, True)):
        shape = Shape(p, v, 12, sizes, longest)
        rows = [[float(size) for size in sizes] for _ in range(p * v)]
        costs = Costs((rows, rows, rows), [Hop(0.1, 0)] * (p * v - 1))
        ran = ScheduleConfig(cap="static", sizes_at_start=True).run(shape, costs)
        theirs = run_static(static, shape, costs)
        assert ran.makespan < 0.99 * theirs.makespan
        assert worst(ran.slots, sizes=sizes) <= max(theirs.peak_held) * longest + 1e-6
        assert waits == any(deferred_at_forwards(slots) for slots in ran.slots)


def deferred_at_forwards(slots):
    """The most weight gradients that are deferred where a forward begins."""
    deferred = most = 0
    for action, _, _ in slots:
        deferred += {Kind.F: 0, Kind.B: 1, Kind.W: -1}[action.kind]
        most = max(most, deferred if action.kind is Kind.F else 0)
    return most


# Linked microbatches


def test_a_cap_means_the_same_bytes_for_cut_and_uncut_sequences():
    cut = Geometry(4, 1, 1, 8, groups=(4, 2, 1, 1))
    for word in ("auto", "megatron", "static", "strict", "1.5p", "4seq", "9GiB"):
        assert parse_cap(word, cut, 2**30).chunks == parse_cap(word, cut.uncut, 2**30).chunks
    batch, whole = StaticSizes(), StaticSizes()
    batch.add(cut, (4, 4, 4, 2, 4, 2, 3, 1), ())
    whole.add(cut.uncut, (14, 6, 3, 1), ())
    assert batch.peak(()) == whole.peak(()) and batch.mean == whole.mean
    halves = Geometry(4, 0, 2, 8, groups=(4, 4))
    assert parse_cap("1.2seq", halves).chunks == pytest.approx(2.4)
    with pytest.raises(ConfigError, match=r"1\.2 activations of the longest .* at least 2seq"):
        parse_cap("1.2seq", halves.uncut)


def test_slices_get_what_their_order_needs_and_no_cap_in_bytes_is_passed():
    """Beside the cap of 1 GiB the last of two ranks needs the keys of its sequence."""
    cut, sizes = Geometry(2, 1, 1, 5, groups=(4, 1)), (10,) * 5
    found = sliced_allowance(parse_cap("1seq", cut), cut, sizes, 40, 0.1)
    assert found.chunks == pytest.approx(44 / 40)
    assert sliced_allowance(parse_cap("1.5seq", cut), cut, sizes, 40, 0.1).chunks == 1.5
    with pytest.raises(ConfigError, match=r"1GiB .* slices of this step need 1\.10 there"):
        sliced_allowance(parse_cap("1GiB", cut, 2**30), cut, sizes, 40, 0.1)
