"""Random models cut into stages, and the references that schedules are compared with."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

VOCABULARY = 32


@dataclass(frozen=True)
class Case:
    """A random model and batch.

    Args:
        v: stages per rank.
        m: microbatches.
        rows: of a microbatch.
        length: tokens of a row.
        hidden: width.
        pair: stages exchange a second tensor, which takes no gradient.
        keyword: all stages take a keyword argument.
        packed: a microbatch is one row of documents, whose places all stages take.
        frozen: share of parameters that are not trained.
        dropout: of each block.
        dtype: of the parameters.
        scale: ``scale_grads``.
    """

    v: int
    m: int
    rows: int
    length: int
    hidden: int
    pair: bool
    keyword: bool
    frozen: float
    dropout: float
    dtype: torch.dtype
    scale: bool
    packed: bool

    @classmethod
    def random(cls, seed: int, p: int) -> Case:
        """The case of a seed for ``p`` ranks, with a number of microbatches that PyTorch takes."""
        draw = random.Random(seed * 10 + p)
        v, packed = draw.choice([1, 1, 2]), seed % 4 == 3
        return cls(
            v=v,
            m=p * draw.randint(1, 3),
            rows=draw.randint(1, 3) if not packed else 1,
            length=draw.randint(1, 12),
            hidden=draw.choice([8, 16, 24]),
            pair=draw.random() < 0.3,
            keyword=draw.random() < 0.3,
            frozen=draw.choice([0.0, 0.0, 0.5, 0.9]),
            dropout=0.2 if v == 1 and draw.random() < 0.3 else 0.0,
            dtype=draw.choice([torch.float32, torch.float32, torch.bfloat16]),
            scale=draw.random() < 0.7,
            packed=packed,
        )


class Block(nn.Module):
    """Causal attention or none, and a feed-forward part."""

    def __init__(self, case: Case, draw: random.Random) -> None:
        super().__init__()
        h = case.hidden
        self.norm, self.attends = nn.LayerNorm(h), draw.random() < 0.5
        self.qkv = nn.Linear(h, 3 * h, bias=draw.random() < 0.5) if self.attends else None
        self.up, self.down = nn.Linear(h, 2 * h), nn.Linear(2 * h, h, bias=draw.random() < 0.5)
        self.drop = nn.Dropout(case.dropout)

    def forward(self, x: torch.Tensor, documents: Sequence[int]) -> torch.Tensor:
        """``documents``: tokens of each document of a row [rows, tokens, hidden]."""
        if self.qkv is not None:
            each = self.qkv(self.norm(x)).unsqueeze(1).split(documents, dim=2)
            attend = partial(nn.functional.scaled_dot_product_attention, is_causal=True)
            found = [attend(*document.chunk(3, dim=-1)) for document in each if document.numel()]
            x = x + torch.cat(found, dim=2).squeeze(1)
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Part(nn.Module):
    """One stage: embedding on the first, head on the last, blocks on each."""

    def __init__(self, case: Case, index: int, num_stages: int, draw: random.Random) -> None:
        super().__init__()
        self.pair, self.is_last = case.pair, index == num_stages - 1
        self.embedding = nn.Embedding(VOCABULARY, case.hidden) if index == 0 else None
        self.blocks = nn.ModuleList(Block(case, draw) for _ in range(draw.randint(1, 2)))
        self.head = nn.Linear(case.hidden, VOCABULARY, bias=False) if self.is_last else None

    def forward(
        self, x: torch.Tensor, shift: torch.Tensor | None = None, *, bias: Any = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        lengths = [x.shape[1]] if cu_seqlens is None else cu_seqlens.flatten().diff().tolist()
        if self.embedding is not None:
            shift = (x % 3).to(self.embedding.weight.dtype).unsqueeze(-1) if self.pair else None
            x = self.embedding(x)
        if shift is not None:
            x = x + shift
        if bias is not None:
            x = x * bias.to(x.dtype)
        for block in self.blocks:
            x = block(x, lengths)
        if self.head is not None:
            return self.head(x)
        return (x, shift) if self.pair else x


def parts(case: Case, seed: int, num_stages: int) -> list[Part]:
    """All stages of a model, the same on all ranks."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    made = [Part(case, index, num_stages, draw).to(case.dtype) for index in range(num_stages)]
    for parameter in [parameter for part in made for parameter in part.parameters()]:
        parameter.requires_grad_(draw.random() >= case.frozen)
    made[-1].head.weight.requires_grad_()  # type: ignore[union-attr]
    return made


