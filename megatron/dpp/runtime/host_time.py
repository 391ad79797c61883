"""Lines about the host's time per task, and about what helps where launching is the limit."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.dpp.config import GRAPHS_PAY_FROM
from megatron.dpp.errors import core_setting, setting

TOLD_AFTER = 5
"""Training steps after which the lines are logged, once."""


def host_lines(us_per_task: float, launching: float, *, replayed: bool) -> Sequence[str]:
    """The lines of a rank.

    The device works at least for the rest of the tasks' time, hence the bounds.

    Args:
        us_per_task: microseconds of the host per task, without PyTorch's launches.
        launching: share of launching in the tasks' time; 0 on a CPU.
        replayed: CUDA graphs are replayed.
    """
    text = f"dynamic pipeline: the host takes {us_per_task:.0f} us per task"
    if not launching or replayed:
        return [text]
    share = f"{text} beside launching, which takes {launching:.0%} of the tasks' time"
    if launching < GRAPHS_PAY_FROM:
        return [share]
    return [
        share,
        f"dynamic pipeline: launch-bound: CUDA graphs ({setting('cuda_graphs', 'on')}) would save "
        f"up to {launching:.0%} of the tasks' time, a {core_setting('micro_batch_size')} twice as "
        f"large up to {launching / 2:.0%} per sample",
    ]
