"""One rank's scheduler: allowed actions, refusals and messages."""

import pytest

from megatron.dpp.direction import Direction
from megatron.dpp.errors import ConfigError, ScheduleError
from megatron.dpp.schedule import (
    Action,
    Cause,
    Geometry,
    MemoryLimit,
    Scheduler,
    find_policy,
)


def drain(scheduler):
    ran = []
    while (action := scheduler.next()) is not None:
        ran.append(str(action))
    return " ".join(ran)


def wait_once(view):
    """A user's policy, found by name."""
    del view


class Insists:
    """A user's policy that wants a backward before its forward."""

    def __call__(self, view):
        return Action.parse("0B0")


def returns_text(view):
    return "hello"


def divides(view):
    return 1 / 0


def no_view():
    """Not a policy: it takes no view."""


class Needs:
    """Not a policy: it cannot be made without an argument."""

    def __init__(self, something):
        del something


def drained(scheduler, count):
    return [str(scheduler.next()) for _ in range(count)]


def test_a_first_rank_fills_and_stops_at_its_cap():
    scheduler = Scheduler(Geometry(2, 0, 1, 8), cap=3)
    assert drain(scheduler) == "0F0 0F1 0F2"
    assert scheduler.held == scheduler.peak_held == 3
    stall = scheduler.stall()
    assert stall.cause is Cause.MEMORY_CAP
    assert stall.channels == ((Direction.BACKWARD, 0),)
    scheduler.arrived(Direction.BACKWARD, 0, 2)
    assert drain(scheduler) == "0B0 0B1 0W0 0F3 0W1 0F4"
    assert scheduler.peak_held == 3


def test_fused_backward_emits_no_weight_gradients():
    scheduler = Scheduler(Geometry(2, 1, 1, 3), split_backward=False)
    scheduler.arrived(Direction.FORWARD, 0, 3)
    assert drain(scheduler) == "0F0 0B0 0F1 0B1 0F2 0B2"
    assert scheduler.done
    assert scheduler.stall().cause is Cause.DONE
    assert scheduler.num_out_of_order == 0


def test_weight_gradients_go_first_in_first_out_piece_by_piece():
    scheduler = Scheduler(Geometry(1, 0, 1, 2, w_pieces=(2,)), cap=4)
    assert drain(scheduler) == "0F0 0B0 0F1 0B1 0W0 0W0.1 0W1 0W1.1"
    assert scheduler.held == 0


def test_a_chunk_without_pieces_defers_nothing():
    scheduler = Scheduler(Geometry(1, 0, 1, 2, w_pieces=(0,)))
    assert drain(scheduler) == "0F0 0B0 0F1 0B1"
    assert scheduler.done


@pytest.mark.parametrize(("beta", "held"), [(0.0, 1.0), (0.5, 0.5), (1.0, 0.0)])
def test_beta_is_what_a_backward_frees(beta, held):
    scheduler = Scheduler(Geometry(1, 0, 1, 1), beta=beta)
    scheduler.next(), scheduler.next()
    assert scheduler.held == pytest.approx(held)
    scheduler.next()
    assert scheduler.held == 0


def test_forward_only_holds_nothing_and_needs_no_cap():
    scheduler = Scheduler(Geometry(2, 0, 2, 3, forward_only=True), cap=0)
    assert drain(scheduler) == "0F0 0F1 0F2"
    scheduler.arrived(Direction.FORWARD, 1, 3)
    assert drain(scheduler) == "1F0 1F1 1F2"
    assert scheduler.done and scheduler.peak_held == 0


def test_what_is_held_back_in_an_evaluation_drains():
    scheduler = Scheduler(Geometry(2, 0, 2, 4, forward_only=True), policy="depth-first")
    assert str(scheduler.next()) == "0F0"
    scheduler.arrived(Direction.FORWARD, 1, 1)
    scheduler.hold_back(held=True)
    assert str(scheduler.next()) == "1F0"
    assert scheduler.next() is None
    scheduler.hold_back(held=False)
    assert str(scheduler.next()) == "0F1"
    training = Scheduler(Geometry(2, 0, 1, 4))
    training.hold_back(held=True)
    assert str(training.next()) == "0F0", "the cap bounds what is under way"


