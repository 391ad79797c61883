#!/usr/bin/env python3
"""Measure what weight gradients apart from B cost the host, with Transformer Engine's layers.

    python profiling/bench_te_wgrad.py

One GPU and one process, with layers so small that the host is the limit. Rows: the host's CPU time
of a chunk's F, B and W per layer, with a fused backward and with W apart. Autograd runs in the
thread that is timed, and the device is waited for outside of the times.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import fused_products
import harness
import torch

from megatron.dpp.errors import exit_with

_BUILDS = ("local", "te")
"""Whose layers: megatron-core's own, and Transformer Engine's as a host builds them."""


class _Chunk:
    """A GPT under DistributedDataParallel on this process alone, and its tasks."""

    def __init__(self, args: argparse.Namespace, build: str, *, fusion: bool) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_local_spec,
            get_gpt_layer_with_transformer_engine_spec,
        )
        from megatron.core.transformer import TransformerConfig

        from megatron.dpp.core.wgrad.linear import WeightGradients

        if fusion:
            fused_products.provide()
        half = torch.cuda.is_available()
        config = TransformerConfig(
            num_layers=args.layers, hidden_size=args.hidden, num_attention_heads=args.heads,
            hidden_dropout=0.0, attention_dropout=0.0, bf16=half, bias_dropout_fusion=False,
            params_dtype=torch.bfloat16 if half else torch.float32,
            gradient_accumulation_fusion=fusion, persist_layer_norm=False,
            masked_softmax_fusion=False,
        )  # fmt: skip
        spec = (
            get_gpt_layer_local_spec()
            if build == "local"
            else get_gpt_layer_with_transformer_engine_spec()
        )
        model = GPTModel(config, spec, args.vocabulary, args.sequence)
        if half:
            model = model.cuda().bfloat16()
        self.chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        self.said: list[str] = []
        self.weights = WeightGradients([self.chunk], self.said.append)
        self.pieces = self.weights.num_pieces[0]
        device = "cuda" if half else "cpu"
        self.tokens = torch.arange(args.sequence, device=device)[None] % args.vocabulary
        self.loss: Any = None

    def forward(self) -> None:
        self.loss = self.chunk(self.tokens, self.tokens, None, labels=self.tokens).sum()

    def backward(self, number: int, apart: bool) -> None:
        with self.weights.collect(0, number) if apart else contextlib.nullcontext():
            self.loss.backward()

    def weight(self, number: int) -> None:
        for piece in range(self.pieces):
            self.weights.run(0, number, piece)


def _timed(function: Callable[..., None], *given: Any) -> float:
    """CPU time of this thread in microseconds; the device is idle before and after it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    before = time.thread_time()
    function(*given)
    took = time.thread_time() - before
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return took * 1e6


def _measure(args: argparse.Namespace, chunk: _Chunk, *, apart: bool) -> list[float]:
    """The least times of F, B and W per layer."""
    times: list[tuple[float, float, float]] = []
    for turn in range(args.rounds + 1):
        chunk.chunk.zero_grad_buffer()
        with chunk.weights.bound() if apart else contextlib.nullcontext():
            for number in range(args.microbatches):
                forward, backward = _timed(chunk.forward), _timed(chunk.backward, number, apart)
                found = forward, backward, _timed(chunk.weight, number) if apart else 0.0
                times += [found] if turn else []
    return [min(column) / args.layers for column in zip(*times, strict=True)] + [
        statistics.median(map(sum, times)) / args.layers
    ]


def _run(args: argparse.Namespace) -> None:
    rows = []
    engine = importlib.util.find_spec("transformer_engine") is not None
    for build in _BUILDS if engine else _BUILDS[:1]:
        for fusion in (False, True) if build != "local" else (False,):
            chunk = _Chunk(args, build, fusion=fusion)
            title = f"{build}, {'added to main_grad' if fusion else 'own gradient'}"
            fused, apart = (_measure(args, chunk, apart=apart) for apart in (False, True))
            for name, found in (("fused", fused), ("apart", apart)):
                whole = found[1] + found[2]
                cells = [f"{value:.1f}" for value in (*found[:3], whole, found[3])]
                rows.append((title, name, *cells, f"{whole / (fused[1] + fused[2]):.3f}"))
            print("\n".join(dict.fromkeys(chunk.said)))
    harness.print_table(
        "layers | backward | F us | B us | W us | B + W us | median F + B + W us | / fused", rows
    )


def main() -> int:
    """Measure and print the table."""
    parser = harness.new_parser(
        __doc__, layers=12, hidden=512, heads=8, sequence=128, vocabulary=512, microbatches=8,
        rounds=(4, "steps that are timed, after one that is not"),
    )  # fmt: skip
    args = parser.parse_args()
    with harness.alone(seed=1), torch.autograd.set_multithreading_enabled(False):
        _run(args)
    return 0


if __name__ == "__main__":
    exit_with(main)
