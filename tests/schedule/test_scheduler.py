"""One rank's scheduler: its order by hand, what it refuses, and a user's own policies."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.dpp.direction import Direction
from megatron.dpp.errors import ConfigError, ScheduleError
from megatron.dpp.schedule import (
    Action,
    Cause,
    Geometry,
    MemoryLimit,
    Reference,
    Scheduler,
    View,
    find_policy,
)
from megatron.dpp.schedule.policies import chosen_policy
from megatron.dpp.schedule.state import Budget, KnownSizes
from tests.schedule.pipelines import follow

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def rank(p: int, r: int, v: int, m: int, **more: Any) -> Geometry:
    return Geometry(p, r, v, m, **more)


def of_one_chunk(view: View) -> Action | None:
    return view.forward(0) or view.backward(0) or view.weight()


EVALUATION = {"forward_only": True}
FUSED = {"split_backward": False}
DEPTH = {"policy": "depth-first", "cap": 12, **FUSED}
BREADTH = {"policy": "breadth-first", "cap": 12, **FUSED}
READY = "f1=2 0F0 0F1 1F0 1F1 b0=2 b1=2 "
ORDERS: dict[str, tuple[Geometry, dict[str, Any], str]] = {
    "a first rank fills and stops at its cap": (
        rank(2, 0, 1, 8), {"cap": 3}, "0F0 0F1 0F2 - b0=2 0B0 0B1 0W0 0F3 0W1 0F4 -",
    ),
    "a fused backward has no W": (rank(2, 1, 1, 3), FUSED, "f0=3 0F0 0B0 0F1 0B1 0F2 0B2 -"),
    "W run first in first out, piece by piece": (
        rank(1, 0, 1, 2, w_pieces=(2,)), {"cap": 4}, "0F0 0B0 0F1 0B1 0W0 0W0.1 0W1 0W1.1 -",
    ),
    "a chunk without pieces defers nothing": (
        rank(1, 0, 1, 2, w_pieces=(0,)), {}, "0F0 0B0 0F1 0B1 -",
    ),
    "an evaluation needs no cap": (
        rank(2, 0, 2, 3, **EVALUATION), {"cap": 0}, "0F0 0F1 0F2 - f1=3 1F0 1F1 1F2 -",
    ),
    "nor one of breadth-first": (
        rank(2, 0, 1, 3, **EVALUATION), {"policy": "breadth-first", "cap": 2}, "0F0 0F1 0F2 -",
    ),
    "a gradient before its forward allows nothing": (
        rank(2, 0, 1, 2), {"cap": 4}, "b0=1 0F0 0B0 0F1 0W0",
    ),
    "depth-first takes gradients first": (
        rank(2, 0, 2, 3), DEPTH, "0F0 f1=1 0F1 b1=0 1F0 f1=2 b1=1 1B0 b0=1 0B0 1F1 b1=2 1B1",
    ),
    "of ready gradients those of the last chunk": (
        rank(2, 0, 2, 2), DEPTH, READY + "1B0 1B1 0B0 0B1 -",
    ),
    "likewise in dynamic": (
        rank(2, 0, 2, 2), {"cap": 12, **FUSED}, READY + "1B0 1B1 0B0 0B1 -",
    ),
    "breadth-first runs all through a chunk": (
        rank(2, 0, 2, 3), BREADTH, "f1=3 0F0 0F1 0F2 1F0 1F1 1F2 b1=3 1B0 1B1 1B2 b0=3 0B0 0B1 0B2",
    ),
    "the lowest cap of one rank runs each through": (
        rank(1, 0, 1, 3), {"cap": 1, **FUSED}, "0F0 0B0 0F1 0B1 0F2 0B2 -",
    ),
    "a forward waits until W make room": (
        rank(1, 0, 1, 2), {"cap": 1.5, "beta": 0.4}, "0F0 0B0 0W0 0F1 0B1 0W1 -",
    ),
    "also by a user's policy": (
        rank(1, 0, 1, 2), {"cap": 1.5, "beta": 0.4, "policy": of_one_chunk},
        "0F0 0B0 0W0 0F1 0B1 0W1 -",
    ),
    "and not where there is room": (
        rank(1, 0, 1, 2), {"cap": 1.6, "beta": 0.4}, "0F0 0B0 0F1 0B1 0W0 0W1 -",
    ),
    "a forward may fill the cap to the last token": (
        rank(1, 0, 1, 2), {"cap": 1, "largest": 10}, "0F0 0B0 0W0 0F1",
    ),
    "a small forward runs where a large one does not fit": (
        rank(2, 0, 2, 4), {"cap": 2.6, "largest": 10, "sizes": (10, 2, 2, 2)},
        "0F0 0F1 0F2 - f1=2 1F0 1F1 -",
    ),
    "a light chunk runs where a heavy one has no room": (
        rank(1, 0, 2, 1), {"cap": 1.5, "weights": (1.0, 0.5), **FUSED}, "f1=1 0F0 1F0",
    ),
    "a size that is learnt makes room": (
        rank(2, 0, 1, 4), {"cap": 2, "largest": 10}, "0F0 s0=2 0F1 s1=2 0F2 s2=10 -",
    ),
    "a limit bounds beside the cap": (
        rank(2, 0, 1, 4), {"cap": 4, "limits": [MemoryLimit(3.0)]}, "0F0 0F1 0F2 -",
    ),
    "a limit counts in sizes of the largest": (
        rank(2, 0, 1, 4),
        {"cap": 4, "largest": 10, "sizes": (5, 10, 5, 5), "limits": [MemoryLimit(2.0)]},
        "0F0 0F1 0F2 -",
    ),
    "what W keep counts under a limit": (
        rank(2, 0, 1, 4), {"cap": 4, "limits": [MemoryLimit(2.0)]}, "0F0 0F1 - b0=1 0B0 0W0",
    ),
    "unless the limit is not of what they keep": (
        rank(2, 0, 1, 4), {"cap": 4, "limits": [MemoryLimit(2.0, deferred=False)]},
        "0F0 0F1 - b0=1 0B0 0F2",
    ),
    "groups of an evaluation are its own": (
        rank(2, 0, 2, 6, group=3, **EVALUATION), {"policy": "depth-first"},
        "f1=6 0F0 0F1 0F2 1F0 1F1 1F2 0F3 0F4 0F5 1F3 1F4 1F5 -",
    ),
    "slices run back from the last": (
        rank(1, 0, 1, 3, groups=(2, 1)), {"cap": 3, **FUSED}, "0F0 0F1 0B1 0F2 0B0 0B2 -",
    ),
    "keys of slices count beside their activations": (
        rank(2, 0, 1, 4, groups=(2, 2)),
        {"cap": 5, "largest": 10, "sizes": (10,) * 4, "kappa": 0.5}, "0F0 0F1 0F2 -",
    ),
    "a backward that is fused keeps nothing": (
        rank(1, 0, 1, 2, w_pieces=(3,)), {"cap": 4, "stock": 0}, "0F0 0B0 0F1 0B1 -",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_orders_by_hand(name: str) -> None:
    geometry, settings, script = ORDERS[name]
    scheduler = Scheduler(geometry, **settings)
    for _ in range(2):
        follow(scheduler, script)
        scheduler.restart(settings.get("sizes"))


def test_what_is_held_is_counted() -> None:
    for beta, held in ((0.0, 1.0), (0.5, 0.5), (1.0, 0.0)):
        scheduler = Scheduler(rank(1, 0, 1, 1), beta=beta)
        follow(scheduler, "0F0 0B0")
        assert scheduler.held == pytest.approx(held)
        follow(scheduler, "0W0")
        assert scheduler.held == 0 and scheduler.peak_held == 1 and scheduler.done
    weighed = Scheduler(rank(2, 0, 2, 2), cap=9, largest=10, weights=(1, 2.5), beta=0.5)
    follow(weighed, "s0=3 0F0 f1=1")
    weighed.run(Action.parse("1F0"))
    assert weighed.held == pytest.approx(0.3 + 0.7), "2.5 * 3, rounded down"
    weighed.arrived(BACKWARD, 1, 1)
    weighed.run(Action.parse("1B0"))
    assert weighed.held == pytest.approx(0.3 + 0.2), "half of one activation is deferred"
    evaluation = Scheduler(rank(2, 0, 1, 8, **EVALUATION), largest=10)
    follow(evaluation, "0F0 0F1 s0=4")
    assert evaluation.held == evaluation.peak_held == 0 and evaluation.sizes[0] == 4


def test_a_soft_limit_is_passed_by_megatrons_next_forward_alone_and_behind_no_weight() -> None:
    reference = Reference(rank(2, 0, 1, 3))  # 0F0 0F1 0B0 0F2 0B1 0B2
    budget, after = Budget(reference, MemoryLimit(0.5, soft=True)), [1, 2, 3, 4, 5, 6, 0]
    assert budget.fits(0, after) and not budget.fits(1, after)
    for place in (0, 1):
        budget.forward(place)
    kept = budget.backward(2, 1)
    after[-1] = 3
    assert not budget.fits(3, after), "a weight gradient is left to run"
    budget.weight(kept, 1, 1)
    assert budget.fits(3, after)
    assumed = Budget(Reference(rank(2, 0, 1, 3)), MemoryLimit(2.0, assumed=4), 10)
    assert (assumed.least, assumed.unrun) == (0.8, 12)  # two are held at once
    assumed.learn(1, 9, [0])
    assert (assumed.least, assumed.unrun) == (1.3, 17)


def test_limits_are_replaced_and_evaluations_held_back() -> None:
    scheduler = Scheduler(rank(2, 0, 1, 4), cap=4, limits=[MemoryLimit(2.0)])
    follow(scheduler, "0F0 0F1 -")
    for limits, order in (
        ([MemoryLimit(3.0)], "0F0 0F1 0F2 -"), (None, "0F0 0F1 0F2 -"), ([], "0F0 0F1 0F2 0F3 -"),
    ):  # fmt: skip
        scheduler.restart(limits=limits)
        follow(scheduler, order)
    evaluation = Scheduler(rank(2, 0, 2, 3, **EVALUATION))
    follow(evaluation, "0F0")
    evaluation.hold_back(held=True)
    follow(evaluation, "- f1=1 1F0 -")
    evaluation.hold_back(held=False)
    follow(evaluation, "0F1")
    training = Scheduler(rank(2, 0, 1, 4))
    own = Scheduler(rank(2, 0, 1, 2, **EVALUATION), policy=lambda view: view.first_forward())
    for one in (training, own):  # the cap bounds one, and the other might wait for ever
        one.hold_back(held=True)
        follow(one, "0F0")


STALLS: list[tuple[Geometry, dict[str, Any], str, Cause, list[tuple[Direction, int]]]] = [
    (rank(4, 1, 1, 2), {}, "-", Cause.WARMUP, [(FORWARD, 0)]),
    (rank(4, 1, 1, 2), {}, "f0=1 0F0 -", Cause.WAIT_FORWARD, [(FORWARD, 0), (BACKWARD, 0)]),
    (rank(4, 1, 1, 2), {}, "f0=2 0F0 0F1 -", Cause.COOLDOWN, [(BACKWARD, 0)]),
    (rank(2, 0, 1, 8), {"cap": 3}, "0F0 0F1 0F2 -", Cause.MEMORY_CAP, [(BACKWARD, 0)]),
    (rank(3, 1, 1, 4), FUSED, "f0=1 0F0 f0=2 0F1 -", Cause.WAIT_BACKWARD,
     [(FORWARD, 0), (BACKWARD, 0)]),
    (rank(2, 0, 2, 2, **EVALUATION), {}, "0F0 0F1 -", Cause.WAIT_FORWARD, [(FORWARD, 1)]),
    (rank(2, 1, 1, 1), FUSED, "f0=1 0F0 0B0 -", Cause.DONE, []),
]  # fmt: skip


@pytest.mark.parametrize(("geometry", "settings", "script", "cause", "channels"), STALLS)
def test_stalls_name_what_is_waited_for(
    geometry: Geometry, settings: Any, script: str, cause: Cause, channels: list[Any]
) -> None:
    scheduler = Scheduler(geometry, **settings)
    follow(scheduler, script)
    stall = scheduler.stall()
    assert (stall.cause, list(stall.channels)) == (cause, channels)
    names = ["gradient" if way is BACKWARD else "input" for way, _ in channels]
    assert all(f"{name} " in stall.text for name in names) and cause.value in stall.text + "done"


def test_messages_that_would_allow_a_task_at_once_are_told() -> None:
    scheduler = Scheduler(rank(2, 0, 2, 4), cap=5)
    follow(scheduler, "0F0 0F1 0F2 -")
    assert scheduler.wanted() == [(BACKWARD, 0), (FORWARD, 1)]
    follow(scheduler, "f1=2 1F0 1F1 -")
    assert scheduler.wanted() == [(BACKWARD, 0), (BACKWARD, 1)]  # no room for another input
    waits = Scheduler(rank(2, 0, 2, 4), policy="megatron", split_backward=False)
    follow(waits, "f1=2 b1=2 b0=1 0F0 0F1 1F0 1F1 0F2 1B0 0F3 1B1 -")
    assert list(map(str, waits.ready())) == ["0B0"] and waits.wanted() == [(FORWARD, 1)]
    evaluation = Scheduler(rank(2, 1, 1, 2, **EVALUATION))
    assert evaluation.wanted() == [(FORWARD, 0)]
    follow(evaluation, "f0=2 0F0 0F1 -")
    assert evaluation.wanted() == []


def one_w(policy: Any = "dynamic", cap: float = 8) -> Scheduler:
    """A last rank with a W of three pieces, of which one has run."""
    scheduler = Scheduler(rank(2, 1, 1, 4, w_pieces=(3,)), policy=policy, cap=cap)
    follow(scheduler, "f0=1 0F0 0B0 0W0")
    return scheduler


def test_a_w_is_run_to_its_end_unless_a_forward_got_room() -> None:
    alone, full, ready = one_w(), one_w(cap=1), one_w()
    assert [str(alone.run_on()) for _ in range(3)] == ["0W0.1", "0W0.2", "None"]
    full.arrived(0, 0, 2)  # its input is here, and a piece makes the room that it waits for
    assert [str(full.run_on()) for _ in range(3)] == ["0W0.1", "0W0.2", "None"]
    follow(full, "0F1")
    ready.arrived(0, 0, 2)
    assert ready.run_on() is None
    follow(ready, "0F1")
    assert (
        one_w(lambda view: view.first_backward() or view.first_forward() or view.weight()).run_on()
        is None
    )


# What is refused

RUNS = {
    "0F1": "0 of 4 F of chunk 0 have run",
    "1F0": "input has not arrived",
    "1B0": "forward has not run",
    "0W0": "no weight gradient is left",
    "2F0": "chunks 0 .. 1",
    "2B0": "chunks 0 .. 1",
}


@pytest.mark.parametrize("action", RUNS)
def test_actions_that_may_not_run_are_refused_with_the_reason(action: str) -> None:
    with pytest.raises(ScheduleError, match=RUNS[action]):
        Scheduler(rank(2, 0, 2, 4)).run(Action.parse(action))


def test_a_backward_waits_for_its_group_and_says_so() -> None:
    scheduler = Scheduler(rank(2, 0, 1, 3, groups=(2, 1)), cap=3)
    for text, why in (("0F0", ""), ("0B1", "not all forwards of its group"), ("0F1", ""),
                      ("0B0", "0 of 3 B .*last microbatch")):  # fmt: skip
        if why:
            with pytest.raises(ScheduleError, match=why):
                scheduler.run(Action.parse(text))
        else:
            scheduler.run(Action.parse(text))
    scheduler.run(Action.parse("0F2"))
    assert "gradient 1 of chunk 0" in scheduler.stall().text


ARRIVALS = [
    (0, FORWARD, 0, 1, "from the data"),
    (1, BACKWARD, 1, 1, "from the loss"),
    (0, FORWARD, 1, 5, "only grows, to 4"),
    (1, FORWARD, 0, 1, "only grows"),
    *((0, way, chunk, 1, r"has 0 \.\. 1") for way in (FORWARD, BACKWARD) for chunk in (-1, 2)),
]


@pytest.mark.parametrize(("own", "direction", "chunk", "total", "why"), ARRIVALS)
def test_impossible_arrivals_are_refused(
    own: int, direction: Direction, chunk: int, total: int, why: str
) -> None:
    scheduler = Scheduler(rank(2, own, 2, 4))
    if own:
        scheduler.arrived(FORWARD, 0, 2)
    with pytest.raises(ScheduleError, match=why):
        scheduler.arrived(direction, chunk, total)


SETTINGS: list[tuple[Geometry, dict[str, Any], str]] = [
    (rank(3, 0, 2, 6), {"cap": 6}, "needs 8"),
    (rank(1, 0, 1, 1), {"beta": 1.5}, "beta"),
    (rank(2, 0, 1, 4), {"largest": 0}, "largest 0"),
    (rank(2, 0, 2, 4), {"limits": [MemoryLimit(4.0)]}, r"may hold 4 .* needs 5;"),
    (rank(2, 0, 2, 4), {"weights": (1.0,)}, "for each of 2 chunks"),
    (rank(2, 0, 2, 4), {"weights": (1.0, -1.0)}, "one of at least 0"),
    (rank(2, 0, 1, 4), {"largest": 10, "sizes": [1] * 3}, "3 sizes were given for 4"),
    (rank(2, 0, 1, 4), {"cap": 1.3, "largest": 10, "sizes": (10, 4, 4, 4)}, "1.3 .* needs 1.4"),
    (rank(2, 0, 2, 8), {"policy": "breadth-first"}, r"16.*activation_cap='4.25p'"),
    (rank(2, 0, 2, 8), {"policy": "breadth-first", **FUSED}, r"activation_cap='4p'"),
    (rank(1, 0, 1, 8), {"policy": "breadth-first", "cap": 7}, r"activation_cap='8p'"),
]


@pytest.mark.parametrize(("geometry", "settings", "why"), SETTINGS)
def test_settings_that_cannot_work_are_refused(geometry: Geometry, settings: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Scheduler(geometry, **settings)


def test_sizes_are_checked() -> None:
    sizes = KnownSizes(rank(2, 0, 1, 3), 10)
    assert sizes.learn(0, 0) and sizes.learn(1, 10)
    assert sizes.unlike() == [0, 10, 10] and sizes[2] == 10
    for microbatch, size, why in (
        (2, -1, "has size -1; .* from 0 to 10"), (2, 11, "has size 11; .* from 0 to 10"),
        (1, 9, "has size 9, but had size 10 before"), (1, 0, "has size 0, but had size 10"),
        (3, 1, "microbatches 0 .. 2"),
    ):  # fmt: skip
        with pytest.raises(ScheduleError, match=why):
            sizes.learn(microbatch, size)
    scheduler = Scheduler(rank(1, 0, 2, 2), largest=10, split_backward=False)
    follow(scheduler, "f1=1 0F0 1F0 1B0")
    with pytest.raises(ScheduleError, match="microbatch 0, 5, comes after its first backward"):
        scheduler.learn(0, 5)


# Policies of users


def wait_once(view: View) -> None:
    """A user's policy, found by name."""