def test_a_gradient_before_its_forward_allows_nothing():
    scheduler = Scheduler(Geometry(2, 0, 1, 2))
    scheduler.arrived(Direction.BACKWARD, 0, 1)
    view = scheduler.view
    assert view.backward(0) is None and view.first_backward() is None
    assert [str(scheduler.next()) for _ in range(2)] == ["0F0", "0B0"]


def test_restart_replaces_limits():
    scheduler = Scheduler(Geometry(2, 0, 1, 4), cap=4, limits=[MemoryLimit(2.0)])
    assert drain(scheduler) == "0F0 0F1"
    for limits, order in (
        ([MemoryLimit(3.0)], "0F0 0F1 0F2"),
        (None, "0F0 0F1 0F2"),
        ([], "0F0 0F1 0F2 0F3"),
    ):
        scheduler.restart(limits=limits)
        assert drain(scheduler) == order


def test_a_limit_counts_in_sizes_of_the_largest_microbatch():
    limit, geometry = MemoryLimit(2.0), Geometry(2, 0, 1, 4)
    scheduler = Scheduler(geometry, cap=4, largest=10, sizes=[5] * 4, limits=[limit])
    assert drain(scheduler) == "0F0 0F1 0F2 0F3"
    scheduler.restart([5, 10, 5, 5])
    assert drain(scheduler) == "0F0 0F1 0F2"


@pytest.mark.parametrize(
    ("deferred", "beta", "then"), [(True, 0.0, "0W0"), (True, 1.0, "0F2"), (False, 0.0, "0F2")]
)
def test_what_weight_gradients_keep_counts_under_a_limit(deferred, beta, then):
    limit = MemoryLimit(2.0, deferred=deferred)
    scheduler = Scheduler(Geometry(2, 0, 1, 4), cap=4, beta=beta, limits=[limit])
    assert drain(scheduler) == "0F0 0F1"
    scheduler.arrived(Direction.BACKWARD, 0, 1)
    assert [str(scheduler.next()) for _ in range(2)] == ["0B0", then]


def test_restart_forgets():
    scheduler = Scheduler(Geometry(1, 0, 1, 3))
    first = drain(scheduler)
    scheduler.restart()
    assert not scheduler.done
    assert drain(scheduler) == first


def test_stalls_name_what_is_waited_for():
    scheduler = Scheduler(Geometry(4, 1, 1, 2))
    assert scheduler.next() is None
    stall = scheduler.stall()
    assert stall.cause is Cause.WARMUP and stall.channels == ((Direction.FORWARD, 0),)
    scheduler.arrived(Direction.FORWARD, 0, 1)
    drain(scheduler)
    assert scheduler.stall().cause is Cause.WAIT_FORWARD
    scheduler.arrived(Direction.FORWARD, 0, 2)
    drain(scheduler)
    stall = scheduler.stall()
    assert stall.cause is Cause.COOLDOWN and "gradient 0 of chunk 0" in stall.text


def test_a_wait_is_named_by_the_task_that_megatrons_order_has_next():
    """A rank in the middle waits for both of its neighbours."""
    scheduler = Scheduler(Geometry(3, 1, 1, 4), split_backward=False)
    for number, cause in ((1, Cause.WAIT_FORWARD), (2, Cause.WAIT_BACKWARD)):
        scheduler.arrived(Direction.FORWARD, 0, number)
        assert drain(scheduler) == f"0F{number - 1}"
        stall = scheduler.stall()
        assert stall.cause is cause and len(stall.channels) == 2


def test_an_evaluation_waits_for_no_gradient():
    scheduler = Scheduler(Geometry(2, 0, 2, 2, forward_only=True))
    assert drain(scheduler) == "0F0 0F1"
    assert scheduler.stall().channels == ((Direction.FORWARD, 1),)


