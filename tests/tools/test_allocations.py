"""The accounting of a recorded step: what lives at a peak, and what is reserved between it."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "profiling"))

from allocations import ALLOC, BEGIN, DONE, END, MAP, UNMAP, analyse  # noqa: E402


def test_a_peak_is_told_apart_by_what_lives_and_what_is_lost_between_it() -> None:
    """B frees one of two blocks; the next F does not fit into that hole."""
    events = [
        (BEGIN, 0, 0), (ALLOC, 10, 10), (ALLOC, 20, 10), (END, 0, 0),
        (BEGIN, 1, 0), (ALLOC, 30, 5), (DONE, 10, 10), (END, 1, 0),
        (BEGIN, 2, 0), (MAP, 40, 20), (ALLOC, 35, 15), (END, 2, 0),
        (BEGIN, 3, 0), (DONE, 20, 10), (DONE, 30, 5), (END, 3, 0), (UNMAP, 50, 10),
    ]  # fmt: skip
    tasks = [("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("W", 0, 0)]
    found = analyse(
        {"blocks": [(0, 10)], "mapped": [(0, 10), (10, 30)], "events": events, "tasks": tasks}
    )
    assert (found["used"], found["reserved"]) == (40, 60)
    at = found["at used"]
    assert at["running"] == "F0 1"
    assert at["categories"] == {
        "model and before the step": 10,
        "kept for W: inputs": 10,
        "kept for W: output gradients": 5,
        "of the running F": 15,
    }
    assert (at["holes"], at["free"], at["largest holes"]) == (2, 20, [10, 10])
    (growth,) = found["growths"]
    assert growth == {"bytes": 20, "free before": 15, "task": "F0 1", "asked": 15}


def test_activations_in_flight_are_those_whose_backward_has_not_begun() -> None:
    events = [
        (MAP, 0, 100), (BEGIN, 0, 0), (ALLOC, 0, 10), (END, 0, 0), (ALLOC, 10, 1),
        (BEGIN, 1, 0), (ALLOC, 20, 10), (END, 1, 0), (BEGIN, 2, 0), (ALLOC, 30, 40),
    ]  # fmt: skip
    tasks = [("F", 0, 0), ("F", 1, 0), ("B", 1, 0)]
    found = analyse({"blocks": [], "mapped": [], "events": events, "tasks": tasks})
    assert found["at used"]["categories"] == {
        "activations in flight": 10,
        "inputs and between tasks": 1,
        "activation of the running B": 10,
        "of the running B": 40,
    }