class Insists:
    """A user's policy that wants a backward before its forward."""

    def __call__(self, view: View) -> Action:
        return Action.parse("0B0")


def returns_text(view: View) -> str:
    return "hello"


def divides(view: View) -> float:
    return 1 / 0


def no_view() -> None:
    """Not a policy: it takes no view."""


class Needs:
    """Not a policy: it cannot be made without an argument."""

    def __init__(self, something: object) -> None:
        del something


FAILS = {
    "returns_text": r"returned 'hello': expected an action",
    "divides": r"failed on pipeline rank 0: ZeroDivisionError.*test_scheduler.py, line",
    "Insists": r": pipeline rank 0: 0B0 may not run",
    "wait_once": r"returned None on pipeline rank 0.*0F0 may run",
}


@pytest.mark.parametrize("name", FAILS)
def test_a_policy_that_fails_is_named(name: str) -> None:
    scheduler = Scheduler(rank(1, 0, 1, 1), policy=f"{__name__}:{name}")
    with pytest.raises(ScheduleError, match=f"policy='{__name__}:{name}'.*{FAILS[name]}"):
        scheduler.next()


def test_waiting_is_allowed_as_long_as_a_message_may_come() -> None:
    """The messages that may arrive are those that the pipeline could have sent."""
    waits = Scheduler(rank(2, 1, 1, 2), policy=wait_once)  # type: ignore[arg-type]
    follow(waits, "f0=1 -")
    assert waits.stall().cause is Cause.POLICY
    scheduler = Scheduler(rank(2, 0, 2, 2), policy=lambda view: view.forward(0))
    follow(scheduler, "0F0 0F1 f1=1 - f1=2")
    with pytest.raises(ScheduleError, match="1F0 may run"):
        scheduler.next()
    forgets = Scheduler(
        rank(2, 1, 1, 1), policy=lambda view: view.first_backward() or view.first_forward()
    )
    follow(forgets, "- f0=1 0F0 0B0")
    with pytest.raises(ScheduleError, match=r"nothing more will arrive.*0W0 may run"):
        forgets.next()
    evaluation = Scheduler(
        rank(2, 0, 1, 2, **EVALUATION),
        policy=lambda view: None if view.forwards_run[0] else view.first_forward(),
    )
    follow(evaluation, "0F0")
    with pytest.raises(ScheduleError, match=r"nothing more will arrive.*0F1 may run"):
        evaluation.next()  # no gradient comes


@pytest.mark.parametrize(
    "name",
    [
        "fastest", "nowhere_at_all:x", f"{__name__}:nothing", "json:__doc__", ":x", ".x:y",
        f"{__name__}:no_view", f"{__name__}:Needs", "json:",
    ],
)  # fmt: skip
def test_unknown_policies_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^DppConfig\(policy="):
        find_policy(name)


@pytest.mark.parametrize(
    ("ranks", "chunks", "least", "policy"),
    [(4, 1, 1.0, "eager"), (4, 1, 0.2, "dynamic"), (4, 2, 0.2, "dynamic"), (4, 2, 1.0, "megatron"),
     (2, 1, 1.0, "eager"), (2, 1, 0.2, "eager"), (2, 2, 0.2, "megatron")],
)  # fmt: skip
def test_auto_is_chosen_by_ranks_chunks_and_lengths(
    ranks: int, chunks: int, least: float, policy: str
) -> None:
    assert chosen_policy("auto", ranks, chunks, least) == policy
    assert chosen_policy("eager", ranks, chunks, least) == "eager"