def test_messages_that_would_allow_a_task_at_once_are_told():
    scheduler = Scheduler(Geometry(2, 0, 2, 4), cap=5)
    assert drain(scheduler) == "0F0 0F1 0F2"
    assert scheduler.wanted() == [(Direction.BACKWARD, 0), (Direction.FORWARD, 1)]
    scheduler.arrived(Direction.FORWARD, 1, 2)
    assert drain(scheduler) == "1F0 1F1"
    assert scheduler.wanted() == [
        (Direction.BACKWARD, 0),
        (Direction.BACKWARD, 1),
    ]  # no room for another input
    evaluation = Scheduler(Geometry(2, 1, 1, 2, forward_only=True))
    assert evaluation.wanted() == [(Direction.FORWARD, 0)]
    evaluation.arrived(Direction.FORWARD, 0, 2)
    assert drain(evaluation) == "0F0 0F1" and evaluation.wanted() == []


def test_a_message_that_is_here_and_that_the_policy_waits_with_is_not_wanted_again():
    scheduler = Scheduler(Geometry(2, 0, 2, 4), policy="megatron", split_backward=False)
    for direction, chunk, total in ((0, 1, 2), (1, 1, 2), (1, 0, 1)):
        scheduler.arrived(direction, chunk, total)
    assert drain(scheduler) == "0F0 0F1 1F0 1F1 0F2 1B0 0F3 1B1"
    assert list(map(str, scheduler.ready())) == ["0B0"]
    assert scheduler.wanted() == [(Direction.FORWARD, 1)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0F1", "0 of 4 F of chunk 0 have run"),
        ("1F0", "input has not arrived"),
        ("1B0", "forward has not run"),
        ("0W0", "no weight gradient is left"),
        ("2F0", "chunks 0 .. 1"),
        ("2B0", "chunks 0 .. 1"),
    ],
)
def test_actions_that_may_not_run_are_refused_with_the_reason(text, why):
    scheduler = Scheduler(Geometry(2, 0, 2, 4))
    with pytest.raises(ScheduleError, match=why):
        scheduler.run(Action.parse(text))


def test_a_follower_runs_what_the_leader_decided():
    leader, follower = (Scheduler(Geometry(1, 0, 2, 4)) for _ in range(2))
    while not leader.done:
        for chunk, ran in enumerate(leader.view.forwards_run[:1]):
            for one in (leader, follower):
                one.arrived(Direction.FORWARD, chunk + 1, ran)
                one.arrived(Direction.BACKWARD, 0, leader.view.backwards_run[1])
        action = leader.next()
        follower.run(action)
    assert follower.done
    assert follower.peak_held == leader.peak_held


@pytest.mark.parametrize(
    ("direction", "chunk", "total", "why"),
    [
        (Direction.FORWARD, 0, 1, "from the data"),
        (Direction.FORWARD, 1, 5, "only grows, to 4"),
        (Direction.BACKWARD, 7, 1, "has 0 .. 1"),
    ],
)
def test_impossible_arrivals_are_refused(direction, chunk, total, why):
    scheduler = Scheduler(Geometry(2, 0, 2, 4))
    with pytest.raises(ScheduleError, match=why):
        scheduler.arrived(direction, chunk, total)


def test_counts_of_arrivals_only_grow():
    scheduler = Scheduler(Geometry(2, 1, 1, 4))
    scheduler.arrived(Direction.FORWARD, 0, 2)
    with pytest.raises(ScheduleError, match="only grows"):
        scheduler.arrived(Direction.FORWARD, 0, 1)
    with pytest.raises(ScheduleError, match="from the loss"):
        scheduler.arrived(Direction.BACKWARD, 0, 1)


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="needs 8"):
        Scheduler(Geometry(3, 0, 2, 6), cap=6)
    with pytest.raises(ConfigError, match="beta"):
        Scheduler(Geometry(1, 0, 1, 1), beta=1.5)


def test_breadth_first_says_how_much_room_it_needs():
    geometry = Geometry(2, 0, 2, 8)
    with pytest.raises(ConfigError, match=r"16.*activation_cap='4.25p'"):
        Scheduler(geometry, policy="breadth-first")
    with pytest.raises(ConfigError, match=r"activation_cap='4p'\) \("):  # no room for a head
        Scheduler(geometry, policy="breadth-first", split_backward=False)
    with pytest.raises(ConfigError, match=r"activation_cap='8p'\) \("):  # nor on a single rank
        Scheduler(Geometry(1, 0, 1, 8), policy="breadth-first", cap=7)
    scheduler = Scheduler(geometry, policy="breadth-first", cap=16)
    scheduler.arrived(Direction.FORWARD, 1, 2)
    assert drain(scheduler) == " ".join([f"0F{i}" for i in range(8)] + ["1F0", "1F1"])


