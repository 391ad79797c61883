"""Lines about what limits a run: the host's time per task, launching, the allocator."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.dpp.config import GRAPHS_PAY_FROM
from megatron.dpp.errors import Text, setting

TOLD_AFTER = 5
"""Training steps after which the lines are logged, once."""


def host_line(us_per_task: float, launching: float) -> str:
    """The line of a rank. The device works at least for the rest of the tasks' time, hence a bound.

    Args:
        us_per_task: microseconds of the host per task, without PyTorch's launches.
        launching: share of launching in the tasks' time; 0 on a CPU, and where graphs are replayed.
    """
    text = f"dynamic pipeline: the host takes {us_per_task:.0f} us per task"
    if launching:
        text += f" beside launching, which takes {launching:.0%} of the tasks' time"
    if launching >= GRAPHS_PAY_FROM:
        text += (
            ": launch-bound: a micro_batch_size twice as large would save up to "
            f"{launching / 2:.0%} per sample"
        )
    return text


def allocator_lines(retries: int, steps: int) -> Sequence[str]:
    """The line of a rank whose allocator ran out of memory ``retries`` times in so many steps, gave
    its cached memory back and asked for it again.
    """
    if not retries:
        return []
    activation_cap = setting("activation_cap", "static")
    slice_tokens = setting("slice_tokens", "N")
    off = setting("cuda_graphs", "off")
    return [
        Text(
            "dynamic pipeline: the device's memory is full: PyTorch gave memory back and asked "
            f"for it again {retries} times in {steps} steps, which waits for all work; less "
            f"memory: {activation_cap} or less, {slice_tokens}, {off}",
            activation_cap,
            slice_tokens,
            off,
        )
    ]
