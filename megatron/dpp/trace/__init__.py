"""Recording of what every rank does. :mod:`megatron.dpp.report` reads it. Imports no torch."""

from megatron.dpp.trace.recorder import NullRecorder, Recorder, open_recorder
from megatron.dpp.trace.schema import TraceLayout, parse_iterations
from megatron.dpp.trace.vocabulary import IdleCause

__all__ = [
    "IdleCause", "NullRecorder", "Recorder", "TraceLayout", "open_recorder", "parse_iterations",
]  # fmt: skip
