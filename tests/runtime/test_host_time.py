"""Lines about the host's time per task."""

from __future__ import annotations

import re

import pytest

from megatron.dpp.runtime.host_time import allocator_lines, host_line


@pytest.mark.parametrize(
    ("launching", "found"),
    [
        (0.0, "the host takes 42 us per task$"),
        (0.4, "beside launching, which takes 40% of the tasks' time$"),
        (0.9, "launching, which takes 90%.*: launch-bound: a micro_batch_size .* up to 45%"),
    ],
)
def test_a_launch_bound_run_is_told_what_helps(launching: float, found: str) -> None:
    assert re.search(found, host_line(42.4, launching))


def test_a_full_device_is_told_with_what_takes_less_memory() -> None:
    assert not allocator_lines(0, 4)
    (line,) = allocator_lines(3, 4)
    assert "again 3 times in 4 steps" in line and re.search("activation.cap.*static", line)
