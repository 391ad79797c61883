"""What may run next on a pipeline rank, and what shall: actions, caps, policies, Scheduler.

Pure Python, no torch, no clock, no communication. The executor (``runtime``) and the simulator
(``sim``) tell a :class:`Scheduler` what has arrived and ask it for the next action; carrying it out
is theirs. Start reading at ``actions.py``, then ``state.py`` (the safe rule) and ``policies.py``
(the choice).
"""

from megatron.dpp.schedule.actions import DIRECTION_OF, Action, Geometry, Kind
from megatron.dpp.schedule.caps import (
    Cap,
    Memory,
    beside_head,
    default_cap,
    head_room,
    parse_cap,
)
from megatron.dpp.schedule.policies import BUILT_IN, Policy, check_room, find_policy
from megatron.dpp.schedule.recording import (
    Recorder,
    Recording,
    Replay,
    check_recording,
    replica_path,
)
from megatron.dpp.schedule.reference import peak_in_flight, reference_order
from megatron.dpp.schedule.scheduler import FORWARD, GRADIENT, Cause, Scheduler, Stall
from megatron.dpp.schedule.state import View

__all__ = [
    "BUILT_IN",
    "DIRECTION_OF",
    "FORWARD",
    "GRADIENT",
    "Action",
    "Cap",
    "Cause",
    "Geometry",
    "Kind",
    "Memory",
    "Policy",
    "Recorder",
    "Recording",
    "Replay",
    "Scheduler",
    "Stall",
    "View",
    "beside_head",
    "check_recording",
    "check_room",
    "default_cap",
    "find_policy",
    "head_room",
    "parse_cap",
    "peak_in_flight",
    "reference_order",
    "replica_path",
]
