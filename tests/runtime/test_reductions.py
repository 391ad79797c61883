"""The start of gradient reductions in a replayed backward. test_equality.py compares the
numbers with DDP's."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.core.graphs.capture import CapturedRng, cuda_capture
from megatron.dpp.core.graphs.reductions import Reductions

DEADLINE = 20.0


class Group:
    """The part of DDP's bucket group that reductions use."""

    def __init__(self, name: str, reduced: Callable[[str], None], num_expected: int) -> None:
        self.name, self.is_last_microbatch = name, True
        self._reduced, self.num_left = reduced, num_expected

    def register_grad_ready(self, parameter: torch.nn.Parameter, everywhere: bool) -> None:
        self.num_left -= 1
        if not self.num_left:
            self._reduced(self.name)


def setting(
    names: str,
    extra: str = "",
    reduced: Callable[[str], None] | None = None,
    instances: int = 1,
) -> tuple[Reductions, list[torch.nn.Parameter], list[str], list[Group]]:
    """A block whose parameters lie in the groups of these names, each group's gradients as often
    as its name is there; ``extra`` ones come from elsewhere."""
    order: list[str] = []
    groups = {
        name: Group(name, reduced or order.append, (names + extra).count(name)) for name in names
    }
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in names]
    chunk = SimpleNamespace(
        ddp_config=SimpleNamespace(
            overlap_grad_reduce=True, num_distributed_optimizer_instances=instances
        ),
        bucket_groups=list(groups.values()),
        param_to_bucket_group={p: groups[name] for p, name in zip(parameters, names, strict=True)},
        force_all_reduce=False,
    )
    return Reductions(chunk, parameters), parameters, order, list(groups.values())


def test_groups_are_reduced_in_the_order_in_which_their_last_gradient_is_added() -> None:
    found, parameters, order, _ = setting("aabbcb")
    added = found.additions()
    for parameter in reversed(parameters):
        added.add(parameter)
    found.start(added)
    assert order == ["c", "b", "a"]


def test_a_group_with_parameters_outside_of_the_block_waits_for_theirs() -> None:
    found, parameters, order, groups = setting("aab", extra="a")
    added = found.additions()
    for parameter in parameters:
        added.add(parameter)
    found.start(added)
    assert order == ["b"]
    groups[0].register_grad_ready(torch.nn.Parameter(torch.zeros(1)), False)
    assert order == ["b", "a"]


def test_before_the_last_microbatch_and_within_a_capture_nothing_is_reduced() -> None:
    found, parameters, order, groups = setting("ab")
    added = found.additions()
    with found.held_back():
        assert not any(group.is_last_microbatch for group in groups)
        for parameter in parameters:
            added.add(parameter)
    assert all(group.is_last_microbatch for group in groups)
    for group in groups:
        group.is_last_microbatch = False
    found.start(added)
    assert not order


@pytest.mark.parametrize("last", [True, False])
def test_a_capture_leaves_each_group_the_microbatch_it_was_at(last: bool) -> None:
    """A capture may fail, and may come before the last microbatch: a reduction would be early."""
    found, _, _, groups = setting("ab")
    for group in groups:
        group.is_last_microbatch = last
    with pytest.raises(ValueError, match="capture"), found.held_back():
        raise ValueError("the capture failed")
    assert [group.is_last_microbatch for group in groups] == [last, last]


@pytest.mark.parametrize("options", [None, SimpleNamespace(overlap_grad_reduce=False)])
def test_where_ddp_reduces_at_the_end_of_a_step_nothing_is_reduced_here(options: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    group = Group("a", pytest.fail, 1)
    chunk = SimpleNamespace(
        ddp_config=options, bucket_groups=[group], param_to_bucket_group={parameter: group}
    )
    found = Reductions(chunk, [parameter])
    added = found.additions()
    added.add(parameter)
    found.start(added)
    assert not added.parameters


@pytest.mark.parametrize("instances", [1, 2])
def test_an_event_is_recorded_where_a_group_is_complete(
    instances: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is recorded again if a parameter comes again. With several optimizer instances DDP waits
    for the whole replay anyway.
    """
    recorded = iter(range(9))

    class Event(int):
        """An event with a number; of a graph, which records it in each replay."""

        def __new__(cls, *, external: bool) -> Event:
            assert external
            return super().__new__(cls, next(recorded))

        def record(self) -> None:
            marked.append(int(self))

    marked: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name in ("is_available", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    found, parameters, _, groups = setting("aab", instances=instances)
    added = found.additions()
    events = []
    for parameter in [*parameters, parameters[0]]:
        added.add(parameter)
        events.append([added.event(group) for group in groups])
    complete = [[None, None], [0, None], [0, 1], [2, 1]]
    assert events == (complete if instances == 1 else [[None, None]] * 4)
    assert marked == ([0, 1, 2] if instances == 1 else [])


@pytest.mark.gpu
def test_a_reduction_begins_while_its_backward_is_still_running() -> None:
    """The captured work sleeps in its middle for about a second."""
    gradients = torch.zeros(2, device="cuda")
    seen: dict[str, Any] = {}

    def reduced(name: str) -> None:
        copy = gradients.clone()
        event = torch.cuda.Event()
        event.record()
        seen[name] = (copy, event)

    found, parameters, _, groups = setting("ab", reduced=reduced)
    added = found.additions()

    def backward() -> None:
        gradients[0] += 1
        added.add(parameters[0])
        torch.cuda._sleep(2_000_000_000)
        gradients[1] += 1
        added.add(parameters[1])

    graph = cuda_capture(CapturedRng())(backward, None)
    for _ in range(2):
        with torch.no_grad():
            gradients.zero_()
        torch.cuda.synchronize()
        graph.replay()
        for group in groups:
            group.num_left = 1
        found.start(added)
        end = time.monotonic() + DEADLINE
        while not seen["a"][1].query() and time.monotonic() < end:
            time.sleep(0.001)
        early, late = seen["a"][1].query(), seen["b"][1].query()
        torch.cuda.synchronize()
        assert early and not late
        assert seen["a"][0].tolist() == [1.0, 0.0]
        assert seen["b"][0].tolist() == [1.0, 1.0]
