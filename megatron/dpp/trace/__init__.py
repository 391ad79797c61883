"""Recording, merging and analysing what happened.

Front door for those who record: the executor, the static-schedule wrapper and the training loop.
Merging (``merge``) and analysis (``analysis``) are imported by the scripts that need them.
Importing this imports no torch.
"""

from megatron.dpp.trace.recorder import NullRecorder, Recorder, open_recorder
from megatron.dpp.trace.schema import TraceLayout, parse_iterations

__all__ = ["NullRecorder", "Recorder", "TraceLayout", "open_recorder", "parse_iterations"]
