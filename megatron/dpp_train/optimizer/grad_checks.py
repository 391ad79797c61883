"""Checks of gradients for NaN and infinity that do not make the host wait for a GPU.

DistributedDataParallel reads every bucket's norm before its reduction
(``--check-for-nan-in-loss-and-grad``), and the host waits for each. ``GradientChecks`` computes the
same norms and reads them after the whole step is launched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron.dpp.core import compat

_CHECK = "distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.check_grads"


def on_the_way(value: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A copy on the host, and the event of its arrival; None if it is there already."""
    if not value.is_cuda:
        return value, None
    copy = value.to("cpu", non_blocking=True)  # into pinned memory
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return copy, event


class GradientChecks:
    """The norms of one rank's gradient buckets, on their way to the host."""

    def __init__(self) -> None:
        self._unread: list[tuple[int, torch.Tensor, Any]] = []

    @contextmanager
    def late(self) -> Iterator[None]:
        """Collect the norms of a step's gradients for :meth:`read`. Checks for large gradients
        stay megatron-core's.
        """
        self._unread.clear()  # of a step that was broken off
        with compat.patched(_CHECK, self._look):
            yield

    def _look(
        self, original: Any, group: Any, check_for_nan_or_inf: bool, check_for_large: bool
    ) -> None:
        if check_for_large:
            original(group, check_for_nan_or_inf, check_for_large)
            return
        for number, bucket in enumerate(group.buckets):
            self._unread.append((number, *on_the_way(bucket.grad_data.norm(p=2))))

    def read(self) -> str | None:
        """Wait for the norms of this step; a text with the first that is not finite and its
        bucket, or None. The parameters may have been updated with such gradients.
        """
        unread, self._unread = self._unread, []
        for number, norm, event in unread:
            if event is not None:
                event.synchronize()
            if not math.isfinite(norm.item()):
                return f"{norm.item()} in bucket {number}"
        return None
