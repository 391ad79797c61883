"""The direction of a message along the pipeline, for schedules, transports, traces and the
simulator alike.
"""

from __future__ import annotations

import enum


class Direction(enum.IntEnum):
    """The way that a message travels between two stages."""

    FORWARD = 0
    """To the next stage: its input."""
    BACKWARD = 1
    """To the stage before: the gradient of its output."""
