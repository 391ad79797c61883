"""The growth of a rank that the soak of ``tools/soak.sh`` counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.soak import SAMPLES, STEADY, Growth


def test_what_a_rank_gives_back_at_its_end_hides_no_growth() -> None:
    growth, size = Growth(), {"memory (MiB)": 100, "descriptors": 40, "threads": 9}
    rank = SimpleNamespace(
        pid=1, memory_info=lambda: SimpleNamespace(rss=size["memory (MiB)"] << 20),
        num_fds=lambda: size["descriptors"], num_threads=lambda: size["threads"],
    )  # fmt: skip
    job: Any = SimpleNamespace(first=0, processes=lambda: {"rank 0": [rank]})

    def look(iteration: int) -> None:
        job.iteration = lambda: iteration
        growth.look(job)

    for step in range(3 * SAMPLES):
        size["descriptors"] += step % 2
        look(STEADY + step)
    size["descriptors"] = 12
    for _ in range(2 * SAMPLES):
        look(STEADY + 3 * SAMPLES - 1)
    assert growth.ranks() == 1
    assert growth.most() == {"memory (MiB)": 0.0, "descriptors": 10.0, "threads": 0.0}
