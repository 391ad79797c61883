"""Loops in the forms of hosts give the same numbers under the plugin's schedule, bit by bit.

Each test starts its ranks once. The dynamic runs have delays, so that they take another order.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.hosts import NEWEST, Hosts
from tests.runtime.cases import LATE, OPTIMIZED, UNLIKE
from tests.runtime.launcher import REPOSITORY, Place, run_ranks

WORKER = Path(__file__).with_name("worker.py")
MOST = 2 * 16
"""Tokens of a microbatch of the worker's."""


def case(name: str, loop: str, *runs: dict[str, Any], **layout: Any) -> dict[str, Any]:
    """A case of two stages x two chunks, if ``layout`` names no others."""
    given = {
        "p": 2,
        "v": 2,
        "m": 2,
        "layers": 4,
        "spec": "host",
        "runs": runs or [{"inject": LATE}],
    }
    return {"name": name, "loop": loop, **given, **layout}


EARLY = {"overlap": True}
FUSED = {"split_backward": "off", "inject": LATE}
TOLD = {"max_tokens": MOST, "inject": LATE}
ACCUMULATES = [
    case("outer", "accumulates", holds="outer", **OPTIMIZED),
    case("functions", "accumulates", holds="functions", **EARLY),
    case("nothing, wrapped", "accumulates", holds="nothing", wrapped=True, **EARLY),
]
"""Several calls per optimizer step: NeMo-RL's form, and others that leave it to the host."""
FURTHER = [
    case("null", "accumulates", holds="null", **EARLY),
    case("after static calls", "accumulates", holds="nothing", steps=3, static_calls=[0, 1, 4],
         **EARLY),
    case("no overlap", "accumulates", holds="outer"),
    case("outer v1", "accumulates", holds="outer", v=1, m=3, calls=3, steps=3, **EARLY),
    case("slime, replicas", "slime", **OPTIMIZED),
    case("slime, at the end", "slime"),
    case("bridge, replicas", "bridge", **OPTIMIZED),
    case("bridge, gather", "bridge", gather=True, **OPTIMIZED),
    case("frozen in turns", "freezes", turns=["linear_fc1"], distributed_optimizer=True),
]  # fmt: skip
"""With two replicas."""
VERL = [
    case("verl", "verl", TOLD, model=UNLIKE),
    case("verl v1", "verl", TOLD, v=1, model=UNLIKE, critic=24),
]
"""An actor, its reference and a wider critic: lengths are nominal, weights leave between turns."""
EXCHANGED = [case("slime", "slime"), case("slime v1", "slime", v=1), case("bridge", "bridge")]
"""Functions that a host sets and clears between steps, losses that count tokens."""
REPLAYS = [
    case("replays", "replays", m=8),
    case("asked for", "replays", {"call_order": "megatron", "inject": LATE}, m=8,
         told=False),
]  # fmt: skip
"""A model whose routers replay, and a host that asks for megatron-core's order of calls."""
FREEZES = [
    case("layers", "freezes", {"inject": LATE}, FUSED, turns=["linear_fc1", "linear_qkv"]),
    case("all but adapters", "freezes", turns=["embedding"], frozen=["mlp", "layernorm"]),
    case("a stage", "freezes", turns=[""], stage=0),
    case("the last stage", "freezes", turns=["layers"], stage=1, v=1),
]
"""Weights, and whole stages, that a host freezes every other step."""
FAILS = [
    case("a rank fails", "slime", fails=[({}, 1, "of the host's own")]),
    case("too many tokens", "verl", TOLD, v=1, model=UNLIKE, critic=24,
         fails=[({"max_tokens": MOST // 2}, 0, f"a microbatch has {MOST} tokens")]),
]  # fmt: skip
"""The run after a failed one is as if there had been none."""


def check(num_ranks: int, cases: list[dict[str, Any]], place: Place | None = None) -> None:
    output = run_ranks(
        WORKER, num_ranks, [json.dumps(cases)], timeout=240, place=place, fresh=place is not None
    )
    for each in cases:
        assert f"CASE {each['name']} ok" in output


def test_gradients_that_the_host_accumulates_over_calls_are_reduced_by_the_host() -> None:
    check(4, ACCUMULATES)


def test_an_actor_its_reference_and_a_wider_critic_take_turns() -> None:
    check(2, VERL)


def test_functions_that_a_host_sets_and_clears_between_steps() -> None:
    check(2, EXCHANGED)


def test_forward_only_steps_keep_the_order_of_calls_where_a_host_needs_it() -> None:
    check(2, REPLAYS)


def test_weights_that_a_host_freezes_between_steps() -> None:
    check(2, FREEZES)


def test_an_error_of_a_rank_is_that_of_all_and_leaves_nothing_behind() -> None:
    check(2, FAILS)


@pytest.mark.slow
def test_two_replicas_of_further_hosts() -> None:
    check(4, FURTHER)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_newest_megatron_core(hosts: Hosts, num_ranks: int) -> None:
    root = hosts.unpacked(NEWEST)
    path = [root, REPOSITORY, root.parent, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    given = {"PYTHONPATH": os.pathsep.join(map(str, path))}
    cases = {2: VERL + EXCHANGED + REPLAYS + FREEZES + FAILS, 4: ACCUMULATES + FURTHER}
    check(num_ranks, cases[num_ranks], lambda _: ("", given))
