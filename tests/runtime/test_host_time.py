"""Lines about the host's time per task."""

from __future__ import annotations

import re

import pytest

from megatron.dpp.errors import render
from megatron.dpp.runtime.host_time import host_lines


@pytest.mark.parametrize(
    ("launching", "replayed", "found"),
    [
        (0.0, False, ["the host takes 42 us per task"]),
        (0.9, True, ["the host takes 42 us per task"]),
        (0.4, False, ["beside launching, which takes 40% of the tasks' time"]),
        (0.9, False, ["launching, which takes 90%", "would save up to 90% .* up to 45%"]),
    ],
)  # fmt: skip
def test_a_launch_bound_run_is_told_what_helps(
    launching: float, replayed: bool, found: list[str]
) -> None:
    lines = list(map(render, host_lines(42.4, launching, replayed=replayed)))
    assert len(lines) == len(found)
    for line, expected in zip(lines, found, strict=True):
        assert re.search(expected, line), line
