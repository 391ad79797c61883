"""The words of traces: kinds of events, and causes of idle time."""

from __future__ import annotations

import enum


class _Word(str, enum.Enum):
    """A member of an enumeration that is its value as text."""

    def __str__(self) -> str:
        return str(self.value)


class EventKind(_Word):
    """Kind of an event: the first entry of a recorded tuple, and its ``cat`` in the file."""

    TASK = "task"
    EXPERTS = "experts"
    WAIT = "wait"
    SEND = "send"
    ARRIVAL = "arrival"
    SPAN = "span"
    ITERATION = "iteration"
    COUNTER = "counter"


class IdleCause(_Word):
    """Cause of idle time. All but ``DRAIN`` are recorded; the analysis adds that one."""

    WARM_UP = "warm-up"
    DRAIN = "drain"
    MESSAGE = "message"
    MEMORY_CAP = "memory-cap"
    LATE_MEMBER = "late-member"
    LATE_LEADER = "late-leader"
    LOOKAHEAD = "lookahead"
    HOST = "host"
    SEND = "send"


CAUSES: dict[str, tuple[str, str]] = {
    IdleCause.WARM_UP: ("warm-up", "filling the pipeline at the start"),
    IdleCause.DRAIN: ("drain", "draining it at the end"),
    IdleCause.MESSAGE: ("waits for a message", "waiting for a message from a neighbour"),
    IdleCause.MEMORY_CAP: ("waits for memory", "held back by the activation cap"),
    IdleCause.LATE_MEMBER: (
        "waits for another rank's message",
        "waiting for a message that another rank of the stage lacks",
    ),
    IdleCause.LATE_LEADER: ("waits for its leader", "waiting for the stage's leader to decide"),
    IdleCause.LOOKAHEAD: ("waits for the device", "waiting for the device to catch up"),
    IdleCause.HOST: ("host", "the host: launching, deciding, Python"),
    IdleCause.SEND: ("waits for the receiver", "waiting for a receiver"),
}
"""Cause of idle time -> its name in a legend, and its meaning in a sentence."""
