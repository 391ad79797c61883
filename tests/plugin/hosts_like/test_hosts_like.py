"""Loops in the forms of hosts give the same numbers under the plugin's schedule, bit by bit.

Each test starts its ranks once. The dynamic runs have delays, so that they take another order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.runtime.cases import LATE, OPTIMIZED
from tests.runtime.launcher import run_ranks

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
