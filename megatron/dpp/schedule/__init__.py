"""Scheduling of one pipeline rank: actions, memory caps, policies, the Scheduler.

Pure Python without torch, clock or communication. The executor (``runtime``) and the simulator
(``sim``) report arrivals to a :class:`Scheduler`, ask it for the next action, and carry it out.
Read ``actions.py`` first, then ``state.py`` (tasks that may run) and ``policies.py`` (the choice).
"""

from megatron.dpp.schedule.actions import DIRECTION_OF, Action, Geometry, Kind, groups_of
from megatron.dpp.schedule.caps import (
    UNIT,
    Allowance,
    LastRank,
    Memory,
    MemoryLimit,
    StaticSizes,
    beside_head,
    group_sizes,
    key_sizes,
    parse_cap,
    sliced_allowance,
)
from megatron.dpp.schedule.policies import (
    BUILT_IN,
    HOLDS_ALL,
    Policy,
    check_room,
    chosen_policy,
    find_policy,
)
from megatron.dpp.schedule.recording import (
    DecisionRecorder,
    Recording,
    Replay,
    replica_path,
)
from megatron.dpp.schedule.reference import Reference, peak_in_flight, peak_size, reference_order
from megatron.dpp.schedule.scheduler import Cause, Scheduler
from megatron.dpp.schedule.state import Budget, View

__all__ = [
    "BUILT_IN", "DIRECTION_OF", "HOLDS_ALL", "UNIT", "Action", "Allowance", "Budget", "Cause",
    "DecisionRecorder", "Geometry", "Kind", "LastRank", "Memory", "MemoryLimit", "Policy",
    "Recording", "Reference", "Replay", "Scheduler", "StaticSizes", "View", "beside_head",
    "check_room", "chosen_policy", "find_policy", "group_sizes", "groups_of", "key_sizes",
    "parse_cap", "peak_in_flight", "peak_size", "reference_order", "replica_path",
    "sliced_allowance",
]  # fmt: skip