def test_users_policies_are_found_by_name_and_checked():
    scheduler = Scheduler(Geometry(2, 1, 1, 2), policy=f"{__name__}:wait_once")
    scheduler.arrived(Direction.FORWARD, 0, 1)
    assert scheduler.next() is None
    assert scheduler.stall().cause is Cause.POLICY
    with pytest.raises(
        ScheduleError, match=r"policy=.*:Insists'\): pipeline rank 0: 0B0 may not run"
    ):
        Scheduler(Geometry(1, 0, 1, 1), policy=f"{__name__}:Insists").next()


def test_a_policy_that_waits_for_nothing_is_an_error_and_no_hang():
    waits = Scheduler(Geometry(2, 0, 2, 2), policy=wait_once)
    with pytest.raises(ScheduleError, match=r"returned None on pipeline rank 0.*0F0 may run"):
        waits.next()
    forgets_weights = Scheduler(
        Geometry(2, 1, 1, 1), policy=lambda view: view.first_backward() or view.first_forward()
    )
    assert forgets_weights.next() is None  # an input is still to come
    forgets_weights.arrived(Direction.FORWARD, 0, 1)
    assert drained(forgets_weights, 2) == ["0F0", "0B0"]
    with pytest.raises(ScheduleError, match=r"nothing more will arrive.*0W0 may run"):
        forgets_weights.next()
    evaluation = Scheduler(
        Geometry(2, 0, 1, 2, forward_only=True),
        policy=lambda view: None if view.forwards_run[0] else view.first_forward(),
    )
    assert str(evaluation.next()) == "0F0"
    with pytest.raises(ScheduleError, match=r"nothing more will arrive.*0F1 may run"):
        evaluation.next()  # no gradient comes


def test_waiting_is_allowed_as_long_as_a_message_may_come():
    """The messages that may arrive are those that the pipeline could have sent."""
    scheduler = Scheduler(Geometry(2, 0, 2, 2), policy=lambda view: view.forward(0))
    assert drained(scheduler, 2) == ["0F0", "0F1"]
    scheduler.arrived(Direction.FORWARD, 1, 1)
    assert scheduler.next() is None  # the other input of chunk 1
    scheduler.arrived(Direction.FORWARD, 1, 2)
    with pytest.raises(ScheduleError, match="1F0 may run"):
        scheduler.next()


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("returns_text", "returned 'hello': expected an action"),
        ("divides", r"failed on pipeline rank 0: ZeroDivisionError.*test_scheduler.py, line"),
    ],
)
def test_a_policy_that_fails_is_named(policy, why):
    scheduler = Scheduler(Geometry(1, 0, 1, 1), policy=f"{__name__}:{policy}")
    with pytest.raises(ScheduleError, match=rf"policy='{__name__}:{policy}'\) {why}"):
        scheduler.next()


@pytest.mark.parametrize(
    "name",
    [
        "fastest", "nowhere_at_all:x", f"{__name__}:nothing", "json:__doc__", ":x", ".x:y",
        f"{__name__}:no_view", f"{__name__}:Needs", "json:",
    ],
)  # fmt: skip
def test_unknown_policies_are_refused(name):
    with pytest.raises(ConfigError, match=r"^DppConfig\(policy="):
        find_policy(name)


def test_a_users_policy_is_not_held_back_in_an_evaluation():
    """It may wait for what it did not get, where nothing more would arrive."""
    geometry = Geometry(2, 0, 1, 2, forward_only=True)
    own = Scheduler(geometry, policy=lambda view: view.first_forward())
    built_in = Scheduler(geometry, policy="depth-first")
    for scheduler in (own, built_in):
        scheduler.hold_back(held=True)
    assert str(own.next()) == "0F0" and built_in.next() is None
