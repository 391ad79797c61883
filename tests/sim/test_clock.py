"""The virtual clock: times by hand, links, slow times, stuck simulations, and properties under
random times.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.dpp.errors import ScheduleError
from megatron.dpp.schedule import Action, Geometry, Kind, Scheduler
from megatron.dpp.sim.clock import simulate
from megatron.dpp.sim.conditions import CONDITIONS, condition_costs
from megatron.dpp.sim.costs import Costs, Hop, Shape, even_costs
from megatron.dpp.sim.schedules import STATIC, ScheduleConfig, replay, run_static

STEADY = [name for name in CONDITIONS if not name.startswith("tr")]


def test_two_ranks_by_hand():
    """F takes 1, fused backward 2, a hop 1 (half of it on the link)."""
    costs = even_costs(2, 1, times=(1.0, 1.0, 1.0), hop=1.0)
    result = ScheduleConfig(split_backward=False).run(Shape(2, 1, 1), costs)
    assert [(str(s.action), s.start, s.end) for s in result.slots[0]] == [
        ("0F0", 0.0, 1.0),
        ("0B0", 6.0, 8.0),
    ]
    assert [(str(s.action), s.start, s.end) for s in result.slots[1]] == [
        ("0F0", 2.0, 3.0),
        ("0B0", 3.0, 5.0),
    ]


def test_a_stage_without_layers_has_its_weight_gradient_in_its_backward():
    costs = even_costs(2, 1)
    result = ScheduleConfig(w_pieces=(2, 0)).run(Shape(2, 1, 1), costs)
    assert [(str(s.action), s.start, s.end) for s in result.slots[1]] == [
        ("0F0", 1.0, 2.0),
        ("0B0", 2.0, 4.0),
    ]
    assert [str(s.action) for s in result.slots[0]] == ["0F0", "0B0", "0W0", "0W0.1"]


def test_messages_share_a_link_and_stay_in_order():
    """Outputs appear every 1; each holds the link for 3, the first of them for 9."""
    durations = ([[1.0] * 3, [0.1] * 3], [[0.1] * 3] * 2, [[0.0] * 3] * 2)
    scale = [[3.0, 1.0, 1.0], [0.0] * 3]
    costs = Costs(durations, [Hop(latency=0.0, occupancy=3.0, scale=scale)])
    result = ScheduleConfig(cap="2p").run(Shape(2, 1, 3), costs)
    forwards = [slot.start for slot in result.slots[1] if slot.action.kind is Kind.F]
    assert forwards == pytest.approx([10.0, 13.0, 16.0])


def test_a_stuck_simulation_fails_with_its_grid():
    lanes = [
        Scheduler(Geometry(2, rank, 1, 2), policy=lambda view: view.forward(0)) for rank in range(2)
    ]
    with pytest.raises(ScheduleError) as caught:
        simulate(lanes, even_costs(2, 2), split_backward=True)
    text = str(caught.value)
    assert "rank 0   0F0 0F1" in text
    assert "returned None on pipeline rank 1" in text and "0B0 may run" in text


@settings(max_examples=60)
@given(
    st.sampled_from(list(CONDITIONS)),
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9)),
    st.sampled_from(["strict", "megatron", "auto"]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_any_condition_ends_within_the_cap_and_in_order(condition, numbers, cap, split, seed):
    shape = Shape(*numbers)
    costs = condition_costs(condition, shape, seed)
    plan = ScheduleConfig(cap=cap, split_backward=split, w_pieces=2)
    lanes = plan.lanes(shape)
    result = plan.run(shape, costs)
    assert result.makespan >= max(result.own) - 1e-9
    for rank, ran in enumerate(result.actions):
        assert result.peak_held[rank] <= lanes[rank].cap + 1e-6
        for chunk in range(shape.num_chunks):
            for kind in Kind:
                order = [(a.microbatch, a.piece) for a in ran if a[:2] == (kind, chunk)]
                assert order == sorted(set(order))
        assert len(ran) == shape.num_chunks * shape.num_microbatches * (4 if split else 2)


@pytest.mark.parametrize("name", STATIC)
def test_static_schedules_run_and_keep_their_memory(name):
    shape = Shape(4, 2, 8)
    result = run_static(name, shape, condition_costs("unif", shape, 0))
    chunks = 2 if name == "interleaved" else 1
    expected = {"gpipe": 8, "1f1b": 4, "interleaved": 5.5, "zb-h1": 4}[name]
    assert max(result.peak_held) / chunks == pytest.approx(expected)
    assert result.ratio > 1.0


@pytest.mark.parametrize("p", [1, 2, 5])
@pytest.mark.parametrize("m", [1, 2, 7])
def test_static_schedules_of_any_shape_end(p, m):
    for name in STATIC:
        shape = Shape(p, 2, m)
        costs = condition_costs("jit.3", shape, 0)
        result = run_static(name, shape, costs)
        work = sum(sum(map(sum, kind)) for kind in costs.durations)
        ran = sum(slot.end - slot.start for slots in result.slots for slot in slots)
        assert ran == pytest.approx(work)


# Unlike sizes

MIXED = (500, 1200, 700, 3000, 16000, 800, 1000, 400, 2500, 900, 6000, 1100, 300, 1500, 2000, 10000)
KNOWN = [
    (2, 2, (1000, 8000, 2000, 1000), (55.5, 45, 45, 43.5), (24000, 23000)),
    (2, 1, (3000, 1000, 9000, 1000, 2000, 5000), (106, 80, 90, 66), (18000, 18000)),
    (4, 2, MIXED, (334.4, 235.25, 242.05, 177.15), (91000, 91000, 88000, 88000)),
]
"""Ranks, chunks, tokens; times of the static schedule, Megatron's order + W, dynamic by a cap in
microbatches and in tokens; peaks of the latter. F = B = W = tokens / 1000 / chunks, no hops."""


@pytest.mark.parametrize(("p", "v", "lengths", "makespans", "peaks"), KNOWN)
def test_times_and_peaks_of_known_sizes(p, v, lengths, makespans, peaks):
    shape, equal = Shape(p, v, len(lengths), lengths), Shape(p, v, len(lengths))
    rows = [[tokens / 1000 / v for tokens in lengths] for _ in range(p * v)]
    costs = Costs((rows, rows, rows), [Hop(0, 0)] * (p * v - 1))
    known = {"cap": "megatron", "sizes_at_start": True}
    ours = ScheduleConfig(**known).run(shape, costs)
    assert [
        run_static("interleaved" if v > 1 else "1f1b", shape, costs).makespan,
        ScheduleConfig(policy="megatron", **known).run(shape, costs).makespan,
        ScheduleConfig(cap="megatron").run(equal, costs).makespan,
        ours.makespan,
    ] == pytest.approx(makespans)
    assert [held * max(lengths) for held in ours.peak_held] == pytest.approx(peaks)


def test_a_fused_backwards_output_leaves_before_its_weight_gradients():
    """Stage 1's gradient is under way while its W runs: 1 + 1 + 1 + (B and W of stage 0)."""
    shape, costs = Shape(2, 1, 1), even_costs(2, 1)
    stock = ScheduleConfig(stock=0).run(shape, costs)
    whole = ScheduleConfig(split_backward=False).run(shape, costs)
    assert (stock.makespan, whole.makespan) == (5.0, 6.0)
    assert [len(slots) for slots in stock.slots] == [2, 2]


