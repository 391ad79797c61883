#!/usr/bin/env python3
"""Time F, B and W of one layer's slice by its tokens and by the keys before it, on one GPU.

    python profiling/bench_slices.py
    python profiling/bench_slices.py --small          # on a CPU, tiny

A layer of RMSNorm, attention with grouped queries, RMSNorm and SwiGLU runs slices of a long row.
Keys and values of earlier slices wait in the store of ``core.slices``, where the gradients of all
keys are added, too. B computes input gradients; W the weight gradients of the layer's four
products, added into fp32. Printed: the times of each task by tokens and earlier keys; attention
alone, by the kernels that are there.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import harness
import torch
import torch.nn.functional as F

from megatron.dpp.core.prefix_attention import attend
from megatron.dpp.core.slices import Row, Unit, attend_in_slice
from megatron.dpp.core.varlen import kernels_for
from megatron.dpp.core.wgrad.fused import wgrad_gemm_accum_fp32
from megatron.dpp.errors import ConfigError, exit_with

Sizes = tuple[int, int]
"""Tokens of a slice, and keys before it."""


def parse_arguments() -> Any:
    """The command line."""
    parser = harness.new_parser(
        __doc__, tokens="512,1024,2048,4096,8192", keys="0,4096,16384,65536,131072", hidden=4096,
        heads=32, groups=8, ffn=14336, repeats=7, seconds=(150.0, "begin no measurement after"),
        json=("", "file for the results"), small=(False, "tiny sizes, for a CPU"),
    )  # fmt: skip
    args = parser.parse_args()
    if args.small:
        args.tokens, args.keys, args.hidden, args.heads = "16,32,64", "0,64,256", 64, 4
        args.groups, args.ffn, args.repeats = 2, 128, 2
    return args


class Deferred(torch.autograd.Function):
    """A product whose backward computes the input's gradient and keeps the weight's for W."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: Any, waiting: list[Any]) -> torch.Tensor:
        """The product, [s, b, out]."""
        ctx.save_for_backward(given)
        ctx.weight, ctx.waiting = weight, waiting
        return F.linear(given, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """The input's gradient."""
        ctx.waiting.append((ctx.saved_tensors[0], gradient, ctx.weight))
        return gradient @ ctx.weight, None, None


class Layer:
    """One transformer layer, over tokens of one row."""

    def __init__(self, args: Any, device: str, dtype: torch.dtype) -> None:
        h, self.size = args.hidden, args.hidden // args.heads
        self.heads, self.groups = args.heads, args.groups
        shapes = {
            "qkv": ((self.heads + 2 * self.groups) * self.size, h),
            "proj": (h, self.heads * self.size), "fc1": (2 * args.ffn, h), "fc2": (h, args.ffn),
        }  # fmt: skip
        self.weights: dict[str, Any] = {}
        for name, shape in shapes.items():
            weight: Any = torch.randn(shape, device=device, dtype=dtype).mul_(shape[1] ** -0.5)
            weight.main_grad = torch.zeros(shape, device=device, dtype=torch.float32)
            self.weights[name] = weight
        self.waiting: list[Any] = []

    def forward(self, hidden: torch.Tensor, row: Row, unit: Unit) -> torch.Tensor:
        """[s, 1, h] -> [s, 1, h]."""
        qkv = self._product("qkv", F.rms_norm(hidden, hidden.shape[-1:]))
        q, k, v = qkv.unflatten(-1, (-1, self.size)).split(
            [self.heads, self.groups, self.groups], dim=2
        )

        def kernel(*given: torch.Tensor) -> torch.Tensor:
            return attend(*given, unit.spans, scale=self.size**-0.5)

        attended = attend_in_slice(q, k, v, row, unit, kernel)
        hidden = hidden + self._product("proj", attended)
        gate, up = self._product("fc1", F.rms_norm(hidden, hidden.shape[-1:])).chunk(2, dim=-1)
        return hidden + self._product("fc2", F.silu(gate) * up)

    def _product(self, name: str, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Deferred.apply(given, self.weights[name], self.waiting)  # type: ignore[no-untyped-call]
        return found

    def weight(self) -> None:
        """Compute the deferred weight gradients."""
        for given, gradient, weight in self.waiting:
            wgrad_gemm_accum_fp32(given.flatten(0, 1), gradient.flatten(0, 1), weight.main_grad)
        self.waiting.clear()


class Clock:
    """Times the parts of a round on the device, in milliseconds."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """End a part, and begin the next."""
        if self._on_gpu:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def parts(self) -> list[float]:
        """The parts since the last call."""
        if self._on_gpu:
            torch.cuda.synchronize()
        pairs = itertools.pairwise(self._marks)
        found = [a.elapsed_time(b) if self._on_gpu else 1e3 * (b - a) for a, b in pairs]
        self._marks = []
        return found


def median_of(repeats: int, one_round: Callable[[], list[float]]) -> list[float]:
    """Medians of a round's parts, after two rounds that do not count."""
    for _ in range(2):
        one_round()
    rounds = [one_round() for _ in range(repeats)]
    return [statistics.median(part) for part in zip(*rounds, strict=True)]


def row_of(args: Any, sizes: Sizes, like: torch.Tensor) -> tuple[Row, Unit]:
    """A row in which a slice of ``sizes`` has another one after it, whose gradients are there."""
    tokens, keys = sizes
    total, size = keys + 2 * tokens, args.hidden // args.heads
    key = torch.randn(keys, 1, args.groups, size, device=like.device, dtype=like.dtype)
    row, later = Row(total, key, key), Unit(0, keys + tokens, total, total)
    if keys:
        row.put(Unit(0, 0, keys, total), key, key)
    zeros = key.new_zeros(total, *key.shape[1:])
    row.share(later, [zeros, zeros])
    return row, Unit(0, keys, keys + tokens, total)


def layer_times(args: Any, layer: Layer, sizes: Sizes, like: torch.Tensor) -> list[float]:
    """Milliseconds of F, B and W of one slice."""
    row, unit = row_of(args, sizes, like)
    clock = Clock(like.device.type)
    hidden = torch.randn(sizes[0], 1, args.hidden, device=like.device, dtype=like.dtype)
    gradient = torch.randn_like(hidden)

    def one_round() -> list[float]:
        given = hidden.clone().requires_grad_()
        clock.mark()
        output = layer.forward(given, row, unit)
        clock.mark()
        output.backward(gradient)
        clock.mark()
        layer.weight()
        clock.mark()
        return clock.parts()

    return median_of(args.repeats, one_round)


def attention_times(args: Any, sizes: Sizes, kernel: str, like: torch.Tensor) -> list[float]:
    """Milliseconds of the forward and the backward of attention alone."""
    tokens, keys = sizes
    size, clock = args.hidden // args.heads, Clock(like.device.type)
    shapes = ((tokens, args.heads), (keys + tokens, args.groups), (keys + tokens, args.groups))
    given = [
        torch.randn(n, 1, h, size, device=like.device, dtype=like.dtype, requires_grad=True)
        for n, h in shapes
    ]
    spans = Unit(0, keys, keys + tokens, keys + tokens).spans

    def one_round() -> list[float]:
        clock.mark()
        output = attend(*given, spans, scale=size**-0.5, kernel=kernel)
        clock.mark()
        torch.autograd.grad(output, given, output)
        clock.mark()
        return clock.parts()

    return median_of(args.repeats, one_round)


def measure(args: Any, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """All measurements, until the time is spent; each is printed as soon as it is there."""
    begin, layer = time.perf_counter(), Layer(args, device, dtype)
    like = torch.empty(0, device=device, dtype=dtype)
    all_sizes = list(
        itertools.product(map(int, args.tokens.split(",")), map(int, args.keys.split(",")))
    )
    times: dict[Sizes, list[float]] = {}
    for sizes in all_sizes:
        if time.perf_counter() - begin < 0.7 * args.seconds:
            times[sizes] = layer_times(args, layer, sizes, like)
    print(f"\nOne layer of hidden {args.hidden}, {args.heads} heads, {args.groups} groups, ms:\n")
    harness.print_table(
        "tokens | keys before | F | B | W | us a token | of the largest slice's rate",
        (layer_row(times, sizes) for sizes in times),
    )
    names = ["sdpa", *kernels_for(like.new_empty(1, 1, args.heads, args.hidden // args.heads))]
    alone: dict[str, list[float]] = {}
    for sizes in all_sizes:
        for name in names:
            if time.perf_counter() - begin < args.seconds:
                tokens, keys = sizes
                alone[f"{tokens} | {keys} | {name}"] = attention_times(args, sizes, name, like)
    print("\nAttention alone, ms:\n")
    harness.print_table(
        "tokens | keys before | kernel | forward | backward",
        ([name, *(f"{each:.3f}" for each in found)] for name, found in alone.items()),
    )
    return {"layer": {str(sizes): each for sizes, each in times.items()}, "attention": alone}


def layer_row(times: dict[Sizes, list[float]], sizes: Sizes) -> Sequence[object]:
    """A row of the table of a layer."""
    tokens, keys = sizes
    rate = sum(times[sizes]) / tokens
    largest = max(n for n, before in times if before == keys)
    share = sum(times[largest, keys]) / largest / rate
    return (tokens, keys, *(f"{each:.3f}" for each in times[sizes]), f"{1e3 * rate:.2f}",
            f"{share:.0%}")  # fmt: skip


def main() -> int:
    """Measure and print."""
    args = parse_arguments()
    device = "cuda" if torch.cuda.is_available() and not args.small else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if device == "cpu" and not args.small:
        raise ConfigError("no GPU: use --small")
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, PyTorch {torch.__version__}, {str(dtype).removeprefix('torch.')}")
    torch.manual_seed(1)
    harness.write_json(args.json, {"settings": vars(args), **measure(args, device, dtype)})
    return 0


if __name__ == "__main__":
    exit_with(main)
