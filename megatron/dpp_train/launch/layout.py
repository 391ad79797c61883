"""Possible layouts, and the nearest to one that is not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from megatron.dpp.errors import ConfigError

MOST = 1 << 20
"""Most processes of a node, nodes, and seconds to wait: more is taken for a slip."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes of model parallelism; the other ranks are data parallel.

    Args:
        context: ranks that share a sequence.
        expert: ranks that share a layer's experts. They are of several replicas.
    """

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    context: int = 1
    expert: int = 1

    def text(self) -> str:
        """The layout as options of ``train``."""
        words = f"--tp {self.tensor} --pp {self.pipeline}"
        more = {"--chunks": self.chunks, "--cp": self.context, "--ep": self.expert}
        return words + "".join(f" {name} {size}" for name, size in more.items() if size > 1)

    @property
    def replica_size(self) -> int:
        """Ranks that hold a data-parallel replica."""
        return self.tensor * self.pipeline * self.context


@dataclass(frozen=True, kw_only=True)
class Divisible:
    """The sizes of a model that a layout must divide.

    Args:
        num_layers: 0 where other flags cut them.
        num_experts: 0 without experts.
        has_context: layouts with context parallelism are among the possible ones.
    """

    num_layers: int
    num_heads: int
    num_experts: int = 0
    has_context: bool = True


def check_layout(layout: Layout, world_size: int, model: Divisible, devices: str) -> None:
    """Refuse a layout that is not possible.

    Args:
        devices: the option that gives their number, ``--gpus`` or ``--procs``.

    Raises:
        ConfigError: with the nearest possible layout in it.
    """
    problem = _problem(layout, world_size, model)
    if problem is None:
        return
    near = nearest_layout(layout, world_size, model)
    size = layout.replica_size
    hint = f"nearest possible: {near.text()}"
    if world_size % size and _problem(layout, size, model) is None:
        hint += f", or {devices} {max(1, round(world_size / size)) * size}"
    raise ConfigError(f"{layout.text()}: {problem}; {hint}")


def _problem(layout: Layout, world_size: int, model: Divisible) -> str | None:
    size, stages = layout.replica_size, layout.pipeline * layout.chunks
    if world_size % size:
        sizes = [layout.tensor, layout.pipeline]
        factors = " x ".join(str(n) for n in (*sizes, *[layout.context] * (layout.context > 1)))
        return f"{factors} = {size} does not divide {world_size} ranks"
    if model.num_heads % layout.tensor:
        return f"{model.num_heads} attention heads cannot be divided by {layout.tensor}"
    if layout.chunks > 1 and layout.pipeline == 1:
        return "chunks need a pipeline"
    if model.num_layers % stages:
        return f"{model.num_layers} layers cannot be divided by {stages} virtual stages"
    return _expert_problem(layout, world_size, model)


def _expert_problem(layout: Layout, world_size: int, model: Divisible) -> str | None:
    if layout.expert == 1:
        return None
    if not model.num_experts:
        return "expert parallelism needs --num-experts"
    if model.num_experts % layout.expert:
        return f"{model.num_experts} experts cannot be divided by {layout.expert}"
    ranks = world_size // layout.pipeline
    if ranks % layout.expert:
        return f"{ranks} ranks of a stage cannot be divided by {layout.expert}"
    return None


def possible_layouts(world_size: int, model: Divisible) -> Iterable[Layout]:
    """All that :func:`check_layout` lets pass, with up to 8 chunks."""
    small = [n for n in range(1, math.isqrt(world_size) + 1) if world_size % n == 0]
    sizes = sorted({*small, *(world_size // n for n in small)})
    contexts = sizes if model.has_context else [1]
    experts = sizes if model.num_experts else [1]
    for tensor, pipeline, context, expert in product(sizes, sizes, contexts, experts):
        for chunks in (1, 2, 3, 4, 6, 8) if pipeline > 1 else (1,):
            layout = Layout(
                tensor=tensor, pipeline=pipeline, chunks=chunks, context=context, expert=expert
            )
            if _problem(layout, world_size, model) is None:
                yield layout


def nearest_layout(asked: Layout, world_size: int, model: Divisible) -> Layout:
    """The possible layout whose sizes differ least, by their ratios."""

    def distance(layout: Layout) -> float:
        sizes: list[tuple[int, int]] = [
            (getattr(layout, field.name), getattr(asked, field.name))
            for field in dataclasses.fields(Layout)
        ]
        return sum(max(a / b, b / a) - 1 for a, b in sizes)

    return min(possible_layouts(world_size, model), key=distance)


def nearest_multiple(number: int, of: int) -> int:
    """The multiple of ``of`` (not 0) that is nearest to ``number``.

    >>> nearest_multiple(30, 8)
    32
    """
    return max(1, round(number / of)) * of