# Recorded orders


@settings(max_examples=60)
@given(
    p=st.integers(1, 5),
    v=st.integers(1, 3),
    m=st.integers(1, 9),
    pieces=st.integers(1, 3),
    condition=st.sampled_from(STEADY),
    seed=st.integers(0, 99),
)
def test_a_simulated_run_replays_in_its_own_time(
    p: int, v: int, m: int, pieces: int, condition: str, seed: int
) -> None:
    shape = Shape(p, v if p > 1 else 1, m)
    drawn = condition_costs(condition, shape, seed)
    hops = [Hop(h.latency, 0.0, h.scale) for h in drawn.hops]
    costs = Costs(drawn.durations, hops, overhead={0: 0.05, 2: 0.01})
    result = ScheduleConfig(w_pieces=pieces).run(shape, costs)
    assert replay(result.actions, costs, shape.num_chunks) == pytest.approx(result.makespan)


def test_an_order_is_kept_where_another_would_be_faster() -> None:
    """Two weight gradients first, although a forward that the next rank waits for is ready."""
    costs = even_costs(2, 2)
    good = ScheduleConfig(cap="none").run(Shape(2, 1, 2), costs)
    bad = [sorted(good.actions[0], key=lambda a: (a.microbatch, a.kind)), good.actions[1]]
    assert replay(bad, costs, 1) > good.makespan


def test_orders_that_wait_for_each_other_are_refused() -> None:
    order = [Action(Kind.B, 0, 0), Action(Kind.F, 0, 0)]
    with pytest.raises(ScheduleError, match="stuck"):
        replay([order, [Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)]], even_costs(2, 1), 1)
