"""Whatever the times, the arrivals and the choices: no deadlock, order inside each chunk, memory
below the cap.

The ranks are stepped by hand here, without a clock: hypothesis decides who is asked next, which
message is delivered, and (for the wild policy) which of the tasks that may run is taken.
``tests/sim`` does the same under virtual time.
"""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.dpp.direction import Direction
from megatron.dpp.schedule import (
    Geometry,
    Kind,
    Scheduler,
    parse_cap,
)

shapes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9))


def allowed(view):
    """Every action that may run now."""
    chunks = range(view.geometry.num_chunks)
    asked = [view.forward(c) for c in chunks] + [view.backward(c) for c in chunks]
    return [action for action in [*asked, view.weight()] if action is not None]


class Pipeline:
    """All ranks of an iteration and the messages between them."""

    def __init__(self, p, v, m, **settings):
        self.p, self.v, self.m = p, v, m
        self.ranks = [self.scheduler(rank, **settings) for rank in range(p)]
        self.ran = [[] for _ in range(p)]
        self.sent = {}
        self.delivered = {}

    def scheduler(
        self, rank, *, cap="strict", policy="dynamic", split=True, w_pieces=None, beta=0.0, **sizes
    ):
        geometry = Geometry(self.p, rank, self.v, self.m, w_pieces=w_pieces)
        chunks = cap if isinstance(cap, float) else parse_cap(cap, geometry).chunks
        return Scheduler(
            geometry, policy=policy, cap=chunks, split_backward=split, beta=beta, **sizes
        )

    def deliverable(self):
        return [key for key, sent in self.sent.items() if self.delivered.get(key, 0) < sent]

    def deliver(self, key):
        direction, stage = key
        self.delivered[key] = self.delivered.get(key, 0) + 1
        self.ranks[stage % self.p].arrived(direction, stage // self.p, self.delivered[key])

    def step(self, rank):
        """Asks one rank for its next task; True if it ran one."""
        scheduler = self.ranks[rank]
        action = scheduler.next()
        if action is None:
            return False
        assert scheduler.held <= scheduler.view.cap + 1e-6
        self.ran[rank].append(action)
        stage = action.chunk * self.p + rank
        if action.kind == Kind.F and stage + 1 < self.p * self.v:
            self._send((Direction.FORWARD, stage + 1))
        if action.kind == Kind.B and stage > 0:
            self._send((Direction.BACKWARD, stage - 1))
        return True

    def _send(self, key):
        self.sent[key] = self.sent.get(key, 0) + 1

    def finish(self, choose):
        """Run to the end; ``choose(list)`` picks who or what is next."""
        while not all(scheduler.done for scheduler in self.ranks):
            moves = [("deliver", key) for key in self.deliverable()]
            moves += [("step", rank) for rank in range(self.p) if not self.ranks[rank].done]
            progressed = False
            while moves and not progressed:
                what, which = moves.pop(choose(len(moves)))
                if what == "deliver":
                    self.deliver(which)
                    progressed = True
                else:
                    progressed = self.step(which)
            assert progressed, "stuck: " + "; ".join(s.stall().text for s in self.ranks)

    def check(self, pieces):
        for rank, ran in enumerate(self.ran):
            for chunk in range(self.v):
                for kind, each in ((Kind.F, 1), (Kind.B, 1), (Kind.W, pieces[chunk])):
                    order = [a[2:] for a in ran if a.kind == kind and a.chunk == chunk]
                    expected = [(i, k) for i in range(self.m) for k in range(each)]
                    assert order == expected
            assert self.ranks[rank].held == 0


@settings(max_examples=120)
@given(shapes, st.data())
def test_any_choice_at_any_time_ends(shape, data):
    """Random choices among the allowed tasks, in any order of events, at the tightest cap."""
    rng = data.draw(st.randoms(use_true_random=False))
    p, v, m = shape
    split = data.draw(st.booleans())
    pieces = tuple(data.draw(st.integers(0, 3)) for _ in range(v))

    def wild(view):
        options = allowed(view)
        return rng.choice(options) if options else None

    pipeline = Pipeline(
        p, v, m, policy=wild, split=split, w_pieces=pieces, beta=data.draw(st.floats(0, 1))
    )
    pipeline.finish(rng.randrange)
    pipeline.check(pieces if split else (0,) * v)


@settings(max_examples=80)
@given(
    shapes,
    st.sampled_from(["dynamic", "depth-first", "megatron"]),
    st.sampled_from(["strict", "megatron", "1.5p", "auto"]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_built_in_policies_end_at_any_cap(shape, policy, cap, split, rng):
    if cap == "1.5p" and shape[1] > 1 and shape[0] < 4:
        cap = "3p"
    pipeline = Pipeline(*shape, policy=policy, cap=cap, split=split)
    pipeline.finish(rng.randrange)
    pipeline.check((int(split),) * shape[1])


@settings(max_examples=40)
@given(shapes, st.randoms(use_true_random=False))
def test_held_is_what_the_counters_say(shape, rng):
    beta = 0.25
    pipeline = Pipeline(*shape, beta=beta, w_pieces=(2,) * shape[1])
    step = pipeline.step

    def checked_step(rank):
        moved = step(rank)
        count = {kind: sum(a.kind == kind for a in pipeline.ran[rank]) for kind in Kind}
        kept = (1 - beta) * (count[Kind.B] - count[Kind.W] / 2)
        expected = count[Kind.F] - count[Kind.B] + kept
        assert pipeline.ranks[rank].held == pytest.approx(expected, abs=1e-9)
        return moved

    pipeline.step = checked_step
    pipeline.finish(rng.randrange)


def test_every_interleaving_of_small_pipelines():
    """Enumerates every reachable state; none of them is stuck."""
    for p, v, m in itertools.product((1, 2), (1, 2), (1, 2, 3)):
        assert count_states(p, v, m) > 0


def count_states(p, v, m):
    """Number of reachable states (counters and messages under way) of fused ranks at the strict
    cap.
    """

    def replayed(moves):
        queue = iter(())

        def scripted(view):
            return next(queue)

        pipeline = Pipeline(p, v, m, split=False, policy=scripted)
        for what, which, action in moves:
            if what == "deliver":
                pipeline.deliver(which)
            else:
                queue = iter([action])
                pipeline.step(which)
        return pipeline

    seen, todo = set(), [()]
    while todo:
        moves = todo.pop()
        pipeline = replayed(moves)
        views = [scheduler.view for scheduler in pipeline.ranks]
        key = (
            tuple(tuple(view.forwards_run + view.backwards_run) for view in views),
            tuple(sorted(pipeline.delivered.items())),
        )
        if key in seen:
            continue
        seen.add(key)
        options = [("deliver", key, None) for key in pipeline.deliverable()]
        for rank, view in enumerate(views):
            options += [("step", rank, action) for action in allowed(view)]
        assert options or all(scheduler.done for scheduler in pipeline.ranks), moves
        todo += [(*moves, option) for option in options]
    return len(seen)


@settings(max_examples=60)
@given(data=st.data())
def test_a_wanted_message_allows_a_task_at_once_and_something_is_always_wanted(data):
    """A task may therefore be launched ahead of any wanted message, and a rank that may run nothing
    waits for one of them.
    """
    p, v = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    m, rank = data.draw(st.integers(1, 6)), data.draw(st.integers(0, p - 1))
    split = data.draw(st.booleans())
    geometry = Geometry(p, rank, v, m, w_pieces=(2,) * v if split else None)
    cap = parse_cap(data.draw(st.sampled_from(["auto", "strict", "megatron", "2p"])), geometry)
    policy = data.draw(st.sampled_from(["dynamic", "depth-first"]))
    scheduler = Scheduler(geometry, policy=policy, cap=cap.chunks, split_backward=split)
    arrived: dict[tuple[int, int], int] = {}
    inside = {(Direction.FORWARD, 0)} if geometry.is_first else set()
    inside |= {(Direction.BACKWARD, v - 1)} if geometry.is_last else set()
    while not scheduler.done:
        if scheduler.next() is not None:
            continue
        wanted = [channel for channel in scheduler.wanted() if channel not in inside]
        channel = data.draw(st.sampled_from(wanted))
        arrived[channel] = arrived.get(channel, 0) + 1
        scheduler.arrived(*channel, arrived[channel])
        assert scheduler.next() is not None
