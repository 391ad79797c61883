#!/usr/bin/env python3
"""Count what a schedule costs the host: time with empty stages, Python calls with a small GPT.

    python profiling/bench_host.py

Two ranks on the CPU. Printed per schedule: the least CPU time of rank 0's thread per (microbatch,
chunk) of stages that compute nothing, megatron-core's over gloo and ours over shared memory; and
the least number of calls, of Python and of built-in functions (cProfile), per microbatch of a GPT
with one layer per chunk. ``sliced`` is ``split`` with microbatches in four slices, per slice.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from sleeping import DynamicPipeline, cpu_rank, megatron_step

from megatron.dpp import DppConfig, DppSchedule
from megatron.dpp.errors import exit_with

_RANKS, _SEQUENCE, _VOCABULARY, _HIDDEN = 2, 8, 32, 16
_PIECES = 6
"""Of each W of an empty stage."""
_SCHEDULES = ("static", "fused", "split", "sliced")
_SLICES, _SLICE_TOKENS = 4, 64


class _Empty(torch.nn.Module):
    """The parts of a model chunk that megatron-core's schedules use; computes nothing."""

    def __init__(self, config: Any, chunk: int) -> None:
        super().__init__()
        self.config, self.vp_stage, self.model_type = config, chunk, 1
        self.start = torch.nn.Parameter(torch.zeros(4, 1, 8))
        self._given: torch.Tensor | None = None

    def set_input_tensor(self, given: list[torch.Tensor | None]) -> None:
        self._given = given[0]

    def forward(self) -> torch.Tensor:
        return (self.start if self._given is None else self._given) * 1.0


class _EmptyRunner:
    """The executor's TaskRunner of stages that compute nothing."""

    _result = torch.zeros(4, 1, 8)

    def forward(self, chunk: int, microbatch: int, received: Any) -> torch.Tensor:
        return self._result

    def free_output(self, chunk: int, microbatch: int) -> None:
        pass

    def backward(self, chunk: int, microbatch: int, received: Any) -> torch.Tensor:
        return self._result

    def weight(self, chunk: int, microbatch: int, piece: int) -> None:
        pass

    def chunk_complete(self, chunk: int) -> None:
        pass


def _least(args: argparse.Namespace, step: Callable[[int], Any], units: int) -> list[float]:
    """The least and the median CPU time of this thread in a step, per unit; microseconds."""
    times = []
    for iteration in range(args.rounds + 1):
        dist.barrier()
        before = time.thread_time()
        step(iteration)
        times.append((time.thread_time() - before) * 1e6 / units)
    return [min(times[1:]), statistics.median(times[1:])]


def _measure_empty(args: argparse.Namespace, name: str) -> list[float]:
    v, m = args.chunks, args.microbatches
    if name == "static":
        return _least(args, lambda _: megatron_step(args.ranks, v, m, _Empty), m * v)
    pipeline = DynamicPipeline(args, v, split=name == "split", pieces=_PIECES)
    found = _least(args, lambda n: pipeline.step(args, m, n, _EmptyRunner()), m * v)
    pipeline.close()
    return found


class _Small:
    """A GPT with a layer per chunk, and a step of it."""

    def __init__(self, v: int, sequence: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig

        config = TransformerConfig(
            num_layers=_RANKS * v,
            hidden_size=_HIDDEN,
            num_attention_heads=2,
            pipeline_model_parallel_size=_RANKS,
            virtual_pipeline_model_parallel_size=v if v > 1 else None,
            pipeline_dtype=torch.float32,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            deallocate_pipeline_outputs=True,
            overlap_p2p_comm=v > 1,
            batch_p2p_comm=v == 1,
            gradient_accumulation_fusion=False,
        )
        self.chunks = []
        for stage in range(v):
            place: dict[str, Any] = {"ignore_virtual": False, "vp_stage": stage if v > 1 else None}
            self.chunks.append(
                GPTModel(
                    config,
                    get_gpt_layer_local_spec(),
                    _VOCABULARY,
                    sequence,
                    pre_process=parallel_state.is_pipeline_first_stage(**place),
                    post_process=parallel_state.is_pipeline_last_stage(**place),
                    share_embeddings_and_output_weights=False,
                    vp_stage=place["vp_stage"],
                )
            )
        self.v = v
        self.tokens = torch.arange(sequence)[None] % _VOCABULARY

    def step(self, function: Callable[..., Any], m: int) -> None:
        def forward_step(iterator: Any, chunk: torch.nn.Module) -> Any:
            output = chunk(self.tokens, self.tokens, None, labels=self.tokens)
            return output, lambda loss: (loss.mean(), {})

        function(
            forward_step_func=forward_step,
            data_iterator=[None] * self.v if self.v > 1 else None,
            model=self.chunks if self.v > 1 else self.chunks[0],
            num_microbatches=m,
            seq_length=self.tokens.numel(),
            micro_batch_size=1,
        )


def _count_calls(args: argparse.Namespace, name: str) -> list[float]:
    """The least calls per microbatch or slice, of a step with twice as many minus one."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    slices = _SLICES if name == "sliced" else 1
    sequence = _SLICES * _SLICE_TOKENS if slices > 1 else _SEQUENCE
    model, m = _Small(args.chunks, sequence), args.microbatches
    with contextlib.ExitStack() as around:
        function: Callable[..., Any] = get_forward_backward_func()
        if name != "static":
            config = DppConfig(
                split_backward="off" if name == "fused" else "on",
                transport=args.transport,
                slice_tokens=_SLICE_TOKENS if slices > 1 else 0,
            )
            function = around.enter_context(DppSchedule(config, log=lambda line: None))
        least = []
        for number in (m, 2 * m):
            counts = []
            for _ in range(args.rounds + 1):
                dist.barrier()
                profile = cProfile.Profile()
                profile.runcall(model.step, function, number)
                counts.append(sum(entry.callcount for entry in profile.getstats()))
            least.append(min(counts[1:]))
    return [(least[1] - least[0]) / m / slices]


def _run(args: argparse.Namespace) -> int:
    from megatron.core import parallel_state

    rows = []
    with cpu_rank():
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=_RANKS,
            virtual_pipeline_model_parallel_size=args.chunks if args.chunks > 1 else None,
        )
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(1)
        for name in _SCHEDULES:
            empty = [math.nan] * 2 if name == "sliced" else _measure_empty(args, name)
            rows.append((name, *empty, *_count_calls(args, name)))
        parallel_state.destroy_model_parallel()
        if dist.get_rank() == 0:
            harness.print_table(
                "schedule | us per chunk, least | median | calls per microbatch or slice",
                [(name, *map(_text, values)) for name, *values in rows],
            )
            harness.write_json(args.json, {"rows": rows})
    return 0


def _text(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"


def main() -> int:
    parser = harness.new_parser(
        __doc__,
        chunks=(1, "per rank"),
        microbatches=(32, "per step"),
        rounds=(10, "steps of each, after one that is not counted"),
        json=("", "also write the results here"),
    )
    args = parser.parse_args()
    args.ranks, args.inject, args.sleep_ms = _RANKS, "", 0.0
    args.cap = args.transport = "auto"
    if "RANK" not in os.environ:
        return harness.start_ranks(args.ranks, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    return _run(args)


if __name__ == "__main__":
    exit_with(main)
