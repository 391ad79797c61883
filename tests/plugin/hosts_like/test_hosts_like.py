"""Loops in the forms of hosts give the same numbers under the plugin's schedule, bit by bit.

Each test starts its ranks once. The dynamic runs have delays, so that they take another order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.cases import LATE, OPTIMIZED, UNLIKE
from tests.runtime.launcher import run_ranks

MOST = 2 * 16
"""Tokens of a microbatch of the worker's."""
WORKER = Path(__file__).with_name("worker.py")


def case(name: str, loop: str, *runs: dict[str, Any], **layout: Any) -> dict[str, Any]:
    """A case of two stages x two chunks, if ``layout`` names no others."""
    given = {"p": 2, "v": 2, "m": 2, "layers": 4, "runs": runs or [{"inject": LATE}]}
    return {"name": name, "loop": loop, **given, **layout}


def check(num_ranks: int, *cases: dict[str, Any]) -> None:
    output = run_ranks(WORKER, num_ranks, [json.dumps(cases)], timeout=200)
    for each in cases:
        assert f"CASE {each['name']} ok" in output


def test_gradients_that_the_host_accumulates_over_calls_are_reduced_by_the_host() -> None:
    """NeMo-RL's form, under the model's own ``no_sync()``, and others that leave it to the host."""
    early = {"overlap": True}
    check(
        4,
        case("outer", "accumulates", holds="outer", **OPTIMIZED),
        case("functions", "accumulates", holds="functions", **early),
        case("null", "accumulates", holds="null", wrapped=True, **early),
        case("nothing", "accumulates", holds="nothing", **early),
        case("after static calls", "accumulates", holds="nothing", static_calls=[0, 1, 4], **early),
    )


def test_an_actor_its_reference_and_a_wider_critic_take_turns() -> None:
    """verl's form: lengths are nominal, and weights are offloaded between the turns."""
    told = {"max_tokens": MOST, "inject": LATE}
    check(
        2,
        case("verl", "verl", told, model=UNLIKE),
        case("verl v1", "verl", told, v=1, model=UNLIKE, critic=24),
    )


def test_functions_that_a_host_sets_and_clears_between_steps() -> None:
    """The forms of slime, with losses that count tokens, and of Megatron-Bridge."""
    check(2, case("slime", "slime"), case("slime v1", "slime", v=1), case("bridge", "bridge"))


def test_forward_only_steps_keep_the_order_of_calls_where_a_host_needs_it() -> None:
    """A model whose routers replay says so; other hosts ask for it."""
    asked = {"forward_only_order": "megatron", "inject": LATE}
    check(
        2,
        case("replays", "replays", m=8),
        case("asked for", "replays", asked, m=8, told=False),
    )


@pytest.mark.slow
def test_functions_that_a_host_of_two_replicas_sets_and_clears_between_steps() -> None:
    both = OPTIMIZED
    check(
        4,
        case("slime", "slime", **both),
        case("slime, at the end", "slime"),
        case("bridge", "bridge", **both),
        case("bridge, gather", "bridge", gather=True, **both),
    )


def test_weights_that_a_host_freezes_between_steps() -> None:
    fused = {"split_backward": False, "inject": LATE}
    check(
        2,
        case("layers", "freezes", {"inject": LATE}, fused, turns=["linear_fc1", "linear_qkv"]),
        case("all but adapters", "freezes", turns=["embedding"], frozen=["mlp", "layernorm"]),
        case("a stage", "freezes", turns=[""], stage=0),
        case("the last stage", "freezes", turns=["layers"], stage=1, v=1),
    )
