"""Properties of every plan, for any model."""

from collections import Counter

from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.dpp.errors import ConfigError
from megatron.dpp_train.cost.model_costs import ModelCosts, PartCosts
from megatron.dpp_train.cost.planner import Planner

times = st.floats(0.1, 4.0)
unbounded = st.none()


@st.composite
def planners(draw, memory=unbounded):
    layer = PartCosts(
        (draw(times), draw(times), draw(times)),
        activation_bytes=10.0,
        deferred_bytes=draw(st.floats(0.0, 10.0)),
        state_bytes=draw(st.floats(0.0, 50.0)),
    )
    embedding = PartCosts((draw(st.floats(0.0, 1.0)),) * 3, state_bytes=draw(st.floats(0.0, 100.0)))
    head = PartCosts((draw(st.floats(0.0, 8.0)),) * 3, activation_bytes=5.0)
    ranks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    model = ModelCosts(draw(st.integers(1, 12)), layer, embedding, head, hop=0.01)
    return Planner(
        model, ranks, microbatches, memory_bytes=draw(memory),
        split_backward=draw(st.booleans()), max_tasks=20_000,
    )  # fmt: skip


def plans_of(planner):
    try:
        return planner.best([1, 2])
    except ConfigError:
        too_few = planner.model.num_layers < planner.num_ranks - 2
        assert planner.memory_bytes is not None or too_few
        return []


@given(planner=planners())
@settings(max_examples=20)
def test_every_layer_is_placed_once_and_no_inner_stage_is_empty(planner):
    for plan in plans_of(planner):
        stages = plan.layout.text().split("|")
        letters = Counter("".join(stages))
        assert letters == Counter("E" + "t" * planner.model.num_layers + "L")
        assert stages[0].startswith("E") and stages[-1].endswith("L")
        assert all("t" in stage for stage in stages[1:-1])
        assert len(stages) == planner.num_ranks * plan.layout.num_chunks


@given(planner=planners())
@example(
    Planner(
        ModelCosts(2, PartCosts((1.0,) * 3), PartCosts((0.0,) * 3), PartCosts((3.0,) * 3)), 2, 1
    )
)
@settings(max_examples=20)
def test_a_plan_is_no_slower_than_the_default_layout(planner):
    """In the example the search ends with both layers on rank 0, which no single move improves."""
    for plan in plans_of(planner):
        default = planner.default_layout(plan.layout.num_chunks)
        if default is not None:
            even = planner.predict(default, "auto").seconds
            assert plan.seconds <= even * 1.01, "1 % is what the planner gives for less memory"


@given(planner=planners(memory=st.floats(50.0, 1500.0)))
@settings(max_examples=20)
def test_the_memory_bound_is_kept(planner):
    for plan in plans_of(planner):
        assert max(plan.peak_bytes) <= planner.memory_bytes


@given(planner=planners(), chunks=st.integers(1, 2))
@settings(max_examples=20)
def test_memory_that_the_default_layout_fits_in_is_enough(planner, chunks):
    default = planner.default_layout(chunks)
    if default is not None:
        planner.memory_bytes = max(planner.predict(default, "strict").peak_bytes)
        assert planner.best([chunks])
