"""The what-if benchmark: alternating disturbances, and the comparison of gains."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "profiling"))

from bench_whatif import EverySecond, row  # noqa: E402


class Slow:
    delays_messages = True

    def message_seconds(self, source: int, destination: int, number: int) -> float:
        return 0.04


def test_links_are_slow_in_every_second_iteration() -> None:
    """In an iteration a channel carries one message per microbatch."""
    injector = EverySecond(Slow(), num_microbatches=2)
    late = [injector.message_seconds(0, 1, number) for number in range(8)]
    assert late == [0, 0, 0.04, 0.04, 0, 0, 0.04, 0.04]


def test_gains_are_those_of_mean_times() -> None:
    found = row("all", [(1.0, 0.9), (3.0, 2.8)], [1.8, 1.7])
    assert "gain measured 12.5%, predicted 7.5%" in found
    assert row("all", [], [1.0]) == "all: none"
