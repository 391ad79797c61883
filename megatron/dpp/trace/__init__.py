"""Recording of what every rank does. :mod:`megatron.dpp.report` reads it. Imports no torch."""

from megatron.dpp.trace.recorder import NullRecorder, Recorder, open_recorder
from megatron.dpp.trace.schema import IdleCause, TraceLayout, parse_iterations

__all__ = [
    "IdleCause", "NullRecorder", "Recorder", "TraceLayout", "open_recorder", "parse_iterations",
]  # fmt: skip
