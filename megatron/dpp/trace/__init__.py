"""Recording, merging and analysing what happened.

Front door for those who record: the executor, the static-schedule wrapper and the training loop.
Merging (``merge``) and analysis (``analysis``) are imported by the commands that need them; what
records imports neither. Importing this imports no torch.
"""

from megatron.dpp.trace.recorder import NullRecorder, Recorder, open_recorder
from megatron.dpp.trace.schema import TraceLayout, parse_iterations
from megatron.dpp.trace.vocabulary import IdleCause

__all__ = [
    "IdleCause", "NullRecorder", "Recorder", "TraceLayout", "open_recorder", "parse_iterations",
]  # fmt: skip
