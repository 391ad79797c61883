"""The place of a rank in a run, as its trace names it."""

from __future__ import annotations

from megatron.dpp.trace import TraceLayout
from megatron.dpp_train.options.run_config import Settings


def trace_layout(args: Settings, data: int = 0, pipeline: int = 0, tensor: int = 0) -> TraceLayout:
    """The coordinates of a rank as its trace names them."""
    return TraceLayout(
        data=data,
        pipeline=pipeline,
        tensor=tensor,
        data_size=args.data_parallel_size,
        pipeline_size=args.pipeline_model_parallel_size,
        tensor_size=args.tensor_model_parallel_size,
        num_chunks=args.virtual_pipeline_model_parallel_size or 1,
        schedule="dpp" if args.use_dpp else "pp",
    )
