"""Microbatches in a planned order: what runs, what a host gets back, and what keeps its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core.pipeline_parallel")

from megatron.core.pipeline_parallel import schedules

from megatron.dpp import DppConfig, plugin
from megatron.dpp.errors import ConfigError
from megatron.dpp.runtime.dynamic import DppSchedule
from tests.plugin.test_plugin import keywords
from tests.plugin.test_plugin_lengths import rollout, with_arguments
from tests.runtime.cases import UNLIKE
from tests.runtime.launcher import run_ranks

WORKER = Path(__file__).parent / "hosts_like" / "planned_worker.py"
SIZES = [900, 100, 9000, 200, 300, 5000, 100, 800]
OTHERWISE: dict[str, int] = {}
"""Items ``per`` microbatch, and the difference of the ``other`` rank's order."""


def case(name: str, p: int, v: int, m: int, **run: Any) -> dict[str, Any]:
    return {
        "name": name, "p": p, "v": v, "m": m, "layers": 4, "spec": "host", "model": UNLIKE,
        "run": run,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (2, [case("2 x 2", 2, 2, 8), case("2 x 1", 2, 1, 6, split_backward="off")]),
        (4, [case("4 x 1", 4, 1, 8), case("dynamic", 4, 1, 8, policy="dynamic")]),
    ],
)
def test_a_planned_order_is_bitwise_static_in_it_and_the_hosts_to_rounding(
    num_ranks: int, cases: list[dict[str, Any]]
) -> None:
    output = run_ranks(WORKER, num_ranks, [json.dumps(cases)], timeout=240)
    assert all(f"CASE {each['name']} ok" in output for each in cases)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The steps of the dynamic schedule: what it was told, took and ran by. Forward steps return
    what they take as their losses.
    """
    found: list[dict[str, Any]] = []
    told: list[Any] = []

    def run(self: DppSchedule, **given: Any) -> list[Any]:
        iterator = given["data_iterator"]
        take = getattr(iterator, "get_next", None) or (lambda: next(iterator))
        number = given["num_microbatches"]
        taken = [take() for _ in range(number * OTHERWISE.get("per", 1))]
        found.append({"told": told[-1:], "taken": taken, "policy": self.policy})
        told.clear()
        return taken[:number]

    def reduce(marks: torch.Tensor, **_: Any) -> Any:
        marks += OTHERWISE.get("other", 0)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(DppSchedule, "__call__", run)
    monkeypatch.setattr(DppSchedule, "announce", lambda self, sizes, rows=(): told.append(sizes))
    monkeypatch.setattr(torch.distributed, "all_reduce", reduce)
    yield found
    OTHERWISE.clear()


def train(**more: Any) -> list[Any]:
    """One step of eight microbatches, whose items are their numbers."""
    given = {"data_iterator": iter(range(8)), "num_microbatches": 8, **more}
    losses: list[Any] = schedules.get_forward_backward_func()(**keywords(**given))
    return losses


def planned(**settings: Any) -> None:
    plugin.install(DppConfig(split_backward="off", **{"call_order": "planned", **settings}))


def test_losses_come_back_in_the_hosts_order(
    steps: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    planned()
    for given in ({"sizes": SIZES}, {"rows": [[size] for size in SIZES]}):
        plugin.announce(**given)
        assert train() == list(range(8))
        step = steps.pop()
        assert step["taken"] != sorted(step["taken"]) == list(range(8))
        assert step["told"] == [[SIZES[number] for number in step["taken"]]]
        assert step["policy"] == "eager", "one chunk"
    assert caplog.text.count("run in a planned order") == 1
    assert "(call_order='megatron') keeps the host's order" in caplog.text
    plugin.announce(SIZES)
    assert train(forward_only=True) == list(range(8)) == steps.pop()["taken"], "an evaluation"
    assert train() == list(range(8)) != steps.pop()["taken"]


class Arrays:
    """An iterator without ``__iter__``, whose items are arrays."""

    def __init__(self) -> None:
        self.taken = 0

    def __next__(self) -> Any:
        self.taken += 1
        return np.array([self.taken, 0])


def test_items_may_be_of_any_type(steps: list[dict[str, Any]]) -> None:
    """Arrays have no truth value."""
    planned()
    plugin.announce(SIZES)
    own = Arrays()
    assert [int(item[0]) for item in train(data_iterator=own)] == list(range(1, 9))
    assert own.taken == 8


@pytest.mark.parametrize("host", ["slime", "miles"])
def test_rollouts_are_ordered_by_their_indices(steps: list[dict[str, Any]], host: str) -> None:
    planned()
    own = rollout(host, [[number] for number in range(10)], offset=1)

    def get_next(self: Any) -> int:
        self.offset += 1
        return int(self.micro_batch_indices[self.offset - 1][0])

    type(own).get_next = get_next
    plugin.announce(SIZES)
    assert train(data_iterator=own) == list(range(1, 9))
    assert steps[0]["taken"] != list(range(1, 9)) and own.offset == 9
    assert own.micro_batch_indices == [[number] for number in range(10)]


@pytest.mark.parametrize(
    ("settings", "model", "host", "iterator", "said"),
    [
        ({"record": "FILE"}, {}, {}, None, "record='FILE'"),
        ({}, {"enable_routing_replay": True}, {}, None, "routers replay what calls"),
        ({}, {}, {"use_routing_replay": True}, None, "routers replay what calls"),
        ({}, {"expert_model_parallel_size": 2}, {}, None, "replicas that share experts"),
        ({}, {"moe_router_load_balancing_type": "global_aux_loss"}, {}, None, "global_aux_loss"),
        ({}, {}, {}, SimpleNamespace(get_next=lambda: 0), "data comes from a SimpleNamespace"),
        ({"call_order": "megatron"}, {}, {}, None, ""),
        ({"call_order": "auto"}, {}, {}, None, "less time for this step by simulation"),
    ],
)
def test_microbatches_keep_their_order_where_it_counts(
    settings: dict[str, Any], model: dict[str, Any], host: dict[str, Any], iterator: Any,
    said: str, steps: list[dict[str, Any]], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if host:
        with_arguments(monkeypatch, **host)
    planned(**settings)
    plugin.announce(SIZES)
    assert train(config=model, data_iterator=iterator or iter(range(8))) == steps[0]["taken"]
    assert iterator or steps[0]["taken"] == list(range(8))
    assert steps[0]["policy"] is None
    lines = [each for each in caplog.text.splitlines() if "microbatches" in each]
    assert len(lines) == bool(said) and said in caplog.text


@pytest.mark.parametrize("sizes", [None, [500] * 8])
def test_unknown_or_equal_sizes_keep_the_hosts_order(
    sizes: list[int] | None, steps: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    planned()
    if sizes:
        plugin.announce(sizes)
    assert train() == list(range(8)) == steps[0]["taken"]
    assert ("are not known before a step" in caplog.text) == (sizes is None)


def test_ranks_that_planned_otherwise_end_the_step(steps: list[dict[str, Any]]) -> None:
    planned()
    OTHERWISE["other"] = 3
    plugin.announce(SIZES)
    with pytest.raises(ConfigError, match="announce the same tokens on all ranks"):
        train()


def test_forward_steps_that_take_several_items_end_the_step(steps: list[dict[str, Any]]) -> None:
    planned()
    plugin.announce(SIZES)
    OTHERWISE["per"] = 2
    with pytest.raises(ConfigError, match="took 16 items of an iterator for 8 microbatches"):
        train(data_iterator=iter(range(16)))
