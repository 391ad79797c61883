"""Time steps of PyTorch's pipelining and of the dynamic pipeline in turns, on the same rows.

    torchrun --nproc-per-node 2 profiling/bench_torch.py [--rounds 6] [--hidden 192]

Prints one line per kind of rows: milliseconds per step of each schedule, and the ratio. Rows of
unlike length are padded to the longest for PyTorch's schedule, which takes no others.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.dpp.torch import DynamicSchedule

VOCABULARY = 1024


class Block(nn.Module):
    """Causal attention and a feed-forward part."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = hidden // 32
        self.one, self.two = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = (
            each.reshape(b, s, self.heads, -1).transpose(1, 2)
            for each in self.qkv(self.one(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        return x + self.down(nn.functional.gelu(self.up(self.two(x))))


def stage_of(rank: int, size: int, options: argparse.Namespace, device: torch.device) -> Any:
    """This rank's stage."""
    torch.manual_seed(1)
    blocks: list[nn.Module] = [Block(options.hidden) for _ in range(options.layers)]
    if rank == 0:
        blocks.insert(0, nn.Embedding(VOCABULARY, options.hidden))
    if rank == size - 1:
        blocks.append(nn.Linear(options.hidden, VOCABULARY))
    return PipelineStage(nn.Sequential(*blocks).to(device), rank, size, device)


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the tokens that are not padding."""
    return nn.functional.cross_entropy(output.float().flatten(0, 1), target.flatten())


def lengths(kind: str, options: argparse.Namespace) -> list[int]:
    """Tokens of each row of a step."""
    if kind == "equal":
        return [options.longest] * options.rows
    draw = random.Random(3)
    drawn = [min(options.longest, int(draw.lognormvariate(0, 0.8) * options.longest / 4) + 8)
             for _ in range(options.rows - 1)]  # fmt: skip
    return [*drawn, options.longest]


def step_of(name: str, kind: str, options: argparse.Namespace) -> Callable[[], None]:
    """A step of one schedule on one kind of rows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    stage = stage_of(rank, size, options, device)
    rows = [torch.randint(0, VOCABULARY, (1, n), device=device) for n in lengths(kind, options)]
    targets: Any = rows
    given: Any = rows
    if name == "torch":
        longest = max(row.shape[1] for row in rows)
        given = torch.cat([nn.functional.pad(row, (0, longest - row.shape[1])) for row in rows])
        targets = torch.cat(
            [nn.functional.pad(row, (0, longest - row.shape[1]), value=-100) for row in rows]
        )
        schedule: Any = Schedule1F1B(stage, options.rows, loss_fn)
    else:
        schedule = DynamicSchedule(stage, options.rows, loss_fn)
    args = [given] if rank == 0 else []

    def step() -> None:
        stage.submod.zero_grad()
        target = targets if rank == size - 1 else None
        schedule.step(*args, target=target, return_outputs=False)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("rounds", 6), ("hidden", 192), ("layers", 4), ("rows", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--longest", type=int, default=512)
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    for kind in ("equal", "unlike"):
        steps = {name: step_of(name, kind, options) for name in ("torch", "ours")}
        took: dict[str, list[float]] = {name: [] for name in steps}
        for round_ in range(options.rounds + 2):
            for name, step in steps.items():
                dist.barrier()
                begin = time.perf_counter()
                step()
                dist.barrier()
                if round_ > 1:
                    took[name].append(time.perf_counter() - begin)
        if dist.get_rank() == 0:
            ms = {name: 1e3 * statistics.median(each) for name, each in took.items()}
            print(
                f"{kind}: Schedule1F1B {ms['torch']:.1f} ms, DynamicSchedule {ms['ours']:.1f} ms, "
                f"{ms['ours'] / ms['torch']:.2f}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
