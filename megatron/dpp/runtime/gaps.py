"""Gaps: the spans in which a rank runs nothing, with their causes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

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

    On a GPU a gap lasts from the end of the work that is queued when it is opened to the moment at
    which the device gets to what is queued behind its end: no time of the host.

    Args:
        recorder: takes each gap with its cause.
        decider: explains why nothing may run.
    """

    def __init__(self, recorder: Recorder, decider: Decider) -> None:
        self._recorder, self._decider = recorder, decider
        self._is_read = recorder.enabled
        self._tells_causes = recorder.enabled and decider.shares_order
        self._since = 0.0
        self._start: Any = None
        self.cause = self._detail = ""
        """The cause of the open gap; empty if none is open."""

    @property
    def seconds(self) -> float:
        """Seconds since the open gap began."""
        return time.monotonic() - self._since

    def open(self, cause: str, detail: str = "") -> None:
        """Begin a gap, or go on with it for another cause if it began or goes on with another
        member's delay.
        """
        begins = self.cause in ("", _LOOKAHEAD)
        if cause == self.cause or not (begins or {cause, self.cause} & _AGREEMENT):
            return
        self.close()
        if begins:
            self._since = time.monotonic()
        self._start, self.cause, self._detail = self._recorder.mark(), cause, detail

    def close(self) -> None:
        """End the gap; nothing if none is open."""
        if self.cause:
            self._recorder.gap(self._start, self._recorder.mark(), self.cause, self._detail)
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
        if cause := self._tells_causes and self._decider.held_up_by(arrived):
            self.open(cause)
            return
        stall = self._decider.scheduler.stall()
        waiting = " ".join(f"{_KIND_NAMES[way]}{chunk}" for way, chunk in stall.channels)
        self.open(_TRACE_CAUSES.get(stall.cause, _MESSAGE), waiting)
