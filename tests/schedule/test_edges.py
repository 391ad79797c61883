"""Edges of the schedule's rules: units, chunks that are none, and caps between two numbers."""

from __future__ import annotations

import pytest

from megatron.dpp.direction import Direction
from megatron.dpp.errors import ConfigError, ScheduleError
from megatron.dpp.schedule import (
    Action,
    Allowance,
    Budget,
    Geometry,
    Kind,
    LastRank,
    Memory,
    MemoryLimit,
    Reference,
    Scheduler,
    StaticSizes,
    beside_head,
    parse_cap,
    replica_path,
)
from megatron.dpp.schedule.budget import KnownSizes
from megatron.dpp.schedule.reference import peak_in_flight


@pytest.mark.parametrize(
    ("unit", "size"),
    [
        ("B", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40), ("KB", 10**3),
        ("MB", 10**6), ("GB", 10**9), ("TB", 10**12), ("gb", 10**9),
    ],
)  # fmt: skip
def test_a_cap_in_bytes_has_any_usual_unit(unit: str, size: int) -> None:
    cap = parse_cap(f"80{unit}", Geometry(2, 0, 1, 8), bytes_per_chunk_activation=8 * size)
    assert cap.chunks == 10 and not cap.needs_measuring


@pytest.mark.parametrize("chunk", [-1, 2])
@pytest.mark.parametrize("direction", [0, 1])
def test_arrivals_for_a_chunk_that_is_none_are_refused(direction: int, chunk: int) -> None:
    """A negative index would count for the last chunk."""
    scheduler = Scheduler(Geometry(2, 0, 2, 4))
    with pytest.raises(ScheduleError, match=r"has 0 \.\. 1"):
        scheduler.arrived(direction, chunk, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize(
    ("chunk", "microbatch", "piece"), [(0, 0, 0), (1, 2, 3), (2**16 - 1, 2**24 - 1, 2**16 - 1)]
)
def test_every_action_of_a_board_fits_one_word(
    kind: Kind, chunk: int, microbatch: int, piece: int
) -> None:
    """The words of a board are below 2^63, and 0 is none."""
    action = Action(kind, chunk, microbatch, piece)
    word = action.word()
    assert 0 < word < 1 << 63 and Action.from_word(word) == action


@pytest.mark.parametrize(("p", "v", "m"), [(2, 1, 4), (3, 2, 6), (4, 1, 2), (4, 2, 8)])
def test_one_below_the_least_cap_is_refused_on_every_rank(p: int, v: int, m: int) -> None:
    for rank in range(p):
        geometry = Geometry(p, rank, v, m)
        least = peak_in_flight(geometry)
        Scheduler(geometry, cap=least)
        with pytest.raises(ConfigError, match=f"needs {least}"):
            Scheduler(geometry, cap=least - 1)
        with pytest.raises(ConfigError, match=f"needs {least}"):
            Scheduler(geometry, cap=least - 0.01)


def test_what_the_static_schedule_held_is_a_limit_beside_the_others() -> None:
    """The last rank may keep the logits of so many microbatches, whatever their sizes were."""
    geometry, sizes = Geometry(2, 1, 2, 4), StaticSizes()
    sizes.add(geometry, [1, 9, 2, 1], ())
    heads = MemoryLimit(2.0, (0.0, 1.0), deferred=False)
    found = Allowance(3.0, limits=(heads,)).with_static(sizes, 10)
    worst = MemoryLimit(sizes.peak(()) / 10, (), sizes.mean, soft=True, unlike=True)
    assert (found.chunks, found.limits) == (3.0, (heads, worst))


def test_microbatches_are_unlike_where_those_of_the_last_batch_were() -> None:
    sizes, found = StaticSizes(), list[bool]()
    for batch in ([5, 5], [5, 6], [6, 6]):
        found.append(sizes.unlike)
        sizes.add(Geometry(2, 0, 1, 2), batch, ())
    assert [*found, sizes.unlike] == [True, False, True, False]


def test_a_microbatch_of_unknown_size_has_the_assumed_one_until_it_is_learnt() -> None:
    geometry = Geometry(2, 0, 1, 3)
    budget = Budget(Reference(geometry), cap=2.0, largest=10, assumed=4)
    assert (budget.least, budget.unrun) == (0.8, 12)  # two are held at once
    budget.learn(1, 9, [0])
    assert (budget.least, budget.unrun) == (1.3, 17)
    assert Budget(Reference(geometry), cap=2.0, largest=10).least == 2.0


def test_a_microbatch_may_be_empty_and_as_long_as_the_longest() -> None:
    sizes = KnownSizes(Geometry(2, 0, 1, 3), 10)
    assert sizes.learn(0, 0) and sizes.learn(1, 10)
    for size in (-1, 11):
        with pytest.raises(ScheduleError, match=f"has size {size}; .* from 0 to 10"):
            sizes.learn(2, size)
    assert sizes.unlike() == [0, 10, 10]
    for size in (9, 0):
        with pytest.raises(ScheduleError, match=f"has size {size}, but had size 10 before"):
            sizes.learn(1, size)


def test_lengths_that_are_alike_and_short_are_recorded_as_such() -> None:
    """A recording without sizes means that every microbatch was as long as the longest."""
    sizes = KnownSizes(Geometry(2, 0, 1, 2), 10)
    for microbatch in range(2):
        sizes.learn(microbatch, 7)
    assert sizes.unlike() == [7, 7]


def test_a_soft_limit_is_passed_by_megatrons_next_forward_alone_and_behind_no_weight() -> None:
    reference = Reference(Geometry(2, 0, 1, 3))  # 0F0 0F1 0B0 0F2 0B1 0B2
    budget, after = Budget(reference, cap=0.5, soft=True), [1, 2, 3, 4, 5, 6, 0]
    assert budget.fits(0, after) and not budget.fits(1, after)
    for place in (0, 1):
        budget.forward(place)
    kept = budget.backward(2, 1)
    after[-1] = 3
    assert not budget.fits(3, after), "a weight gradient is left to run"
    budget.weight(kept, 1, 1)
    assert budget.fits(3, after)


@pytest.mark.parametrize("memory", [None, Memory(activation_bytes=8, deferred_bytes=4, slots=True)])
@pytest.mark.parametrize("chunks", [1, 2])
def test_one_rank_has_its_whole_cap(memory: Memory | None, chunks: int) -> None:
    """Its cap is that of a pipeline that waits for nobody; the head takes nothing from another."""
    geometry = Geometry(1, 0, chunks, 8)
    cap = parse_cap("3p", geometry)
    assert beside_head(cap, geometry, memory) == Allowance(3.0 * chunks)


def test_the_head_is_what_the_heaviest_layers_leave() -> None:
    """Of 130 bytes two layers may take 100, as in the first chunk, and the gradient doubles it."""
    assert LastRank.of([100, 40, 130], [2, 1, 2]) == LastRank(100, 1.0, 0.6)


def test_a_size_is_late_once_any_chunk_has_run_its_backward() -> None:
    scheduler = Scheduler(Geometry(1, 0, 2, 2), largest=10, split_backward=False)
    scheduler.arrived(Direction.FORWARD, 1, 1)
    while str(scheduler.next()) != "1B0":
        pass
    with pytest.raises(ScheduleError, match="microbatch 0, 5, comes after its first backward"):
        scheduler.learn(0, 5)


def test_the_last_chunk_weighs_as_its_layers_and_the_head() -> None:
    geometry = Geometry(4, 3, 2, 16)
    memory = Memory(activation_bytes=8, deferred_bytes=0, head_room=2.0, last_layers=0.5)
    assert beside_head(parse_cap("auto", geometry), geometry, memory).weights == (1.0, 2.5)


@pytest.mark.parametrize("number", [3, 5])
def test_as_many_sizes_are_needed_as_there_are_microbatches(number: int) -> None:
    with pytest.raises(ConfigError, match=f"{number} sizes were given for 4 microbatches"):
        Scheduler(Geometry(2, 0, 1, 4), largest=10, sizes=[1] * number)


def test_a_light_chunk_runs_where_a_heavy_one_has_no_room() -> None:
    scheduler = Scheduler(Geometry(1, 0, 2, 1), cap=1.5, weights=(1.0, 0.5), split_backward=False)
    scheduler.arrived(Direction.FORWARD, 1, 1)
    assert [str(scheduler.next()) for _ in range(2)] == ["0F0", "1F0"]


def test_a_group_may_have_more_microbatches_than_there_are_ranks() -> None:
    geometry = Geometry(2, 0, 2, 6, forward_only=True, group=3)
    scheduler = Scheduler(geometry, policy="depth-first")
    scheduler.arrived(Direction.FORWARD, 1, 6)
    ran = " ".join(str(scheduler.next()) for _ in range(12))
    assert ran == "0F0 0F1 0F2 1F0 1F1 1F2 0F3 0F4 0F5 1F3 1F4 1F5"


def test_an_activation_without_bytes_gives_no_cap() -> None:
    with pytest.raises(
        ConfigError, match=r"4GiB'\): a chunk's activation was measured as 0\.0 bytes"
    ):
        parse_cap("4GiB", Geometry(2, 0, 1, 4), 0.0)


def test_a_refusal_of_bytes_advises_as_many_as_suffice() -> None:
    shape, mib = Geometry(2, 0, 2, 16), 1 << 20
    with pytest.raises(ConfigError, match=r"needs 5 there; .* at least 12MiB, or strict"):
        parse_cap("4MiB", shape, 2.3 * mib)
    assert parse_cap("12MiB", shape, 2.3 * mib).chunks > 5


def test_an_evaluation_holds_nothing_whatever_its_policy_and_sizes() -> None:
    shape = Geometry(2, 0, 1, 8, forward_only=True)
    scheduler = Scheduler(shape, policy="breadth-first", cap=2, largest=10)
    for _ in range(3):
        assert scheduler.next() is not None
    scheduler.learn(0, 4)
    assert scheduler.held == scheduler.peak_held == 0
    assert scheduler.sizes[0] == 4


@pytest.mark.parametrize("policy", ["dynamic", "depth-first"])
def test_a_forward_may_fill_the_cap_to_the_last_token(policy: str) -> None:
    scheduler = Scheduler(Geometry(1, 0, 1, 2), policy=policy, cap=1, largest=10)
    assert str(scheduler.next()) == "0F0"
    assert scheduler.held == 1.0


def test_a_last_chunk_lighter_than_its_layers_has_no_head() -> None:
    assert LastRank.of([100.0, 80.0], [2, 2]) == LastRank(100.0, layers=1.0, head_room=0.0)


def test_each_replica_but_the_first_has_a_recording_of_its_own() -> None:
    assert [replica_path("run", replica) for replica in range(3)] == [
        "run", "run.replica1", "run.replica2",
    ]  # fmt: skip