def stages_of(
    made: Sequence[nn.Module], group: dist.ProcessGroup | None = None
) -> list[PipelineStage]:
    """This rank's stages of a model."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    device = torch.device("cpu")
    return [
        PipelineStage(made[index], index, len(made), device, group=group)
        for index in range(rank, len(made), size)
    ]


def batch(case: Case, seed: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Tokens, targets and keyword arguments of a whole batch."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case.m * case.rows, case.length)
    tokens, targets = (torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(2))
    bias = torch.rand((shape[0], 1, 1), generator=generator) + 0.5
    keywords = {"bias": bias} if case.keyword else {}
    if case.packed:
        keywords["cu_seqlens"] = torch.stack([ends(case.length, 3, generator) for _ in tokens])
    return tokens, targets, keywords


def ends(length: int, number: int, generator: torch.Generator) -> torch.Tensor:
    """Starts of the ``number`` documents of a packed row, and its length; some are empty."""
    drawn = torch.randint(0, length + 1, (number - 1,), generator=generator)
    return torch.cat([torch.tensor([0]), drawn.sort().values, torch.tensor([length])])


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the tokens."""
    return nn.functional.cross_entropy(output.float().flatten(0, 1), target.flatten())


def gradients(made: Sequence[nn.Module]) -> list[torch.Tensor | None]:
    """A copy of each parameter's gradient."""
    found = [parameter.grad for part in made for parameter in part.parameters()]
    plain = [each.to_local() if isinstance(each, DTensor) else each for each in found]
    return [None if gradient is None else gradient.clone() for gradient in plain]


def run(
    schedule: Any, stages: Sequence[PipelineStage], given: Any, num_steps: int = 2
) -> list[torch.Tensor | None]:
    """Two steps and an evaluation; losses, outputs and gradients of this rank.

    Args:
        stages: of this rank.
        given: tokens, targets and keyword arguments.
    """
    tokens, targets, keywords = given
    made = [stage.submod for stage in stages]
    args = [tokens] if stages[0].is_first else []
    target = targets if stages[-1].is_last else None
    found: list[Any] = []
    torch.manual_seed(5)
    for _ in range(num_steps):
        losses: list[torch.Tensor] = []
        found += [schedule.step(*args, target=target, losses=losses, **keywords), *losses]
    found += gradients(made)
    for part in made:
        part.eval()
    with torch.no_grad():
        found += [schedule.eval(*args, target=target, losses=losses, **keywords), *losses]
    return found


def by_hand(
    made: Sequence[nn.Module], given: Any, scale: int, keywords: Sequence[Mapping[str, Any]] = ()
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses and outputs of one process that has all stages; gradients are left at the parameters.

    Args:
        given: lists of tokens and targets, by microbatch.
        scale: gradients are divided by it.
        keywords: arguments of all stages, by microbatch.
    """
    losses, outputs = [], []
    for index, (tokens, target) in enumerate(zip(*given, strict=True)):
        x: Any = (tokens,)
        for part in made:
            x = part(*x, **(keywords[index] if keywords else {}))
            x = x if isinstance(x, tuple) else (x,)
        outputs.append(x[0].detach())
        losses.append(loss_fn(x[0], target))
        losses[-1].backward()
    for parameter in [parameter for part in made for parameter in part.parameters()]:
        if parameter.grad is not None:
            parameter.grad.div_(scale)
    return losses, outputs


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> str:
    """Text about the first unequal item; empty if all are equal bit by bit."""
    if len(one) != len(other):
        return f"{len(one)} and {len(other)} items"
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        if (a is None) != (b is None) or (a is not None and not torch.equal(a, b)):
            return f"item {index} of {len(one)}: {a} and {b}"
    return ""
