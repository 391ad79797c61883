"""Lines about the host's time per task."""

from __future__ import annotations

import re

import pytest

from megatron.dpp.runtime.host_time import allocator_lines, host_lines


@pytest.mark.parametrize(
    ("launching", "replayed", "can_replay", "found"),
    [
        (0.0, False, True, ["the host takes 42 us per task"]),
        (0.9, True, True, ["the host takes 42 us per task"]),
        (0.4, False, True, ["beside launching, which takes 40% of the tasks' time"]),
        (0.9, False, True, ["launching, which takes 90%", "would save up to 90% .* up to 45%"]),
        (0.9, False, False, ["launching, which takes 90%", "launch-bound: a .* up to 45%"]),
    ],
)  # fmt: skip
def test_a_launch_bound_run_is_told_what_helps(
    launching: float, replayed: bool, can_replay: bool, found: list[str]
) -> None:
    """Graphs are named only where they can be captured."""
    given = host_lines(42.4, launching, replayed=replayed, can_replay=can_replay)
    lines = list(given)
    assert len(lines) == len(found)
    for line, expected in zip(lines, found, strict=True):
        assert re.search(expected, line), line


def test_a_full_device_is_told_with_what_takes_less_memory() -> None:
    assert not allocator_lines(0, 4)
    (line,) = allocator_lines(3, 4)
    assert "again 3 times in 4 steps" in line and re.search("activation.cap.*static", line)
