"""Gaps: the spans in which a rank runs nothing, with their causes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megatron.dpp.runtime.agreement import Decider
from megatron.dpp.schedule import DIRECTION_OF, Cause
from megatron.dpp.trace import IdleCause, Recorder

_TRACE_CAUSES = {
    Cause.WARMUP: IdleCause.WARM_UP,
    Cause.MEMORY_CAP: IdleCause.MEMORY_CAP,
}
_LOOKAHEAD, _MESSAGE = IdleCause.LOOKAHEAD, IdleCause.MESSAGE
_AGREEMENT = {IdleCause.LATE_MEMBER, IdleCause.LATE_LEADER}
_KIND_NAMES = {way: kind.name for kind, way in DIRECTION_OF.items()}


class Gaps:
    """The gaps of one rank. At most one is open; it goes to the recorder when it is closed.

    Args:
        recorder: takes each gap with its cause.
        decider: explains why nothing may run.
    """

    def __init__(self, recorder: Recorder, decider: Decider) -> None:
        self._recorder, self._decider = recorder, decider
        self._is_read = recorder.enabled
        self._tells_causes = recorder.enabled and decider.shares_order
        self._start = self._cause_start = 0
        self.cause = self._detail = ""
        """The cause of the open gap; empty if none is open."""

    @property
    def seconds(self) -> float:
        """Seconds since the open gap began."""
        return (time.monotonic_ns() - self._start) * 1e-9

    def open(self, cause: str, detail: str = "") -> None:
        """Begin a gap, or go on with it for another cause if it began or goes on with another
        member's delay.
        """
        if self.cause == _LOOKAHEAD != cause:
            self.close()
        now = time.monotonic_ns()
        if not self.cause:
            self._start = now
        elif cause == self.cause or not {cause, self.cause} & _AGREEMENT:
            return
        else:
            self._recorder.gap(self._cause_start, now, self.cause, self._detail)
        self._cause_start, self.cause, self._detail = now, cause, detail

    def close(self) -> None:
        """End the gap; nothing if none is open."""
        if self.cause:
            self._recorder.gap(self._cause_start, time.monotonic_ns(), self.cause, self._detail)
            self.cause = ""

    def describe(self, arrived: Sequence[int]) -> None:
        """Open a gap at a look that found no task, with the cause that the decider tells if it is
        recorded.

        Args:
            arrived: as :meth:`Decider.next` was given it.
        """
        if self.cause not in ("", _LOOKAHEAD) and not self._tells_causes:
            return
        if not self._is_read:
            self.open(_MESSAGE)
            return
        cause = self._decider.held_up_by(arrived) if self._tells_causes else ""
        if cause:
            self.open(cause)
            return
        stall = self._decider.scheduler.stall()
        waiting = " ".join(f"{_KIND_NAMES[way]}{chunk}" for way, chunk in stall.channels)
        self.open(_TRACE_CAUSES.get(stall.cause, _MESSAGE), waiting)
